"""Depth on the planes at which a ray stops: the fast kernel beside its definition, and what it is for."""

import dataclasses

import numpy as np
import pytest
import torch

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.mesh import splat_depth
from f3rm_ext.mesh.splat_depth import WINDOW, front_plane_depth, median_depth
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.rasterize import rasterize
from f3rm_ext.splat.regularization.frames import pixel_rays, to_camera
from f3rm_ext.splat.rendering import SplatScene, render

PLAIN = MipOptions(filter_3d=False, filter_2d=False)


def colorless(*tensors: torch.Tensor, mip: MipOptions = PLAIN) -> SplatScene:
    count = len(tensors[0])
    return SplatScene(Gaussians(*tensors, torch.zeros(count, 3), torch.zeros(count, 0, 3)), mip)


def sheets(*depths_and_alphas: tuple[float, float]) -> SplatScene:
    """Sheets across the view, each made of one wide, flat Gaussian."""
    count = len(depths_and_alphas)
    depths, alphas = torch.tensor(depths_and_alphas).T
    means = torch.stack([torch.zeros(count), torch.zeros(count), depths], dim=1)
    scales, quats = torch.tensor([[50.0, 50.0, 0.01]]).log(), torch.tensor([[1.0, 0, 0, 0]])
    return colorless(means, scales.repeat(count, 1), quats.repeat(count, 1), torch.logit(alphas)[:, None])


def view_of(width: int = 16, height: int = 16) -> PinholeCameras:
    K = torch.tensor([[[20.0, 0, width / 2], [0, 20, height / 2], [0, 0, 1]]])
    sides = (torch.tensor([side], dtype=torch.int32) for side in (width, height))
    return PinholeCameras(torch.eye(4)[None], K, *sides)


def front_plane_depth_by_definition(scene: SplatScene, view: PinholeCameras) -> torch.Tensor:
    """Does the same as :func:`front_plane_depth`, written for readability."""
    camera, shapes = scene.camera(view.to("cpu")), scene.shapes()
    drawn = rasterize(shapes, torch.eye(len(shapes.means)), camera, backend="torch").colors
    order = to_camera(shapes.means, camera.viewmat)[:, 2].argsort(stable=True)
    weights = drawn.flatten(0, 1)[:, order]
    normals, distances, centers, reach = splat_depth._planes(scene, shapes, camera, order).split([3, 1, 1, 1], dim=1)
    y, x = torch.meshgrid(*reversed(pixel_rays((camera.height, camera.width), camera.K)), indexing="ij")
    rays = torch.stack([x, y, torch.ones_like(x)], dim=-1).reshape(-1, 3)
    cosines = rays @ normals.T
    facing = cosines < 0
    crossing = torch.where(facing, distances.T / torch.where(facing, cosines, -1.0), centers.T)
    crossing = crossing.clamp((centers - reach).T, (centers + reach).T)
    opacity = weights.cumsum(dim=1)
    middle = crossing.gather(1, (opacity >= splat_depth.STOPPED).int().argmax(dim=1, keepdim=True))
    near = weights * (-cosines).clamp_min(splat_depth._LEAST_COSINE) * ((crossing - middle).abs() <= WINDOW * middle)
    depth = (near * crossing).sum(dim=1) / near.sum(dim=1).clamp_min(1e-12)
    return torch.where(opacity[:, -1] >= splat_depth.STOPPED, depth, 0).reshape(camera.height, camera.width)


@pytest.mark.parametrize("mip", [PLAIN, MipOptions(filter_3d=False, filter_2d=True)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_kernel_does_what_the_definition_says(mip: MipOptions, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = 400
    places = torch.rand(count, 3, generator=generator) * torch.tensor([4.0, 3.0, 3.0]) + torch.tensor([-2, -1.5, 2.0])
    scales = (torch.rand(count, 3, generator=generator) * torch.tensor([0.4, 0.4, 0.02]) + 0.01).log()
    quats, opacities = torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator) + 1
    scene, view = colorless(places, scales, quats, opacities, mip=mip), view_of(37, 29)
    fast = front_plane_depth(scene, view)
    slow = front_plane_depth_by_definition(scene, view)
    assert 0.3 < (fast > 0).float().mean() < 1
    # Where a sum ends within rounding of a limit, the two may take different planes.
    different = (fast - slow).abs() > 1e-3 * slow
    assert different.float().mean() < 0.003


@pytest.mark.parametrize(("front", "depth"), [(0.8, 2.0), (0.3, 6.0)])
def test_of_two_sheets_the_one_that_stops_the_light_counts(front: float, depth: float) -> None:
    scene, view = sheets((2.0, front), (6.0, 0.999)), view_of()
    over_all = render(scene, view, planes=True).plane_depth
    assert over_all is not None and 2.5 < float(over_all[8, 8]) < 5
    np.testing.assert_allclose(front_plane_depth(scene, view)[4:12, 4:12], depth, rtol=1e-4)


def test_layers_of_one_surface_are_averaged() -> None:
    near, far = 2.0, 2.0 * (1 + 0.5 * WINDOW)
    found = float(front_plane_depth(sheets((near, 0.6), (far, 0.999)), view_of())[8, 8])
    assert found == pytest.approx(0.6 * near + 0.4 * far, rel=1e-3)


def test_a_tilted_wall_is_exact() -> None:
    turn = np.radians(60.0)
    scene = sheets((3.0, 0.999))
    tilted = dataclasses.replace(
        scene.gaussians, quats=torch.tensor([[np.cos(turn / 2), 0.0, np.sin(turn / 2), 0.0]], dtype=torch.float32)
    )
    found = front_plane_depth(SplatScene(tilted, PLAIN), view_of())
    x = (torch.arange(16) + 0.5 - 8) / 20
    normal_x, normal_z = np.sin(turn), np.cos(turn)
    expected = 3 * normal_z / (normal_x * x + normal_z)
    np.testing.assert_allclose(found[8], expected, rtol=2e-3)


def test_what_lets_most_of_the_light_through_has_no_depth() -> None:
    assert (front_plane_depth(sheets((2.0, 0.35)), view_of()) == 0).all()
    assert (front_plane_depth(sheets((-2.0, 0.9)), view_of()) == 0).all()


@pytest.mark.parametrize(("front", "median"), [(0.8, 2.0), (0.3, 6.0)])
def test_the_median_is_on_a_sheet_where_the_mean_is_between(front: float, median: float) -> None:
    scene = sheets((2.0, front), (6.0, 0.999))
    mean = render(scene, view_of()).outputs()["depth"][..., 0]
    assert 2.5 < float(mean[8, 8]) < 5
    found = median_depth(scene, view_of(), mean)
    np.testing.assert_allclose(found[4:12, 4:12], median, rtol=1e-3)


def test_what_lies_beyond_the_bins_is_in_the_outer_ones() -> None:
    scene = sheets((3.0, 0.999), (500.0, 0.999))
    found = median_depth(scene, view_of(), torch.full((16, 16), 3.0))
    np.testing.assert_allclose(found[8, 8], 3.0, rtol=1e-3)
