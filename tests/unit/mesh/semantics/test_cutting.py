"""Parts of meshes whose cut is known."""

import numpy as np
import pytest
import trimesh
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.mesh_files import vertex_colors
from f3rm_ext.mesh.semantics.cutting import clean_part, cut_at_level

pytestmark = pytest.mark.usefixtures("open3d")


def x_of(mesh: trimesh.Trimesh) -> np.ndarray:
    return np.asarray(mesh.vertices)[:, 0]


@pytest.mark.parametrize("level", [-0.93, 0.3, 0.77])
def test_the_cut_is_exact(floor: trimesh.Trimesh, level: float) -> None:
    part = cut_at_level(floor, x_of(floor), level)
    assert part.area == pytest.approx(2 * (1 - level))
    assert x_of(part).min() == pytest.approx(level, abs=1e-12)
    assert (part.area_faces > 1e-9).all() and (part.face_normals[:, 2] > 0.99).all()
    assert isinstance(part.visual, TextureVisuals)
    np.testing.assert_allclose(part.visual.uv, part.vertices[:, :2] / 2 + 0.5, atol=1e-9)
    # One piece: triangles share the new vertices.
    assert len(trimesh.graph.connected_components(part.edges)) == 1
    assert len(np.unique(part.vertices, axis=0)) == len(part.vertices)


def test_a_slanted_cut_joins_corners_of_both_kinds(floor: trimesh.Trimesh) -> None:
    part = cut_at_level(floor, np.asarray(floor.vertices) @ [0.7, 0.4, 0], 0.21)
    assert (part.vertices @ [0.7, 0.4, 0]).min() == pytest.approx(0.21, abs=1e-12)
    rest = cut_at_level(floor, -(np.asarray(floor.vertices) @ [0.7, 0.4, 0]), -0.21)
    assert part.area + rest.area == pytest.approx(floor.area)


def test_vertices_on_the_level_are_not_doubled(floor: trimesh.Trimesh) -> None:
    part = cut_at_level(floor, x_of(floor), float(np.unique(x_of(floor))[3]))
    assert part.area == pytest.approx(2 * (1 - np.unique(x_of(floor))[3]))
    assert (part.area_faces > 1e-9).all() and len(part.vertices) == 8 * 11


def test_colors_are_interpolated(floor: trimesh.Trimesh) -> None:
    red = np.rint(127.5 * (x_of(floor) + 1))
    mesh = trimesh.Trimesh(floor.vertices, floor.faces, process=False)
    mesh.visual = trimesh.visual.color.ColorVisuals(
        mesh, vertex_colors=np.stack([red, 0 * red, 0 * red], axis=1).astype(np.uint8)
    )
    part = cut_at_level(mesh, x_of(mesh), 0.3)
    colors = vertex_colors(part)
    np.testing.assert_allclose(colors[:, 0], 127.5 * (x_of(part) + 1), atol=1.01)


def test_nothing_and_everything_are_refused(floor: trimesh.Trimesh) -> None:
    with pytest.raises(MeshError, match=r"1\.5.*1\.000.*lower --threshold"):
        cut_at_level(floor, x_of(floor), 1.5)
    with pytest.raises(MeshError, match=r"-2.*raise --threshold"):
        cut_at_level(floor, x_of(floor), -2.0)
    corner = (np.arange(len(floor.vertices)) == 0).astype(float)
    with pytest.raises(MeshError, match="Only single vertices"):
        cut_at_level(floor, corner, 1.0)


def test_small_parts_go_and_texture_seams_do_not_separate(floor: trimesh.Trimesh, loose: trimesh.Trimesh) -> None:
    speck = trimesh.creation.box((0.05, 0.05, 0.05)).apply_translation([9, 0, 0])
    mesh = trimesh.util.concatenate([loose, speck])
    part = clean_part(mesh, 0.05, 0.0)
    assert part.area == pytest.approx(floor.area)


def test_a_closed_ball_is_watertight() -> None:
    ball = trimesh.creation.icosphere(3)
    part = cut_at_level(ball, np.asarray(ball.vertices)[:, 2], 0.2)
    assert not part.is_watertight
    closed = clean_part(part, 0.05, 2.0)
    assert closed.is_watertight and closed.volume == pytest.approx(np.pi * 0.8**2 * (3 - 0.8) / 3, rel=0.03)
    assert clean_part(part, 0.05, 0.0).area == pytest.approx(part.area)


def test_triangles_without_area_do_not_keep_holes_open() -> None:
    ball = trimesh.creation.icosphere(3)
    part = cut_at_level(ball, np.asarray(ball.vertices)[:, 2], 0.2)
    flat = [part.faces[100, 0], part.faces[100, 1], len(part.vertices)]
    points = np.concatenate([part.vertices, part.vertices[[flat[0]]]])
    part = trimesh.Trimesh(points, np.concatenate([part.faces, [flat]]), process=False)
    closed = clean_part(part, 0.0, 2.0)
    assert closed.volume == pytest.approx(np.pi * 0.8**2 * (3 - 0.8) / 3, rel=0.03)


def test_a_lid_has_one_color_of_the_texture() -> None:
    ball = trimesh.creation.icosphere(3)
    ball.visual = TextureVisuals(uv=np.asarray(ball.vertices)[:, :2] / 2 + 0.5)
    part = cut_at_level(ball, np.asarray(ball.vertices)[:, 2], 0.2)
    before = len(part.faces)
    closed = clean_part(part, 0.05, 2.0)
    assert isinstance(closed.visual, TextureVisuals) and len(closed.visual.uv) == len(closed.vertices)
    lid = closed.faces[before:]
    assert len(lid) and len(np.unique(closed.visual.uv[lid.ravel()], axis=0)) == 1
    welded = trimesh.Trimesh(closed.vertices, closed.faces)
    assert welded.is_watertight


def test_a_mesh_that_is_no_surface_is_not_closed(floor: trimesh.Trimesh) -> None:
    fin = trimesh.Trimesh([[0, 0, 0], [0.2, 0, 0], [0, 0, 1.0]], [[0, 1, 2]], process=False)
    points = np.concatenate([floor.vertices, fin.vertices])
    edge = [floor.faces[100, 0], floor.faces[100, 1], len(points) - 1]
    mesh = trimesh.Trimesh(points, np.concatenate([floor.faces, [edge]]), process=False)
    with pytest.raises(MeshError, match="edges"):
        clean_part(mesh, 0.0, 1.0)
    assert len(clean_part(mesh, 0.0, 0.0).faces) == len(mesh.faces)
