"""Cameras around an object with a depth that varies over the image, and COLMAP's made-up scenes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.sfm.cameras import CameraSet
from f3rm_ext.sfm.database import FeatureDatabase


def random_rotations(count: int, generator: torch.Generator) -> Tensor:
    matrices = torch.randn(count, 3, 3, generator=generator, dtype=torch.float64)
    Q, R = torch.linalg.qr(matrices)
    Q = Q * R.diagonal(dim1=1, dim2=2).sign()[:, None]
    return Q * torch.linalg.det(Q).sign()[:, None, None]


@pytest.fixture
def cameras() -> CameraSet:
    """Five cameras of any pose, landscape and portrait, none with its principal point in the middle."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([[640.0, 480], [480, 640], [500, 500], [640, 480], [300, 200]], dtype=torch.float64)
    return CameraSet(
        rotations=random_rotations(5, generator),
        centers=torch.randn(5, 3, generator=generator, dtype=torch.float64),
        focals_px=sizes.amin(1, keepdim=True) * torch.tensor([[0.8, 0.9]], dtype=torch.float64),
        principals_px=sizes * torch.tensor([0.55, 0.46], dtype=torch.float64),
        sizes_px=sizes,
    )


@pytest.fixture
def depth() -> Tensor:
    """Depth of 16 × 16 cells of five cameras, 1 to 3."""
    return 1 + 2 * torch.rand(5, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def small_vit() -> VisionTransformer:
    """A ViT of two blocks with random weights, trained on images of 3 × 3 patches, as it were."""
    torch.manual_seed(0)
    return VisionTransformer.from_size(64, 2, 3, 14)


class MadeUp(NamedTuple):
    """A made-up scene with 200 points that every photo sees."""

    truth: Any
    """``pycolmap.Reconstruction``."""
    database: FeatureDatabase
    """Its features and matches."""

    def write_images(self) -> list[str]:
        """Writes a plain picture for each photo. Returns their names."""
        for image in self.truth.images.values():
            camera = self.truth.camera(image.camera_id)
            Image.new("RGB", (camera.width, camera.height), (10, 200, 30)).save(self.database.images / image.name)
        return sorted(image.name for image in self.truth.images.values())

    def centre_error(self, model: Any) -> float:
        """The largest error of the camera centres of a model, by the extent of the true ones."""
        import pycolmap

        names = sorted(model.image(number).name for number in model.reg_image_ids())
        ours, true = (
            np.array([each.find_image_with_name(name).projection_center() for name in names])
            for each in (model, self.truth)
        )
        similarity = pycolmap.estimate_sim3d(ours, true)
        matrix = similarity.matrix()
        return float(np.abs(ours @ matrix[:, :3].T + matrix[:, 3] - true).max() / np.ptp(true))


@pytest.fixture
def make_scene(tmp_path: Path) -> Callable[..., MadeUp]:
    """Makes a scene without pictures; keywords are ``pycolmap.SyntheticDatasetOptions``."""
    pycolmap = pytest.importorskip("pycolmap")

    def make(**options: Any) -> MadeUp:
        pycolmap.set_random_seed(0)
        given = {"num_rigs": 1, "num_cameras_per_rig": 1, "num_frames_per_rig": 8, "num_points3D": 200}
        path, images = tmp_path / "database.db", tmp_path / "images"
        images.mkdir()
        with pycolmap.Database.open(path) as opened:
            truth = pycolmap.synthesize_dataset(pycolmap.SyntheticDatasetOptions(**given | options), opened)
        return MadeUp(truth, FeatureDatabase(path, images, tmp_path / "none", 1000, 1000))

    return make
