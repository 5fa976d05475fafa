"""The whole chain learns: two scenes are told apart, and their cameras come out of noise."""

import pytest
import torch
from torch import Tensor

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.sfm.cameras import CameraSet

pytest.importorskip("diffusers")

from f3rm_ext.sfm.diffusion.checkpoint import dense_from_sparse
from f3rm_ext.sfm.diffusion.model import ModelSize, RayDiffuser, masked_loss, upsample
from f3rm_ext.sfm.diffusion.plan import set_trained
from f3rm_ext.sfm.diffusion.prediction import predict_maps
from f3rm_ext.sfm.diffusion.schedule import STEPS, add_noise, make_scheduler
from f3rm_ext.sfm.metrics import compare_poses
from f3rm_ext.sfm.rays import cell_ndc, map_points, render_maps, scene_scale
from f3rm_ext.sfm.recovery import recover_cameras

SIDE_PX, PATCHES, IMAGES = 42, 3, 3
SIZE = ModelSize(width=64, depth=4, heads=1, head_width=16)


def around(generator: torch.Generator) -> CameraSet:
    """Cameras of a scene that look at the origin from all sides."""
    eyes = 2 * torch.nn.functional.normalize(torch.randn(IMAGES, 3, generator=generator), dim=1).double()
    up = torch.randn(IMAGES, 3, generator=generator).double()
    right = torch.nn.functional.normalize(torch.linalg.cross(-eyes, up), dim=1)
    rotations = torch.stack([right, torch.linalg.cross(-eyes / 2, right), -eyes / 2], dim=2)
    sizes = torch.full((IMAGES, 2), float(SIDE_PX), dtype=torch.float64)
    return CameraSet(rotations, eyes, sizes, sizes / 2, sizes)


def maps_of(scenes: list[CameraSet], cells: int) -> Tensor:
    """Their maps, with a surface at depth 2."""
    depth = torch.full((IMAGES, cells, cells), 2.0, dtype=torch.float64)
    return torch.stack([render_maps(scene, depth, scene_scale(scene, depth)) for scene in scenes]).float()


def train(model: RayDiffuser, photos: Tensor, clean: Tensor, ndc: Tensor, times: int, lr: float) -> None:
    """Trains on a batch of scenes."""
    generator = torch.Generator().manual_seed(1)
    encoded, batch = model.encoder(photos), len(photos)
    known = torch.ones_like(clean[:, :, 0])
    alphas_bar = make_scheduler().alphas_cumprod
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], lr=lr)
    for _ in range(times):
        steps = torch.randint(STEPS, (batch,), generator=generator)
        noisy = add_noise(clean, torch.randn(clean.shape, generator=generator), steps, known, alphas_bar)
        loss = masked_loss(model(noisy, steps, encoded, ndc.expand(batch, -1, -1, -1, -1), known), clean, known)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def test_cameras_of_learnt_scenes_come_out_of_noise_and_a_dense_model_betters_them(
    small_vit: VisionTransformer,
) -> None:
    generator = torch.Generator().manual_seed(0)
    scenes = [around(generator) for _ in range(2)]
    photos = torch.rand(2, IMAGES, 3, SIDE_PX, SIDE_PX, generator=generator)
    maps = maps_of(scenes, PATCHES)
    ndc = cell_ndc(PATCHES, PATCHES, maps).expand(IMAGES, -1, -1, -1)

    torch.manual_seed(0)
    model = RayDiffuser(small_vit, SIZE, "sparse")
    set_trained(model, freeze_encoder=True, freeze_transformer=False)
    train(model, photos.repeat(4, 1, 1, 1, 1), maps.repeat(4, 1, 1, 1, 1), ndc, times=120, lr=3e-3)
    for photo, scene in zip(photos, scenes, strict=True):
        made = predict_maps(model, photo, ndc, torch.Generator().manual_seed(5))
        found = recover_cameras(made, scene.sizes_px, (scene.focals_px, scene.principals_px))
        truth = (scene.rotations.numpy(), scene.centers.numpy())
        metrics = compare_poses((found.rotations.numpy(), found.centers.numpy()), truth)
        assert metrics.rra["15"] == 1.0 and metrics.rta["15"] == 1.0, metrics

    dense = RayDiffuser(small_vit, SIZE, "dense", residual=True).eval()
    dense_from_sparse(dense, model.state_dict())
    true = maps_of(scenes, PATCHES * dense.cells)

    def error(of: RayDiffuser) -> float:
        """Mean distance of endpoints."""
        made = torch.stack([predict_maps(of, photo, ndc, torch.Generator().manual_seed(5)) for photo in photos])
        large = made if of.cells > 1 else upsample(made)
        return float((map_points(large)[1] - map_points(true)[1]).norm(dim=-1).mean())

    sparse_error, at_first = error(model), error(dense)
    assert at_first == pytest.approx(sparse_error, rel=0.1)
    set_trained(dense, freeze_encoder=True, freeze_transformer=True)
    dense.rays.requires_grad_(False)
    train(dense, photos, true, ndc, times=40, lr=3e-4)
    assert error(dense) < 0.85 * at_first
