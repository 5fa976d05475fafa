"""Depth of a ball, fused."""

import numpy as np
import pytest

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import MeshError
from f3rm_ext.mesh import fusion
from f3rm_ext.mesh.fusion import choose_voxel, fuse_depth
from f3rm_ext.mesh.mesh_files import vertex_colors
from f3rm_ext.mesh.views import RenderedView, SceneViews, stored_views

pytestmark = pytest.mark.usefixtures("open3d")


def test_a_ball(ball_views: SceneViews) -> None:
    with stored_views(ball_views) as stored:
        mesh = fuse_depth(stored, 0.02)
    radii = np.linalg.norm(mesh.vertices, axis=1)
    assert abs(radii.mean() - 0.5) < 2e-3 and radii.std() < 4e-3 and np.abs(mesh.vertices.mean(axis=0)).max() < 2e-3
    assert mesh.is_watertight and mesh.euler_number == 2 and mesh.volume > 0
    colors = vertex_colors(mesh)
    np.testing.assert_allclose(colors / 255, mesh.vertices + 0.5, atol=0.06)


def test_slabs_give_the_same_mesh(ball_views: SceneViews, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    with stored_views(ball_views) as stored:
        whole = fuse_depth(stored, 0.02)
        monkeypatch.setattr(fusion, "MOST_BLOCKS", 1)
        sliced = fuse_depth(stored, 0.02, on_progress=lambda done, total: seen.append((done, total)))
    assert sliced.is_watertight and len(sliced.faces) == len(whole.faces)
    assert len(sliced.vertices) == len(whole.vertices)
    assert sliced.volume == pytest.approx(whole.volume, rel=1e-5)
    assert seen[-1][0] == seen[-1][1] > 2 * len(ball_views)


def test_voxels_that_few_views_see_are_left_out(ball_views: SceneViews) -> None:
    with stored_views(ball_views) as stored:
        assert fuse_depth(stored, 0.02, min_weight=5.0).area < 0.8 * fuse_depth(stored, 0.02).area


@pytest.mark.parametrize("most", [2000, 8000])
def test_voxels_become_wider_where_a_mesh_would_be_too_large(
    ball_views: SceneViews, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    with stored_views(ball_views) as stored:
        assert choose_voxel(stored, 0.02) == 0.02
        monkeypatch.setattr(fusion, "MOST_VERTICES", most)
        voxel = choose_voxel(stored, 0.005)
        assert 0.4 * most < len(fuse_depth(stored, voxel).vertices) < 1.5 * most
        assert choose_voxel(stored, 0.005, lambda centers: centers[:, 0] > 0) < 0.85 * voxel


def test_no_depth(ring: PinholeCameras) -> None:
    nothing = RenderedView(np.zeros((48, 48, 3), np.uint8), np.zeros((48, 48), np.float32))
    with stored_views(SceneViews(ring, lambda index: nothing)) as stored:
        with pytest.raises(MeshError, match="depth"):
            fuse_depth(stored, 0.02)


def test_a_view_of_hardly_any_pixel(ball_views: SceneViews) -> None:
    def render(index: int) -> RenderedView:
        view = ball_views.render(index)
        if index == 0:  # Open3D looks at every fourth pixel, and fails where it finds none
            view.depth[:] = np.where(np.indices(view.depth.shape).sum(axis=0) == 47, view.depth, 0)
            view.depth[::2] = 0
        return view

    with stored_views(SceneViews(ball_views.cameras, render)) as stored:
        assert (stored.depth(0) > 0).sum() > 5 and fuse_depth(stored, 0.02).is_watertight


def test_pixels_are_where_the_camera_has_them(ring: PinholeCameras, ball_views: SceneViews) -> None:
    # One camera alone shows a shift by half a pixel, which those on the other side undo.
    one = PinholeCameras(*(part[:1] for part in ring))
    with stored_views(SceneViews(one, ball_views.render)) as stored:
        mesh = fuse_depth(stored, 0.01)
    at = mesh.vertices @ ring.viewmats[0, :3, :3].double().numpy().T
    middle = (at[:, :2].min(axis=0) + at[:, :2].max(axis=0)) / 2
    assert np.abs(middle).max() < 5e-3
    colors = vertex_colors(mesh)
    wrong = (colors / 255 - 0.5 - mesh.vertices)[at[:, 2] < -0.4] @ ring.viewmats[0, :3, :3].double().numpy().T
    assert np.abs(wrong.mean(axis=0)).max() < 2e-3
