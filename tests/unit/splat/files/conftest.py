"""Gaussians of all kinds of values, comparing them, and files that cannot be read."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import read_splats
from f3rm_ext.splat.gaussians import Gaussians, sh_rest_count

Make = Callable[..., Gaussians]


@pytest.fixture
def make() -> Make:
    """Makes Gaussians; quaternions are not of length 1."""

    def gaussians(count: int = 40, degree: int = 3, seed: int = 0) -> Gaussians:
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(count, *shape, generator=random)

        return Gaussians(
            means=3 * normal(3),
            scales=normal(3) - 4,
            quats=2 * normal(4),
            opacities=2 * normal(1),
            features_dc=0.6 * normal(3),
            features_rest=0.2 * normal(sh_rest_count(degree), 3),
        )

    return gaussians


@pytest.fixture
def assert_same() -> Callable[[Gaussians, Gaussians], None]:
    """Compares Gaussians bit by bit."""

    def compare(ours: Gaussians, theirs: Gaussians) -> None:
        for name, value in theirs.tensors().items():
            assert ours.tensors()[name].dtype == torch.float32, name
            assert torch.equal(ours.tensors()[name], value), name

    return compare


@pytest.fixture
def assert_refused(tmp_path: Path) -> Callable[[str, bytes, str], None]:
    """Checks that a file of this name and content cannot be read, and what is said of it."""

    def check(name: str, content: bytes, message: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SplatFileError, match=message):
            read_splats(tmp_path / name)

    return check
