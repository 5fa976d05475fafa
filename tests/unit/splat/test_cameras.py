"""Cameras as the rasteriser wants them, and where a run begins."""

import math
from collections.abc import Callable

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.initialization import (
    FARTHEST,
    NEAREST,
    initial_gaussians,
    points_on_rays,
    points_seen_by_many,
    random_points,
)

Ring = Callable[..., Cameras]
CENTRE = torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture
def ring(ring_cameras: Callable[..., Cameras]) -> Callable[[int], Cameras]:
    """Cameras on a circle of radius 4 that look at its centre, 64 × 48 pixels."""

    def make(count: int = 12) -> Cameras:
        cameras = ring_cameras(count, 4.0)
        cameras.rescale_output_resolution(2.0)
        cameras.fx, cameras.fy = cameras.fx / 60 * 80, cameras.fy / 60 * 90
        cameras.camera_to_worlds[:, :, 3] += CENTRE
        return cameras

    return make


def test_projection_is_that_of_nerfstudio(ring: Ring) -> None:
    """A point along the ray of a pixel projects to that pixel."""
    cameras = ring(3)
    views = PinholeCameras.of(cameras)
    rays = cameras.generate_rays(camera_indices=1, keep_shape=True)[10, 50]
    point = rays.origins + 2.7 * rays.directions
    local = views.viewmats[1] @ torch.cat([point, torch.ones(1)])
    pixel = views.Ks[1] @ local[:3]
    assert local[2] > 0
    torch.testing.assert_close(pixel[:2] / pixel[2], torch.tensor([50.5, 10.5]), atol=1e-3, rtol=0)
    assert (int(views.widths[1]), int(views.heights[1])) == (64, 48)


def test_where_cameras_are_and_look(ring: Ring) -> None:
    cameras = ring(4)
    views = PinholeCameras.of(cameras)
    torch.testing.assert_close(views.positions, cameras.camera_to_worlds[:, :3, 3])
    torch.testing.assert_close(views.forward, -cameras.camera_to_worlds[:, :3, 2])
    horizontal = 4.0 / math.hypot(1.0, 0.2)
    assert views.extent() == pytest.approx(1.1 * horizontal, rel=1e-5)
    assert PinholeCameras.of(ring(1)).extent() == 1e-3


def test_first_places_are_where_cameras_look(ring: Ring) -> None:
    views = PinholeCameras.of(ring())
    points = points_seen_by_many(views, 500, torch.Generator().manual_seed(0))
    assert points.shape == (500, 3)
    away = (points - CENTRE).norm(dim=1)
    assert float(away.max()) <= 4.0 + 1e-4 and float(away.median()) < 2.5
    again = points_seen_by_many(views, 500, torch.Generator().manual_seed(0))
    assert torch.equal(points, again)


def test_places_on_rays_are_seen_and_lie_at_all_depths(ring: Ring) -> None:
    views = PinholeCameras.of(ring(1))  # so that all rays are of one camera
    radius = 2.0
    views.viewmats[0, :3, 3] = torch.tensor([0.0, 0.0, radius])  # looks at the origin from there
    views.viewmats[0, :3, :3] = torch.eye(3)
    views = PinholeCameras(*(torch.cat([part, part]) for part in views))
    views.viewmats[1, :3, :3] = torch.diag(torch.tensor([-1.0, 1.0, -1.0]))  # and from the other side
    points = points_on_rays(views, 2000, torch.Generator().manual_seed(0))
    local = torch.einsum("cij,nj->cni", views.viewmats[:, :3, :3], points) + views.viewmats[:, None, :3, 3]
    pixels = (torch.einsum("cij,cnj->cni", views.Ks, local) / local[..., 2:])[..., :2]
    size = torch.tensor([64.0, 48.0])
    seen = (local[..., 2] > 0) & (pixels >= -1e-3).all(-1) & (pixels <= size + 1e-3).all(-1)
    assert bool(seen.any(dim=0).all()) and 0.4 < float(seen[0].float().mean()) < 1
    nearest = torch.where(seen, local[..., 2], torch.inf).amin(dim=0) / radius
    assert NEAREST <= float(nearest.min()) < 1.1 * NEAREST and 0.9 * FARTHEST < float(nearest.max()) <= FARTHEST
    assert float(nearest.median()) == pytest.approx(math.sqrt(NEAREST * FARTHEST), rel=0.15)
    assert torch.equal(points, points_on_rays(views, 2000, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("count", [1, 2, 101])
def test_first_places_are_of_both_kinds(ring: Ring, count: int) -> None:
    views = PinholeCameras.of(ring())
    points = random_points(views, count, torch.Generator().manual_seed(0))
    assert points.shape == (count, 3)
    inside = points_seen_by_many(views, count - count // 2, torch.Generator().manual_seed(0))
    assert torch.equal(points[: len(inside)], inside)


def test_parallel_cameras_have_places_too() -> None:
    pose = torch.eye(4)[None, :3].repeat(3, 1, 1)
    pose[:, 0, 3] = torch.tensor([0.0, 1.0, 2.0])
    views = PinholeCameras.of(Cameras(pose, fx=80.0, fy=80.0, cx=32.0, cy=24.0, width=64, height=48))
    points = points_seen_by_many(views, 100, torch.Generator().manual_seed(0))
    assert points.shape == (100, 3) and bool(torch.isfinite(points).all())


def test_first_gaussians_are_round_and_as_large_as_their_distances() -> None:
    means = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [9, 9, 9]])
    found = initial_gaussians(means, torch.rand(5, 3), 1, largest=2.0, generator=torch.Generator())
    assert found.features_rest.shape == (5, 3, 3) and not found.features_rest.any()
    sizes = found.sizes()
    assert float(sizes[0, 0]) == pytest.approx(1.0) and float(sizes[4, 0]) == pytest.approx(2.0)
    torch.testing.assert_close(sizes, sizes[:, :1].expand(-1, 3))
    torch.testing.assert_close(found.alphas(), torch.full((5,), 0.1))


def test_a_lone_gaussian_has_the_largest_size() -> None:
    one = initial_gaussians(torch.zeros(1, 3), None, 0, largest=0.5, generator=torch.Generator())
    torch.testing.assert_close(one.sizes(), torch.full((1, 3), 0.5))
    assert not one.features_dc.any()


def test_a_camera_to_render_is_the_same_camera(ring: Ring) -> None:
    camera = ring()[2:3]
    there, here = PinholeCameras.to_render(camera, torch.device("cpu")), PinholeCameras.of(camera)
    assert all(torch.equal(one, other) for one, other in zip(there, here, strict=True))
    assert there.viewmats[0].is_contiguous() and there.Ks[0].is_contiguous()
    # Sizes are not moved: the host reads them.
    moved = PinholeCameras.to_render(camera, torch.device("meta"))
    assert moved.viewmats.device.type == moved.Ks.device.type == "meta" and moved.widths.device.type == "cpu"
