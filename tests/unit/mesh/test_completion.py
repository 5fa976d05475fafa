"""Thin things that are fused from each side by itself, and holes that are filled with depth that few views agree on."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import trimesh

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.stereo.agreement import unproject
from f3rm_ext.errors import ConfigError
from f3rm_ext.mesh.completion import hole_parts, thin_parts
from f3rm_ext.mesh.extraction import extract_mesh
from f3rm_ext.mesh.fusion import fuse_depth
from f3rm_ext.mesh.options import ExtractionOptions
from f3rm_ext.mesh.scenes import SurfaceScene
from f3rm_ext.mesh.views import RenderedView, SceneViews, StoredViews, stored_views

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


def fused(views: StoredViews) -> trimesh.Trimesh:
    return fuse_depth(views, 0.03)


def test_pixels_that_look_through_holes_are_fused(ball_views: SceneViews) -> None:
    done: list[int] = []
    with stored_views(ball_views) as stored:
        without_the_cap(ball_views, stored)
        open_ball = fused(stored)
        before = np.array(stored.depth(3))
        parts, share = hole_parts(stored, open_ball, fused, done.append)
        np.testing.assert_array_equal(stored.depth(3), before)
    (cap,) = parts
    assert 0 < share < 0.2 and done == list(range(1, 21))
    assert open_ball.vertices[:, 2].max() < 0.4 and cap.vertices[:, 2].min() > 0.1
    np.testing.assert_allclose(np.linalg.norm(cap.vertices, axis=1), 0.5, atol=0.02)


def test_a_mesh_without_holes_is_left(ball_views: SceneViews) -> None:
    ball = trimesh.creation.icosphere(subdivisions=4, radius=0.51)
    with stored_views(ball_views) as stored:
        without_the_cap(ball_views, stored)
        assert hole_parts(stored, ball, fused) == ([], 0.0)


@pytest.fixture
def two_sided(make_cameras: Callable[..., PinholeCameras]) -> SceneViews:
    """A square across the z axis, a third of a voxel thick, and walls around it, seen from both sides and edge-on."""
    aheads, places = [], []
    for up in (1.0, -1.0):
        places += [[x, y, 1.5 * up] for x, y in ((0.0, 0.0), (0.2, 0.1), (-0.2, 0.1), (0.0, -0.2))]
        places += [[-1.5 * up, 0.0, 0.0], [0.0, -1.5 * up, 0.0]]
        aheads += [[0.0, 0.0, -up]] * 4 + [[up, 0.0, 0.0], [0.0, up, 0.0]]
    sides = np.array([[1.0, 0.0, 0.0] if ahead[2] else np.cross([0.0, 0.0, -1.0], ahead) for ahead in aheads])
    side = 64
    cameras = make_cameras(np.array(places), np.array(aheads), sides, side)

    def render(index: int) -> RenderedView:
        faces_it = places[index][2] != 0  # the walls behind are far; those around its edges are near
        at = unproject(cameras, index, torch.full((side**2,), 1.495, dtype=torch.float64), torch.arange(side**2))
        on = (at[:, :2].abs().amax(dim=1) < 0.35) & torch.tensor(faces_it)
        depth = torch.where(on, 1.495, 2.5 if faces_it else 1.9).float().numpy().reshape(side, side)
        return RenderedView(np.full((side, side, 3), 128, np.uint8), depth)

    return SceneViews(cameras, render)


def test_a_sheet_that_is_seen_from_both_sides_is_found(two_sided: SceneViews) -> None:
    with stored_views(two_sided) as stored:
        walls = fused(stored)
        parts, share = thin_parts(stored, walls, fused)
    sheets = [part for part in parts if np.ptp(part.vertices[:, 2]) < 0.1]
    assert len(sheets) == 2 and share > 0.02
    for part in sheets:
        np.testing.assert_allclose(part.vertices[:, 2], 0.0, atol=0.01)
        assert np.ptp(part.vertices[:, 0]) > 0.6 and np.ptp(part.vertices[:, 1]) > 0.6
    faces_up = [part.face_normals[:, 2].mean() > 0 for part in sheets]
    assert sorted(faces_up) == [False, True]


def test_extraction_finds_thin_parts_unless_told_not_to(two_sided: SceneViews) -> None:
    scene = SurfaceScene(two_sided, None, CaptureFrame(np.eye(3), np.zeros(3), 1.0), {})
    with_sheet = extract_mesh(scene, ExtractionOptions(voxel=0.03, min_views=1))
    without = extract_mesh(scene, ExtractionOptions(voxel=0.03, min_views=1, thin_parts=False))

    def of_the_sheet(mesh: trimesh.Trimesh) -> float:
        middle = np.abs(mesh.triangles_center)
        return float(mesh.area_faces[(middle[:, 2] < 0.05) & (middle[:, :2].max(axis=1) < 0.25)].sum())

    assert of_the_sheet(with_sheet.mesh) > 0.45 > 0.25 > of_the_sheet(without.mesh)
    assert with_sheet.facts["thin_share"] and "thin_share" not in without.facts
    # A sheet is open all around, but no hole.
    closed = extract_mesh(scene, ExtractionOptions(voxel=0.03, min_views=1, close_holes=0.6))
    assert of_the_sheet(closed.mesh) == pytest.approx(of_the_sheet(with_sheet.mesh), rel=0.02)


def test_more_views_than_there_are_cannot_agree(ball_views: SceneViews) -> None:
    """Said at once, not after minutes of rendering."""
    unrendered = SceneViews(ball_views.cameras, lambda index: pytest.fail("too late"))
    scene = SurfaceScene(unrendered, None, CaptureFrame(np.eye(3), np.zeros(3), 1.0), {})
    with pytest.raises(ConfigError, match=f"--min-views is 99, but .* {len(ball_views)} "):
        extract_mesh(scene, ExtractionOptions(min_views=99))


def test_a_solid_ball_misses_nothing(ball_views: SceneViews) -> None:
    with stored_views(ball_views) as stored:
        assert thin_parts(stored, fused(stored), fused) == ([], 0.0)


def test_extraction_covers_what_views_disagree_on_only_when_asked(ball_views: SceneViews) -> None:
    scene = SurfaceScene(disagreeing(ball_views), None, CaptureFrame(np.eye(3), np.zeros(3), 1.0), {})
    open_ball = extract_mesh(scene, ExtractionOptions(voxel=0.03))
    filled = extract_mesh(scene, ExtractionOptions(voxel=0.03, fill_holes=True))
    assert open_ball.mesh.vertices[:, 2].max() < 0.45 < filled.mesh.vertices[:, 2].max()
    share = filled.facts["filled_share"]
    assert isinstance(share, float) and 0 < share < 0.2 and "filled_share" not in open_ball.facts
    closed = extract_mesh(scene, ExtractionOptions(voxel=0.03, close_holes=1.0, thin_parts=False))
    assert closed.mesh.vertices[:, 2].max() < 0.45 and closed.mesh.is_watertight
    low = filled.mesh.vertices[:, 2] < 0
    np.testing.assert_allclose(np.linalg.norm(filled.mesh.vertices[low], axis=1), 0.5, atol=0.03)
