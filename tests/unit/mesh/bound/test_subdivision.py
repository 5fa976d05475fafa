"""Dividing triangles where splats are dense: the surface stays the same, and neighbours still share their vertices."""

import numpy as np
import torch
import trimesh

from f3rm_ext.mesh.bound.start import StartMesh
from f3rm_ext.mesh.bound.subdivision import divide
from f3rm_ext.utils.open3d_library import RayCaster


def a_ball() -> StartMesh:
    """A ball whose colours are its places, so that they are linear on triangles."""
    ball = trimesh.creation.icosphere(1)
    vertices, faces = torch.from_numpy(np.array(ball.vertices)).float(), torch.from_numpy(np.array(ball.faces))
    return StartMesh(vertices, faces, (vertices[faces] + 1) / 2, "scene")


def solid(mesh: StartMesh) -> trimesh.Trimesh:
    return trimesh.Trimesh(mesh.vertices.double().numpy(), mesh.faces.numpy(), process=False)


def test_triangles_are_divided_where_points_are() -> None:
    ball = a_ball()
    places = trimesh.sample.sample_surface(solid(ball), 4000, seed=0)[0]
    points = torch.from_numpy(places[places[:, 0] > 0.9]).float()
    fine = divide(ball, points, 2)
    before, after = solid(ball), solid(fine)
    assert after.is_watertight and after.is_winding_consistent
    np.testing.assert_allclose([after.area, after.volume], [before.area, before.volume], rtol=1e-5)
    torch.testing.assert_close(fine.corner_colors, (fine.vertices[fine.faces] + 1) / 2)
    # The other side has the triangles that it had.
    assert (after.triangles_center[:, 0] < -0.5).sum() == (before.triangles_center[:, 0] < -0.5).sum()
    near, *_ = RayCaster(fine.vertices.numpy(), fine.faces.numpy()).nearest(points.numpy())
    assert np.bincount(near).max() <= 2
    # No triangle is much thinner than those of the ball.
    edges = np.linalg.norm(after.triangles - np.roll(after.triangles, 1, axis=1), axis=2)
    assert (after.area_faces / edges.max(axis=1) ** 2).min() > 0.14


def test_points_at_one_place_do_not_divide_for_ever() -> None:
    ball = a_ball()
    fine = divide(ball, torch.tensor([[1.1, 0.2, 0.3]]).expand(50, 3), 1)
    assert len(ball.faces) < len(fine.faces) < 1000


def test_no_triangle_is_divided_without_need() -> None:
    ball = a_ball()
    assert divide(ball, torch.zeros(0, 3), 1) is ball
    assert divide(ball, ball.vertices[ball.faces].mean(dim=1), 1) is ball
