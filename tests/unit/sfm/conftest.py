"""COLMAP's own made-up scenes: true cameras, and a database of their features and matches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.sfm.database import FeatureDatabase

pycolmap = pytest.importorskip("pycolmap")


class MadeUp(NamedTuple):
    """A made-up scene."""

    truth: Any
    """``pycolmap.Reconstruction``."""
    database: FeatureDatabase

    def centres(self, model: Any) -> tuple[np.ndarray, np.ndarray]:
        """Camera centres of a model, moved onto the true ones, and the true ones."""
        names = sorted(model.image(number).name for number in model.reg_image_ids())
        found = np.array([model.find_image_with_name(name).projection_center() for name in names])
        true = np.array([self.truth.find_image_with_name(name).projection_center() for name in names])
        matrix = pycolmap.estimate_sim3d(found, true).matrix()
        return found @ matrix[:, :3].T + matrix[:, 3], true


@pytest.fixture
def made_up(tmp_path: Path) -> Callable[..., MadeUp]:
    """Makes a scene; keywords are ``pycolmap.SyntheticDatasetOptions``."""

    def make(num_frames: int = 8, **options: Any) -> MadeUp:
        pycolmap.set_random_seed(0)
        path, images = tmp_path / "database.db", tmp_path / "images"
        settings = pycolmap.SyntheticDatasetOptions(
            num_rigs=1, num_cameras_per_rig=1, num_frames_per_rig=num_frames, num_points3D=200, **options
        )
        with pycolmap.Database.open(path) as opened:
            truth = pycolmap.synthesize_dataset(settings, opened)
        images.mkdir()
        for image in truth.images.values():
            camera = truth.camera(image.camera_id)
            (images / image.name).parent.mkdir(exist_ok=True)
            Image.new("RGB", (camera.width, camera.height), (10, 200, 30)).save(images / image.name)
        return MadeUp(truth, FeatureDatabase(path, images, tmp_path / "none", 1000, 1000))

    return make
