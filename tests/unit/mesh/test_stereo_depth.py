"""Stereo in place of rendered depth, where it is sure."""

import numpy as np
import pytest
import torch

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.mesh.stereo_depth import take_stereo
from f3rm_ext.mesh.views import RenderedView, SceneViews, stored_views

PATCH = np.s_[8:12, 10:16]


def resized(cameras: PinholeCameras, factor: float, shift_px: float) -> PinholeCameras:
    """The same cameras with larger pictures, and the principal point elsewhere."""
    Ks = cameras.Ks * torch.tensor([factor, factor, 1])[:, None]
    Ks[:, :2, 2] += shift_px
    return cameras._replace(Ks=Ks, widths=(cameras.widths * factor).long(), heights=(cameras.heights * factor).long())


def wrong(views: SceneViews, by: float) -> SceneViews:
    """The views with all depth off by a factor."""

    def render(index: int) -> RenderedView:
        view = views.render(index)
        return RenderedView(view.color, view.depth * np.float32(by))

    return SceneViews(views.cameras, render)


def test_sure_stereo_is_taken_and_the_rest_is_left(ball_views: SceneViews) -> None:
    def render(index: int) -> RenderedView:
        view = ball_views.render(index)
        view.depth[PATCH] = 0
        return view

    done: list[int] = []
    with stored_views(wrong(ball_views, 1.2)) as stored:
        before = np.array(stored.depth(3))
        share = take_stereo(stored, SceneViews(ball_views.cameras, render), done.append)
        after, truth = stored.depth(3), ball_views.render(3).depth
        np.testing.assert_array_equal(after[PATCH], before[PATCH])
        changed = after != before
        np.testing.assert_allclose(after[changed], truth[changed], rtol=0.07)  # the rim of the ball is steep
        assert changed.sum() > 0.7 * (truth > 0).sum() and 0 < share < 1
    assert done == list(range(1, 21))


def test_stereo_that_no_other_view_confirms_is_not_taken(ball_views: SceneViews) -> None:
    empty = RenderedView(np.zeros((48, 48, 3), np.uint8), np.zeros((48, 48), np.float32))
    alone = SceneViews(ball_views.cameras, lambda index: ball_views.render(index) if index == 3 else empty)
    with stored_views(wrong(ball_views, 1.2)) as stored:
        before = np.array(stored.depth(3))
        assert take_stereo(stored, alone) == 0
        np.testing.assert_array_equal(stored.depth(3), before)


def test_noise_of_stereo_is_smoothed(ball_views: SceneViews) -> None:
    def render(index: int) -> RenderedView:
        view = ball_views.render(index)
        noise = 1 + 0.005 * np.random.default_rng(index).standard_normal(view.depth.shape)
        return RenderedView(view.color, (view.depth * noise).astype(np.float32))

    with stored_views(wrong(ball_views, 1.2)) as stored:
        take_stereo(stored, SceneViews(ball_views.cameras, render))
        inner = np.s_[16:32, 16:32]
        error = stored.depth(3)[inner] / ball_views.render(3).depth[inner] - 1
    assert np.abs(error).mean() < 0.0025 < np.abs(0.005 * np.random.default_rng(3).standard_normal((48, 48))).mean()


def test_rendered_depth_that_is_right_stays(ball_views: SceneViews) -> None:
    with stored_views(wrong(ball_views, 1.005)) as stored:
        before = np.array(stored.depth(3))
        inner = np.s_[16:32, 16:32]
        take_stereo(stored, ball_views)
        np.testing.assert_array_equal(stored.depth(3)[inner], before[inner])


@pytest.mark.parametrize("factor", [0.5, 2])
def test_pixels_of_other_sizes_show_the_same_rays(ball_views: SceneViews, factor: float) -> None:
    cameras = resized(ball_views.cameras, factor, shift_px=3.0)

    def render(index: int) -> RenderedView:
        rows, columns = (int(size[index]) for size in (cameras.heights, cameras.widths))
        depth = np.full((rows, columns), 1.0, np.float32)
        # A step to the right of the ray through the middle of the ball.
        depth[:, round(float(cameras.Ks[index, 0, 2])) :] = 1.02
        return RenderedView(np.zeros((rows, columns, 3), np.uint8), depth)

    with stored_views(ball_views) as stored:
        take_stereo(stored, SceneViews(cameras, render))
        depth, middle = stored.depth(0), int(stored.cameras.Ks[0, 0, 2])
        seen = (depth == 1.0) | (depth == np.float32(1.02))
        assert seen.any() and (depth[:, :middle][seen[:, :middle]] == 1.0).all()
        assert (depth[:, middle:][seen[:, middle:]] == np.float32(1.02)).all()
