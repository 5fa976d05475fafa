"""The space around the cameras in which no Gaussian may be."""

import math

import pytest
import torch

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.densify import FreeSpace
from f3rm_ext.splat.initialization import initial_points


@pytest.fixture
def ring() -> PinholeCameras:
    """Eight cameras at distance 2 from the origin, at which they look."""
    viewmats = torch.eye(4).repeat(8, 1, 1)
    for index in range(8):
        angle = index * math.pi / 4
        forward = -torch.tensor([math.cos(angle), math.sin(angle), 0.0])
        down = torch.tensor([0.0, 0.0, -1.0])
        rotation = torch.stack([torch.linalg.cross(down, forward), down, forward])
        viewmats[index, :3, :3], viewmats[index, :3, 3] = rotation, -rotation @ (-2 * forward)
    K = torch.tensor([[100.0, 0, 50], [0, 100, 50], [0, 0, 1]])
    sizes = torch.full((8,), 100, dtype=torch.int32)
    return PinholeCameras(viewmats, K.repeat(8, 1, 1), sizes, sizes)


def ball(count: int, radius: float) -> torch.Tensor:
    points = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    return radius * points / points.norm(dim=1, keepdim=True)


class TestFreeSpace:
    def test_it_ends_at_a_share_of_the_distance_to_the_nearest_points(self, ring):
        space = FreeSpace.measure(ring, ball(2000, 0.5), share=0.5)
        torch.testing.assert_close(space.centres, ring.positions)
        # The nearest hundredth of a ball is a cap, a little farther than the ball.
        assert ((space.radii > 0.75) & (space.radii < 0.8)).all()

    def test_a_wrong_point_right_before_a_camera_changes_little(self, ring):
        wrong = torch.cat([ball(2000, 0.5), ring.positions * 0.99])
        assert (FreeSpace.measure(ring, wrong, share=0.5).radii > 0.75).all()

    def test_what_lies_behind_a_camera_counts(self, ring):
        """As a wall does against which the photographer leaned."""
        wall = ring.positions[:1] * 1.1 + ball(100, 0.1)
        radii = FreeSpace.measure(ring, torch.cat([ball(2000, 0.5), wall]), share=0.5).radii
        assert radii[0] < 0.15
        assert radii[4] > 0.75

    def test_it_holds_the_points_within(self, ring):
        space = FreeSpace(ring.positions, torch.linspace(0.1, 0.8, 8))
        inside = torch.cat([ring.positions, ring.positions * (1 - 0.49 * space.radii[:, None])])
        outside = torch.cat([torch.zeros(1, 3), ring.positions * (1 + 0.51 * space.radii[:, None])])
        assert space.holds(inside).all()
        assert not space.holds(outside).any()

    def test_points_in_parts_are_as_at_once(self, ring, monkeypatch):
        space, points = FreeSpace(ring.positions, torch.full((8,), 0.7)), 3 * torch.rand(500, 3) - 1.5
        whole = space.holds(points)
        monkeypatch.setattr("f3rm_ext.splat.densify.free_space._ELEMENTS", 40)
        assert whole.any()
        assert torch.equal(space.holds(points), whole)


class TestInitialPoints:
    def start(self, points, views, prune_near=0.5, most=0, dense=0):
        colors = torch.arange(len(points))[:, None].repeat(1, 3) % 256
        generator = torch.Generator().manual_seed(0)
        return initial_points((points, colors), "a.ply", views, 50, most, generator, dense, prune_near)

    def test_those_before_cameras_are_left_out_and_told(self, ring):
        points = torch.cat([ball(2000, 0.5), ring.positions * 0.9])
        first = self.start(points, ring)
        torch.testing.assert_close(first.means, points[:2000])
        torch.testing.assert_close(first.rgb[:, 0] * 255, (torch.arange(2000) % 256).float())
        assert "2000 Gaussians" in first.described
        assert "8 others" in first.described
        assert first.free_space is not None

    def test_half_of_the_rest_are_dense_where_there_is_a_limit(self, ring):
        points = torch.cat([ball(1000, 0.5), ring.positions * 0.9, ball(300, 0.6), ring.positions * 0.9])
        first = self.start(points, ring, most=500, dense=308)
        assert len(first.means) == 500
        assert int((first.means.norm(dim=1) > 0.55).sum()) == 250
        assert first.means.norm(dim=1).max() < 0.65

    def test_without_evidence_none_is_left_out(self, ring, monkeypatch):
        """Neither without the option, nor among random points, nor where more than a few points lie around cameras."""
        points = torch.cat([ball(200, 0.5), ring.positions * 0.9])
        assert self.start(ball(10, 0.5), ring).free_space is None
        as_given = self.start(points, ring, prune_near=0.0)
        monkeypatch.setattr("f3rm_ext.splat.initialization._LEAST_OUTSIDE", 0.99)
        for first in (as_given, self.start(points, ring)):
            assert len(first.means) == len(points)
            assert first.free_space is None
