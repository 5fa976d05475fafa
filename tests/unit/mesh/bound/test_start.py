"""Reading the mesh to refine: frames, colours, doubled vertices, triangles without area."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.bound.gaussians import bind
from f3rm_ext.mesh.bound.layout import PerTriangle
from f3rm_ext.mesh.bound.start import StartMesh, far_from_mesh, photo_colors, read_start_mesh
from f3rm_ext.mesh.camera import Camera
from f3rm_ext.mesh.mesh_files import write_mesh
from f3rm_ext.mesh.texture.photos import Photo, Photos
from f3rm_ext.mesh.texture.visibility import bilinear
from f3rm_ext.mesh.views import SceneViews

FRAME = CaptureFrame(np.eye(3), np.array([1.0, 0.0, 0.0]), 0.5)
CORNERS = np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]])
FACES = [[0, 1, 2], [1, 3, 2]]


def written(path: Path, mesh: trimesh.Trimesh, **provenance: object) -> Path:
    write_mesh(path, mesh, provenance)
    return path


def test_the_frame_is_what_the_file_says_else_the_captures(tmp_path: Path) -> None:
    mesh = trimesh.Trimesh(CORNERS, FACES, process=False)
    plain = written(tmp_path / "plain.ply", mesh)
    scene = written(tmp_path / "scene.ply", mesh, frame="scene")
    moved = FRAME.to_scene(CORNERS)
    for path, frame, used, expected in (
        (plain, "auto", "capture", moved),
        (scene, "auto", "scene", CORNERS),
        (plain, "scene", "scene", CORNERS),
        (scene, "capture", "capture", moved),
    ):
        found = read_start_mesh(path, frame, lambda: FRAME)  # type: ignore[arg-type]
        assert found.frame == used
        corners = torch.from_numpy(expected[np.array(FACES)]).float()
        torch.testing.assert_close(found.vertices[found.faces], corners)
    own, other = (
        written(tmp_path / f"{name}.obj", mesh, frame="scene", **frame.describe())
        for name, frame in (("own", FRAME), ("other", replace(FRAME, scale=2 * FRAME.scale)))
    )
    assert (
        read_start_mesh(own, "auto", lambda: FRAME).frame
        == read_start_mesh(other, "scene", lambda: FRAME).frame
        == "scene"
    )
    with pytest.raises(MeshError, match=r"other\.obj"):
        read_start_mesh(other, "auto", lambda: FRAME)


def test_doubled_vertices_are_one_and_keep_the_colors_of_their_triangles(tmp_path: Path) -> None:
    doubled = CORNERS[np.array(FACES)].reshape(-1, 3)
    colors = np.repeat([[255, 0, 0], [0, 0, 255]], 3, axis=0).astype(np.uint8)
    mesh = trimesh.Trimesh(doubled, np.arange(6).reshape(2, 3), vertex_colors=colors, process=False)
    found = read_start_mesh(written(tmp_path / "m.ply", mesh), "scene", lambda: FRAME)
    assert len(found.vertices) == 4 and found.corner_colors is not None
    assert found.corner_colors[:, 0].tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]


def test_triangles_without_area_and_unused_vertices_are_left_out(tmp_path: Path) -> None:
    vertices = np.concatenate([CORNERS, [[2.0, 0, 0], [9, 9, 9]]])
    mesh = trimesh.Trimesh(vertices, [*FACES, [0, 1, 4], [0, 0, 1]], process=False)
    found = read_start_mesh(written(tmp_path / "m.ply", mesh), "scene", lambda: FRAME)
    assert len(found.faces) == 2 and len(found.vertices) == 4 and found.corner_colors is None


def test_a_mesh_without_any_area(tmp_path: Path) -> None:
    flat = trimesh.Trimesh(CORNERS * [1, 0, 0], FACES, process=False)
    with pytest.raises(MeshError, match=r"2 .*m\.ply.*area"):
        read_start_mesh(written(tmp_path / "m.ply", flat), "scene", lambda: FRAME)


def test_points_are_no_mesh(tmp_path: Path) -> None:
    trimesh.PointCloud(CORNERS).export(tmp_path / "points.ply")
    with pytest.raises(MeshError, match="no faces"):
        read_start_mesh(tmp_path / "points.ply", "scene", lambda: FRAME)


def test_far_is_relative_to_the_nearest_camera() -> None:
    floor = StartMesh(torch.tensor(CORNERS).float() * 10, torch.tensor(FACES), None, "scene")
    cameras = torch.tensor([[5.0, 5.0, 1.0], [5.0, 5.0, 90.0]])
    points = torch.tensor([[5.0, 5.0, 0.04], [5.0, 5.0, 0.2], [9.0, 5.0, 0.2], [9.0, 5.0, -0.5], [30.0, 5.0, 0.0]])
    assert far_from_mesh(points, floor, cameras, 0.05).tolist() == [False, True, False, True, True]


@pytest.mark.parametrize("per_triangle", [1, 3])
def test_gaussians_have_the_colors_of_their_places_in_photos(ball_views: SceneViews, per_triangle: int) -> None:
    pinholes = [Camera.of(ball_views.cameras, index) for index in range(len(ball_views))]
    photos = Photos(pinholes, lambda index: Photo(ball_views.render(index).color, None))
    ball = trimesh.creation.icosphere(3, 0.5)
    vertices, faces = torch.from_numpy(np.array(ball.vertices)).float(), torch.from_numpy(np.array(ball.faces))
    bound = bind(vertices, faces, None, per_triangle, 0, 0.5, 1e-6)
    # The colour of a place on the ball is where it is.
    error = (photo_colors(bound, photos) - (bound.gaussians().means + 0.5)).abs()
    assert error.shape == (1280 * per_triangle, 3) and float(error.mean()) < 0.01 and float(error.max()) < 0.06


@pytest.mark.parametrize("per_triangle", [3, 6])
def test_each_gaussian_has_its_share_of_the_triangle(per_triangle: PerTriangle) -> None:
    """Gaussians of one pixel each tell stripes apart; those of a whole triangle would take the mean of both."""
    side, size = np.sqrt(2 * per_triangle), 64
    camera = Camera(np.eye(3), np.zeros(3), np.full(2, 100.0), np.full(2, size / 2), size, size)
    stripes = np.zeros((size, size, 3), np.uint8)
    stripes[:, ::2] = 200
    corners = np.stack(np.meshgrid(*[np.arange(6) * side] * 2), axis=-1).reshape(-1, 2) - 2.5 * side
    first = np.arange(30).reshape(5, 6)[:, :5].reshape(-1, 1)
    faces = np.concatenate([first + [0, 6, 1], first + [1, 6, 7]])  # facing the camera
    vertices = torch.from_numpy(np.column_stack([corners / 100 * 2, np.full(len(corners), 2.0)])).float()
    bound = bind(vertices, torch.from_numpy(faces), None, per_triangle, 0, 0.5, 1e-6)
    at, _ = camera.project(bound.gaussians().means.double().numpy())
    found = photo_colors(bound, Photos([camera], lambda index: Photo(stripes, None))).numpy()
    np.testing.assert_allclose(255 * found, bilinear(stripes.astype(np.float32), at), atol=0.5)
    assert found.std() > 0.1
