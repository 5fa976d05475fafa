"""Features on splats: the same on CUDA as on the CPU."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import SceneBox

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.queryable import score_image, score_points
from f3rm_ext.splat.features import lifting
from f3rm_ext.splat.features.heads import LiftedHead
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.model import SplatModel, SplatModelConfig

DIM = 70
"""More than are lifted at a time."""


def make_model(make_spec: Callable[..., Any]) -> SplatModel:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(300, *shape, generator=generator)

    box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
    model: SplatModel = SplatModelConfig(num_random=5, sh_degree=0).setup(scene_box=box, num_train_data=2, metadata={})
    model.set_gaussians(
        Gaussians(0.3 * normal(3), 0.3 * normal(3) - 2.5, normal(4), normal(1), normal(3), torch.zeros(300, 0, 3))
    )
    return model.eval()


def test_lifting_and_asking(make_spec: Callable[..., Any]) -> None:
    pose = torch.eye(4)[:3].repeat(2, 1, 1)
    pose[:, 2, 3] = torch.tensor([2.0, 2.5])
    cameras = Cameras(pose, fx=60.0, fy=60.0, cx=32.0, cy=24.0, width=64, height=48)
    values = np.random.default_rng(0).normal(size=(6, 8, DIM)).astype(np.float16)
    feature_map = FeatureMap(values, PatchGrid.covering(6, 8, 48, 64))
    unit = torch.nn.functional.normalize(torch.randn(1, DIM, generator=torch.Generator().manual_seed(1)), dim=1)
    query = Query("it", "dense", Embeddings(unit, ("it",)), Embeddings(torch.zeros(0, DIM), ()))
    found = {}
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(make_model(make_spec)).to(device)
        views = PinholeCameras.of(cameras).to(device)
        codes = lifting.lift_maps(model._scene(), views, DIM, lambda index: feature_map)
        assert codes.device.type == device
        model.lifted.add(LiftedHead(make_spec("dense", DIM), codes).to(device))
        scores, outputs = score_image(model, cameras[:1], [query])
        at = score_points(model, model.gaussians.means.detach().cpu()[:50] + 0.01, [query])
        found[device] = [codes, scores, outputs["feature_pca"], at]
    for one, two in zip(found["cpu"], found["cuda"], strict=True):
        difference = (one.float() - two.float().cpu()).abs()
        # A Gaussian at a threshold may be drawn on one and not on the other.
        assert difference.median() < 1e-3 and (difference > 0.02).float().mean() < 0.02 and one.float().std() > 0.05
