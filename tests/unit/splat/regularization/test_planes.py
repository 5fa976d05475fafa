"""Depth of the Gaussians' planes: against intersections written out, exactness on planes, gradients, bad input."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.rasterize import Backend, rasterize
from f3rm_ext.splat.regularization.normals import MIN_COSINE, facing_normals, plane_depth
from f3rm_ext.splat.rendering import SplatScene, render

PLAIN = MipOptions(filter_2d=False, filter_3d=False)
WIDTH, HEIGHT, FOCAL = 24, 17, 22.0


def view_of(dtype: torch.dtype = torch.float32) -> PinholeCameras:
    K = torch.tensor([[FOCAL, 0, WIDTH / 2 + 0.3], [0, FOCAL, HEIGHT / 2 - 0.4], [0, 0, 1]], dtype=dtype)
    viewmat = torch.eye(4, dtype=dtype)
    viewmat[:3, 3] = torch.tensor([0.1, -0.2, 0.3])
    return PinholeCameras(viewmat[None], K[None], torch.tensor([WIDTH]), torch.tensor([HEIGHT]))


def cloud(dtype: torch.dtype, count: int = 30) -> Gaussians:
    """Flat Gaussians in front of the camera, in all directions."""
    dice = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice, dtype=torch.float64)

    means = torch.cat([0.6 * normal(count, 2), 3 + 0.5 * normal(count, 1)], dim=1)
    scales = torch.tensor([0.4, 0.3, 0.02], dtype=torch.float64).log() + 0.1 * normal(count, 3)
    rest = normal(count, 0, 3)
    values = means, scales, normal(count, 4), 1 + normal(count, 1), normal(count, 3), rest
    return Gaussians(*(value.to(dtype) for value in values))


def written_out(gaussians: Gaussians, view: PinholeCameras) -> tuple[Tensor, Tensor]:
    """Intersects every ray with every plane; returns the weighted mean of the depths, and the total weight."""
    viewmat, K = view.viewmats[0], view.Ks[0]
    scene = SplatScene(gaussians, PLAIN)
    weights = rasterize(scene.shapes(), torch.eye(len(gaussians)).to(K), scene.camera(view), backend="torch").colors
    rows, columns = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    pixels = torch.stack([columns, rows], dim=-1).to(K) + 0.5
    rays = torch.cat([(pixels - K[:2, 2]) / K[[0, 1], [0, 1]], torch.ones(HEIGHT, WIDTH, 1).to(K)], dim=-1)
    normals = facing_normals(gaussians.normals(), gaussians.means, viewmat)
    centres = gaussians.means @ viewmat[:3, :3].T + viewmat[:3, 3]
    cosines = rays @ normals.T
    meeting = (normals * centres).sum(1) / cosines
    weights = -weights * cosines
    total = weights.sum(-1)
    return (weights * meeting).sum(-1) / torch.where(total.abs() > 1e-9, total, 1), total.detach()


@pytest.mark.parametrize(("backend", "dtype"), [("torch", torch.float64), ("numba", torch.float32)])
def test_it_is_the_mean_of_the_intersections(
    backend: Backend, dtype: torch.dtype, leaves: Callable[[Gaussians], Gaussians]
) -> None:
    ours, theirs = leaves(cloud(dtype)), leaves(cloud(torch.float64))
    found = render(SplatScene(ours, PLAIN, backend=backend), view_of(dtype), planes=True).plane_depth
    assert found is not None
    expected, total = written_out(theirs, view_of(torch.float64))
    sure = (found > 0) & (total > 0.2)
    assert int(sure.sum()) > 100
    tolerance = 1e-9 if dtype == torch.float64 else 2e-3
    torch.testing.assert_close(found[sure], expected[sure].to(dtype), atol=tolerance, rtol=tolerance)
    found[sure].sin().sum().backward()
    expected[sure].sin().sum().backward()
    for name in ("means", "scales", "quats", "opacities"):
        one, two = getattr(ours, name).grad, getattr(theirs, name).grad
        assert bool(two.any()), name
        assert float((one - two).norm() / two.norm()) < (1e-6 if dtype == torch.float64 else 5e-3), name


def test_edges_holes_and_backs_have_no_depth_and_no_gradient() -> None:
    K = view_of().Ks[0]
    facing = torch.tensor([0.0, 0.0, -1.0]).repeat(3, 4, 1)
    away = torch.full((3, 4), -2.0)
    facing[0, 0] = torch.tensor([1.0, 0.0, 0.0]) - 0.5 * MIN_COSINE * torch.tensor([0.0, 0.0, 1.0])
    facing[0, 1] = 0.0
    facing[0, 2] = torch.tensor([0.0, 0.0, 1.0])
    away[0, 3] = float("nan")
    away[1, 0] = 0.0
    K = K.clone()
    K[0, 2] = 0.5  # the ray of the first column has x = 0
    normals, distances = facing.requires_grad_(), away.requires_grad_()
    found = plane_depth(normals, distances, K)
    assert not bool(found[0].any()) and found[1, 0] == 0
    torch.testing.assert_close(found[1:].flatten()[1:], torch.full((7,), 2.0))
    found.sum().backward()
    assert not bool(normals.grad[0].any()) and not bool(distances.grad[0].any())  # type: ignore[index]
    assert bool(torch.isfinite(normals.grad).all()) and bool(normals.grad[1, 1].any())  # type: ignore[index, arg-type]
