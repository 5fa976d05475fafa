"""Reading the mesh to refine: frames, colours, doubled vertices, triangles without area."""

from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.bound.start import StartMesh, far_from_mesh, read_start_mesh
from f3rm_ext.mesh.mesh_files import write_mesh

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
    with pytest.raises(MeshError, match=r"None of the 2 triangles of .* has an area"):
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
