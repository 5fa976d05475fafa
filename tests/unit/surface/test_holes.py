"""Holes that are filled with depth on which too few views agree."""

import numpy as np
import pytest
import trimesh

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.surface.extraction import ExtractionOptions, extract_mesh
from f3rm_ext.surface.fusion import fuse_depth
from f3rm_ext.surface.holes import fill_holes
from f3rm_ext.surface.scenes import SurfaceScene
from f3rm_ext.surface.views import RenderedView, SceneViews, StoredViews, stored_views

CUT = 0.3
"""Height above which views disagree."""


def above(views: SceneViews, index: int) -> np.ndarray:
    """Pixels whose place on the ball is above the cut; colours are places."""
    color, depth = views.render(index)
    return (depth > 0) & (color[..., 2] / 255 - 0.5 > CUT)


def disagreeing(views: SceneViews) -> SceneViews:
    """The views with the depth of the cap of the ball off by 2.5 % more in each, so that no two agree."""

    def render(index: int) -> RenderedView:
        color, depth = views.render(index)
        factor = np.float32(0.75 + 0.025 * index)
        return RenderedView(color, np.where(above(views, index), depth * factor, depth))

    return SceneViews(views.cameras, render)


def without_the_cap(views: SceneViews, stored: StoredViews) -> None:
    for index in range(len(stored)):
        stored.set_depth(index, np.where(above(views, index), np.float32(0), stored.depth(index)))


def test_pixels_that_look_through_holes_get_their_depth_back(ball_views: SceneViews) -> None:
    done: list[int] = []
    with stored_views(ball_views) as stored:
        without_the_cap(ball_views, stored)
        open_ball = fuse_depth(stored, 0.03)
        before = [np.array(stored.depth(index)) for index in range(len(stored))]
        share = fill_holes(stored, open_ball, done.append)
        changed = total = 0
        for index, old in enumerate(before):
            new, truth = stored.depth(index), ball_views.render(index).depth
            filled = new != old
            np.testing.assert_array_equal(new[filled], truth[filled])
            np.testing.assert_array_equal(new[~filled], old[~filled])
            changed, total = changed + filled.sum(), total + filled.size
    assert share == pytest.approx(changed / total) and changed > 0 and done == list(range(1, 21))


def test_a_mesh_without_holes_is_left(ball_views: SceneViews) -> None:
    ball = trimesh.creation.icosphere(subdivisions=4, radius=0.51)
    with stored_views(ball_views) as stored:
        without_the_cap(ball_views, stored)
        before = np.array(stored.depth(3))
        assert fill_holes(stored, ball) == 0
        np.testing.assert_array_equal(stored.depth(3), before)


def test_extraction_covers_what_views_disagree_on_only_when_asked(ball_views: SceneViews) -> None:
    scene = SurfaceScene(disagreeing(ball_views), None, CaptureFrame(np.eye(3), np.zeros(3), 1.0), {})
    open_ball = extract_mesh(scene, ExtractionOptions(voxel=0.03))
    filled = extract_mesh(scene, ExtractionOptions(voxel=0.03, fill_holes=True))
    assert open_ball.mesh.vertices[:, 2].max() < 0.45 < filled.mesh.vertices[:, 2].max()
    share = filled.facts["filled_share"]
    assert isinstance(share, float) and 0 < share < 0.2 and "filled_share" not in open_ball.facts
    low = filled.mesh.vertices[:, 2] < 0
    np.testing.assert_allclose(np.linalg.norm(filled.mesh.vertices[low], axis=1), 0.5, atol=0.03)
