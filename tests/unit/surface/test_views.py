"""Where pixels are, and on which of them views agree."""

import numpy as np
import torch

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.stereo.agreement import agreeing_depth, project
from f3rm_ext.surface.views import RenderedView, SceneViews, pixel_size, rendered_view, stored_views


def test_pixels_lie_on_the_ball_and_come_back(ball_views: SceneViews) -> None:
    with stored_views(ball_views) as stored:
        points, pixels = stored.points(3)
        np.testing.assert_allclose(points.norm(dim=1), 0.5, atol=1e-6)
        back, depth, inside = project(stored.cameras, 3, points)
        assert bool(inside.all()) and torch.equal(back, pixels)
        np.testing.assert_allclose(depth, stored.depth(3).reshape(-1)[pixels.numpy()], atol=1e-6)
        assert 1.0 / 60 < pixel_size(stored) < 1.5 / 60


def test_views_of_a_solid_ball_agree(ball_views: SceneViews) -> None:
    with stored_views(ball_views) as stored:
        kept = [(agreeing_depth(stored, index, 3, 0.02) > 0).sum() for index in range(len(stored))]
        had = [(stored.depth(index) > 0).sum() for index in range(len(stored))]
    assert sum(kept) > 0.7 * sum(had)


def test_a_floater_in_one_view_is_dropped(ball_views: SceneViews) -> None:
    def render(index: int) -> RenderedView:
        view = ball_views.render(index)
        if index == 2:
            view.depth[20:24, 20:24] = 0.6
        return view

    with stored_views(SceneViews(ball_views.cameras, render)) as stored:
        kept = agreeing_depth(stored, 2, 2, 0.02)
        assert (kept[20:24, 20:24] == 0).all() and (kept > 0).sum() > 500
        np.testing.assert_array_equal(agreeing_depth(stored, 2, 1, 0.02), stored.depth(2))


def test_a_camera_inside_of_a_floater_adds_nothing(ball_views: SceneViews) -> None:
    ring = ball_views.cameras
    inside = PinholeCameras(*(torch.cat([part, part[:1]]) for part in ring))
    blob = RenderedView(np.zeros((48, 48, 3), np.uint8), np.full((48, 48), 0.05, np.float32))
    with stored_views(SceneViews(inside, lambda index: ball_views.render(index) if index < 20 else blob)) as stored:
        assert (agreeing_depth(stored, 20, 2, 0.02) == 0).all()
        # Nor does it object to what the others see.
        with stored_views(ball_views) as without:
            np.testing.assert_array_equal(agreeing_depth(stored, 3, 2, 0.02), agreeing_depth(without, 3, 2, 0.02))


def test_nothing_seen_is_nothing(ring: PinholeCameras) -> None:
    empty = SceneViews(
        ring, lambda index: RenderedView(np.zeros((48, 48, 3), np.uint8), np.zeros((48, 48), np.float32))
    )
    with stored_views(empty) as stored:
        assert pixel_size(stored) == 0 and (agreeing_depth(stored, 0, 3, 0.01) == 0).all()


def test_hardly_opaque_pixels_have_no_depth() -> None:
    accumulation = torch.tensor([[0.4, 0.6, 0.9, 0.9]])[..., None]
    depth = torch.tensor([[1.0, 2.0, torch.nan, -1.0]])[..., None]
    view = rendered_view({"rgb": torch.full((1, 4, 3), 0.5), "accumulation": accumulation}, depth)
    assert view.depth.tolist() == [[0, 2, 0, 0]] and (view.color == 128).all()


def test_files_are_gone_afterwards(ball_views: SceneViews) -> None:
    done: list[int] = []
    with stored_views(ball_views, done.append) as stored:
        folder = stored._folder
        assert folder.is_dir()
    assert not folder.exists() and done == list(range(1, 21))
