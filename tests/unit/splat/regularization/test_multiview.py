"""Consistency of depth between views: neighbours, round trips on known surfaces, gradients, what has no say."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.regularization import multiview
from f3rm_ext.splat.regularization.multiview import (
    DepthView,
    NeighbourViews,
    multiview_consistency,
    neighbour_views,
    reprojection_errors,
    sample_depth,
)

H, W, FOCAL = 24, 32, 30.0
K = torch.tensor([[FOCAL, 0, W / 2], [0, FOCAL, H / 2], [0, 0, 1.0]])


def look(x: float, turn: float = 0.0) -> Tensor:
    """View matrix of a camera at (x, 0, 0) that looks along z, turned about y."""
    viewmat = torch.eye(4)
    viewmat[:3, :3] = torch.tensor(
        [[math.cos(turn), 0, -math.sin(turn)], [0, 1, 0], [math.sin(turn), 0, math.cos(turn)]]
    )
    viewmat[:3, 3] = -viewmat[:3, :3] @ torch.tensor([x, 0.0, 0.0])
    return viewmat


def plane_view(x: float, turn: float = 0.0, normal: tuple[float, ...] = (0.2, 0.1, 1.0), d: float = 4.0) -> DepthView:
    """Depth of the plane n · X = d."""
    viewmat, n = look(x, turn), torch.tensor(normal)
    across = (torch.arange(W) + 0.5 - W / 2) / FOCAL
    down = (torch.arange(H) + 0.5 - H / 2) / FOCAL
    rays = torch.stack([across.expand(H, W), down[:, None].expand(H, W), torch.ones(H, W)], dim=-1)
    own = viewmat[:3, :3] @ n
    offset = d - n @ torch.tensor([x, 0.0, 0.0])
    return DepthView(offset / (rays @ own), viewmat, K)


def test_views_of_one_plane_agree() -> None:
    errors, known = reprojection_errors(plane_view(0.0), plane_view(0.6, -0.1))
    assert float(errors[known].max()) < 1e-4
    assert 0.7 < float(known.float().mean()) < 1


def test_errors_are_parallax() -> None:
    """A front-parallel plane whose depth is wrong by e in one view: the disparity f b / z changes twice as seen."""
    seen, other = (DepthView(*(value.double() for value in plane_view(x, normal=(0.0, 0.0, 1.0)))) for x in (0.0, 0.5))
    errors, known = reprojection_errors(seen._replace(depth=seen.depth + 0.4), other)
    expected = FOCAL * 0.5 * (1 / 4.0 - 1 / 4.4)
    torch.testing.assert_close(errors[known], torch.full_like(errors[known], expected), atol=1e-4, rtol=0)
    loss = multiview_consistency(seen._replace(depth=seen.depth + 0.4), other)[0]
    assert float(loss) == pytest.approx(expected * math.exp(-expected) * float(known.float().mean()), rel=1e-3)


def test_the_loss_moves_depth_to_where_views_agree() -> None:
    seen, other = plane_view(0.0), plane_view(0.5)
    for error in (0.2, -0.2):
        depth = (seen.depth + error).requires_grad_()
        theirs = other.depth.clone().requires_grad_()
        multiview_consistency(seen._replace(depth=depth), other._replace(depth=theirs))[0].backward()
        assert depth.grad is not None and theirs.grad is None
        moved = depth.grad[depth.grad != 0]
        assert len(moved) > 300 and bool((moved.sign() == math.copysign(1, error)).all())


def test_gradients_are_finite_differences() -> None:
    double = (value.double() for value in (plane_view(0.0).depth + 0.3, look(0.0), K))
    seen = DepthView(*double)
    other = DepthView(*(value.double() for value in plane_view(0.4, -0.05)))
    block = (slice(8, 12), slice(10, 16))

    def errors(inner: Tensor) -> Tensor:
        depth = seen.depth.clone()
        depth[block] = inner
        return reprojection_errors(seen._replace(depth=depth), other)[0][block]

    assert torch.autograd.gradcheck(errors, seen.depth[block].clone().requires_grad_(), eps=1e-6, atol=1e-5)


def test_what_the_other_view_cannot_see_does_not_count() -> None:
    seen, other = plane_view(0.0), plane_view(0.6)
    occluded = other._replace(depth=0.5 * other.depth)
    assert float(multiview_consistency(seen, occluded)[0]) == 0, "off by more than a pixel"
    for name, missing in (
        ("no depth", other._replace(depth=torch.zeros(H, W))),
        ("turned away", plane_view(0.6)._replace(viewmat=look(0.6, math.pi))),
        ("out of the picture", plane_view(0.6)._replace(viewmat=look(0.6, 1.5))),
    ):
        depth = seen.depth.clone().requires_grad_()
        loss = multiview_consistency(seen._replace(depth=depth), missing)[0]
        loss.backward()
        assert float(loss.detach()) == 0, name
        assert depth.grad is not None and not bool(depth.grad.any()), name
    holes = seen.depth.clone()
    holes[:, :10] = 0
    errors, known = reprojection_errors(seen._replace(depth=holes), other)
    assert not bool(known[:, :10].any()) and not bool(errors[:, :10].any())
    # A place beside a pixel without depth is not interpolated.
    depth, usable = sample_depth(holes, torch.tensor([[10.2, 5.5], [10.6, 5.5], [0.4, 5.0]]))
    assert usable.tolist() == [False, True, False]
    assert float(1 / depth[1]) == pytest.approx(float(0.9 / holes[5, 10] + 0.1 / holes[5, 11]), rel=1e-5)


def test_neighbours_look_the_same_way_from_elsewhere(ring_cameras: Callable[..., Any]) -> None:
    views = PinholeCameras.of(ring_cameras(12))
    found = neighbour_views(views, 2.0, 8)
    assert set(found[0][:2]) == {1, 11} and set(found[0]) == {1, 11, 2, 10}
    assert neighbour_views(views, 2.0, 1)[3] in ([2], [4])
    twice = PinholeCameras(*(torch.cat([part, part]) for part in views))
    assert all(i % 12 != j % 12 for i, row in enumerate(neighbour_views(twice, 2.0, 8)) for j in row), "no baseline"
    assert neighbour_views(PinholeCameras(*(part[:1] for part in views)), 2.0, 8) == [[]]


def test_neighbours_are_drawn_by_seed(ring_cameras: Callable[..., Any]) -> None:
    cameras = PinholeCameras.of(ring_cameras(12))
    nearby = NeighbourViews(cameras, torch.device("cpu"))
    drawn = [nearby.draw(0, seed) for seed in range(20)]
    assert len(set(drawn)) > 1 and set(drawn) <= {1, 2, 10, 11}
    assert nearby.draw(0, 3) == drawn[3]
    alone = NeighbourViews(PinholeCameras(*(part[:1] for part in cameras)), torch.device("cpu"))
    assert alone.draw(0, 0) is None
    assert multiview.NEIGHBOURS >= 4


def test_a_neighbours_camera_is_scaled_like_the_view(ring_cameras: Callable[..., Any]) -> None:
    cameras = PinholeCameras.of(ring_cameras(12))
    nearby = NeighbourViews(cameras, torch.device("cpu"))
    size = nearby.size_like(1, 0, 16)
    assert size == (12, 16)
    beside = nearby.camera(1, size)
    assert (int(beside.heights[0]), int(beside.widths[0])) == size
    torch.testing.assert_close(beside.Ks[0, :2], cameras.Ks[1, :2] / 2)
    assert torch.equal(beside.positions[0], cameras.positions[1])
    # An image may be one row taller than its share, by rounding.
    assert float(nearby.camera(1, (13, 16)).Ks[0, 1, 1]) == pytest.approx(float(cameras.Ks[1, 1, 1]) * 13 / 24)
