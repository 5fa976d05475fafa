"""`f3rm-ext sfm process --method diffusionsfm`: a network predicts, COLMAP triangulates and adjusts.

The network is a stand-in that knows the ray maps of the photos up to noise; no trained weights are at hand.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.sfm.cameras import CameraSet
from f3rm_ext.sfm.capture_cameras import read_capture_cameras
from f3rm_ext.sfm.diffusion import estimator
from f3rm_ext.sfm.diffusion.encoder import EncodedImages
from f3rm_ext.sfm.diffusion.model import ModelSize, RayDiffuser
from f3rm_ext.sfm.metrics import compare_poses
from f3rm_ext.sfm.rays import render_maps

pycolmap = pytest.importorskip("pycolmap")
pytest.importorskip("diffusers")
PHOTOS, WIDTH, HEIGHT, FOCAL = 8, 1024, 768, 1280.0
NOISE = 0.01


class KnowsThePhotos(RayDiffuser):
    """Predicts the true maps plus noise, whatever it sees."""

    def __init__(self, maps: Tensor) -> None:
        vit = VisionTransformer.from_size(64, 2, 3, 14)
        super().__init__(vit, ModelSize(width=64, depth=4, heads=1, head_width=16), "sparse")
        self.maps = maps + NOISE * torch.randn(maps.shape, generator=torch.Generator().manual_seed(0))

    def forward(self, noisy: Tensor, steps: Tensor, encoded: EncodedImages, ndc: Tensor, known: Any = None) -> Tensor:
        return self.maps[None]


def test_predicted_poses_are_refined(
    f3rm_ext: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pycolmap.set_random_seed(0)
    settings = pycolmap.SyntheticDatasetOptions(
        num_rigs=1, num_cameras_per_rig=1, num_frames_per_rig=PHOTOS, num_points3D=150, camera_width=WIDTH,
        camera_height=HEIGHT, camera_model_id=pycolmap.CameraModelId.PINHOLE,
        camera_params=[FOCAL, FOCAL, WIDTH / 2, HEIGHT / 2],
    )  # fmt: skip
    truth = pycolmap.synthesize_dataset(settings)
    images = sorted(truth.images.values(), key=lambda image: image.image_id)
    for image in images:
        image.name = f"frame_{image.image_id:05d}.png"
    folder = tmp_path / "photos"
    folder.mkdir()
    pycolmap.synthesize_images(pycolmap.SyntheticImageOptions(feature_patch_radius=12), truth, folder)
    poses = np.stack([image.cam_from_world().inverse().matrix() for image in images])
    sizes = torch.tensor([[WIDTH, HEIGHT]], dtype=torch.float64).expand(PHOTOS, -1)
    true = CameraSet(
        *(torch.from_numpy(part.copy()) for part in (poses[:, :, :3], poses[:, :, 3])),
        focals_px=torch.full((PHOTOS, 2), FOCAL, dtype=torch.float64),
        principals_px=sizes / 2,
        sizes_px=sizes,
    )
    crops = true.crop((sizes - HEIGHT) / 2, sizes.amin(dim=1), 42)
    # The scene is around the origin; a plane through it is good enough, since endpoints only give directions.
    depth = true.centers.norm(dim=1)[:, None, None].expand(-1, 3, 3)
    maps = render_maps(crops, depth, 1 / float(depth[0, 0, 0])).float()

    read: list[Path] = []
    weights = tmp_path / "stand-in"
    weights.write_bytes(b"first")
    monkeypatch.setenv(estimator.WEIGHTS, str(weights))
    monkeypatch.setattr(estimator, "read_weights", lambda path: read.append(path) or {})
    monkeypatch.setattr(estimator, "image_side_px", lambda path: 42)
    monkeypatch.setattr(estimator, "build_model", lambda state: KnowsThePhotos(maps))
    out = tmp_path / "capture"
    command = ("sfm", "process", "--images", folder, "--output", out, "--method", "diffusionsfm")
    f3rm_ext(*command).succeeds()
    f3rm_ext(*command).succeeds()
    assert read == [weights], "the second call has nothing to do"
    weights.write_bytes(b"trained again")

    def refuse(state: object) -> None:
        raise ConfigError("These are other weights.")

    monkeypatch.setattr(estimator, "build_model", refuse)
    assert "other weights" in f3rm_ext(*command).refuses()
    assert len(json.loads((out / "transforms.json").read_text())["frames"]) == PHOTOS
    found = read_capture_cameras(out).cameras
    metrics = compare_poses(
        (found.rotations.numpy(), found.centers.numpy()), (true.rotations.numpy(), true.centers.numpy())
    )
    assert metrics.rra["5"] == 1 and metrics.rta["5"] == 1 and metrics.auc_30 > 0.96, metrics
