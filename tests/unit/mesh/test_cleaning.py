"""Repairs of small meshes."""

import numpy as np
import pytest
import trimesh

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.cleaning import clean, close_holes, face_components, simplify, small_parts
from f3rm_ext.mesh.mesh_files import vertex_colors

pytestmark = pytest.mark.usefixtures("open3d")


def colored(mesh: trimesh.Trimesh) -> trimesh.Trimesh:
    colors = np.full((len(mesh.vertices), 3), (10, 20, 30), np.uint8)
    return trimesh.Trimesh(mesh.vertices, mesh.faces, vertex_colors=colors, process=False)


def test_a_part_is_small_by_its_share_of_the_whole_area_and_the_largest_stays() -> None:
    box = trimesh.creation.box()
    fine = trimesh.creation.box((0.5, 0.5, 0.5)).subdivide().subdivide()  # a ninth of the area, most of the faces
    three = trimesh.util.concatenate([fine.apply_translation([4, 0, 0]), box, box.copy().apply_translation([2, 0, 0])])
    assert not small_parts(three, 0.0).any() and not small_parts(three, 0.10).any()
    assert (~small_parts(three, 0.12)).sum() == 2 * len(box.faces)
    assert (~small_parts(three, 1.0)).sum() == len(box.faces)
    assert len(clean(three, 0.12).faces) == 2 * len(box.faces)


def test_faces_are_connected_by_edges_of_any_number_of_faces() -> None:
    faces = [[0, 1, 2], [0, 1, 3], [1, 0, 4], [2, 5, 6]]  # three at one edge, and one at a corner
    mesh = trimesh.Trimesh(np.random.default_rng(0).random((7, 3)), faces, process=False)
    assert face_components(mesh).tolist() == [0, 0, 0, 1]


def test_broken_faces_are_removed() -> None:
    box = trimesh.creation.box()
    fin = len(box.vertices)
    faces = np.concatenate([box.faces, box.faces[:1], [[0, 0, 1]], [[*box.faces[0][:2], fin]]])
    broken = trimesh.Trimesh(
        np.concatenate([box.vertices, [box.vertices[box.faces[0][:2]].mean(axis=0) * 1.01, [9, 9, 9]]]),
        faces,
        process=False,
    )
    mended = clean(colored(broken))
    assert len(mended.faces) == len(box.faces) and len(mended.vertices) == len(box.vertices)
    assert vertex_colors(mended) is not None
    with pytest.raises(MeshError, match="area"):
        clean(trimesh.Trimesh(np.zeros((3, 3)), [[0, 1, 2]], process=False))


def test_holes_are_closed_up_to_a_size() -> None:
    ball = colored(trimesh.creation.icosphere(3, 1.0))
    centers = ball.triangles_center
    ball.update_faces((centers[:, 2] < 0.98) & (centers[:, 2] > -0.6))
    ball.remove_unreferenced_vertices()
    assert not ball.is_watertight
    some = close_holes(ball, 0.5)
    assert len(ball.faces) < len(some.faces) and not some.is_watertight
    every = close_holes(ball, 3.0)
    assert every.is_watertight and len(every.vertices) == len(ball.vertices)
    theirs, ours = vertex_colors(every), vertex_colors(ball)
    assert theirs is not None and ours is not None
    np.testing.assert_array_equal(theirs, ours)
    np.testing.assert_array_equal(every.vertices, ball.vertices)
    np.testing.assert_array_equal(every.faces[: len(ball.faces)], ball.faces)


@pytest.mark.parametrize("target", [700, 200, 20])
def test_the_target_counts_vertices(target: int) -> None:
    sheet = trimesh.creation.box().subdivide().subdivide().subdivide().subdivide()
    half = sheet.slice_plane([0, 0, 0], [0, 0, 1])
    assert half is not None and len(half.vertices) > 700
    made = simplify(colored(half), target)
    assert 0.9 * target <= len(made.vertices) <= target
    assert vertex_colors(made) is not None


@pytest.mark.parametrize("target", [10, 37, 50, 100, 101, 102, 103, 140])
def test_a_sheet_keeps_no_fewer_vertices_than_wanted(target: int) -> None:
    places = np.pad(np.argwhere(np.ones((12, 12))), ((0, 0), (0, 1)))
    corners = [12 * row + col for row in range(11) for col in range(11)]
    faces = [(at, at + step, at + 13) for at in corners for step in (1, 12)]
    faces = [face if face[1] == face[0] + 1 else face[::-1] for face in faces]
    sheet = trimesh.Trimesh(places, faces, process=False)
    assert len(simplify(sheet, target).vertices) == target
