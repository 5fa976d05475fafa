"""From a model's maps to the cameras of photos, with a model that knows the answer."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.sfm.cameras import CameraSet

pytest.importorskip("diffusers")

from f3rm_ext.sfm.diffusion.encoder import EncodedImages
from f3rm_ext.sfm.diffusion.model import ModelSize, RayDiffuser
from f3rm_ext.sfm.diffusion.prediction import predict_photos
from f3rm_ext.sfm.rays import render_maps


class Oracle(RayDiffuser):
    """Predicts the true maps, whatever it sees."""

    def __init__(self, vit: VisionTransformer, maps: Tensor) -> None:
        super().__init__(vit, ModelSize(width=64, depth=4, heads=1, head_width=16), "sparse")
        self.maps = maps.float()
        self.seen: list[Tensor] = []
        self.encoder.register_forward_hook(lambda module, inputs, output: self.seen.append(inputs[0]))

    def forward(self, noisy: Tensor, steps: Tensor, encoded: EncodedImages, ndc: Tensor, known: Any = None) -> Tensor:
        assert encoded.patches.shape[1] == noisy.shape[1] == ndc.shape[1]
        return self.maps[None]


def test_cameras_are_those_of_the_whole_photos(cameras: CameraSet, depth: Tensor, small_vit: VisionTransformer) -> None:
    middle = CameraSet(
        cameras.rotations,
        cameras.centers,
        cameras.focals_px[:, :1].expand(-1, 2),
        cameras.sizes_px / 2,
        cameras.sizes_px,
    )
    sides = cameras.sizes_px.amin(dim=1)
    crops = middle.crop((cameras.sizes_px - sides[:, None]) / 2, sides, 224)
    oracle = Oracle(small_vit, render_maps(crops, depth))
    photos = [np.zeros((int(height), int(width), 3), np.uint8) for width, height in cameras.sizes_px]
    photos[0][:, 80:560] = 255  # the square in the middle of the first, 640 × 480
    found = predict_photos(oracle, iter(photos))  # which need not be in memory together
    true = middle.relative_to_first()
    torch.testing.assert_close(found.rotations, true.rotations, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.centers, true.centers, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.focals_px, true.focals_px, atol=1.0, rtol=0)
    torch.testing.assert_close(found.principals_px, true.principals_px, atol=1.0, rtol=0)
    assert oracle.seen[0].shape == (1, 5, 3, 224, 224) and (oracle.seen[0][0, 0] == 1).all()
