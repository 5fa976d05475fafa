"""A folder of small pictures that differ."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty pictures of 40 × 40 px with coloured squares."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for number in range(20):
        squares = random.integers(0, 255, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(squares.repeat(8, axis=0).repeat(8, axis=1)).save(folder / f"{number:02}.png")
    return folder
