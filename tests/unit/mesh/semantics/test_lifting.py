"""Features of a floor whose two halves are known, lifted from photos."""

from typing import Any

import numpy as np
import pytest
import trimesh

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.semantics import lifting
from f3rm_ext.mesh.semantics.lifting import lift_vertices, nearest_visible

pytestmark = pytest.mark.usefixtures("open3d")


def test_each_half_gets_its_feature(floor: trimesh.Trimesh, pictures: Any) -> None:
    steps = []
    lifted = lift_vertices(floor, pictures.photos, pictures.load, 2, lambda *step: steps.append(step))
    assert lifted.visible.all() and steps[-1] == ("Photos", 3, 3)
    x = np.asarray(floor.vertices)[:, 0]
    np.testing.assert_array_equal(lifted.codes[x < -0.01], [[1, 0]] * int((x < -0.01).sum()))
    np.testing.assert_array_equal(lifted.codes[x > 0.01], [[0, 1]] * int((x > 0.01).sum()))
    (west,), (east,) = (set(lifted.groups[side].tolist()) for side in (x < -0.01, x > 0.01))
    assert west != east and min(west, east) >= 0


def test_several_passes_give_the_same(floor: trimesh.Trimesh, pictures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = lift_vertices(floor, pictures.photos, pictures.load, 2)
    monkeypatch.setattr(lifting, "SUMS_MIB", 40 * 4 * 2 / 2**20)
    monkeypatch.setattr(lifting, "_PLACES_AT_ONCE", 7)
    steps = []
    parts = lift_vertices(floor, pictures.photos, pictures.load, 2, lambda *step: steps.append(step))
    assert steps[-1] == ("Photos", 12, 12)
    np.testing.assert_array_equal(parts.codes, whole.codes)


def test_what_hides_the_floor_keeps_its_own_feature(floor: trimesh.Trimesh, pictures: Any) -> None:
    # A board over the whole west half: the floor below it is not seen and must not take the board's feature through it.
    board = trimesh.creation.box((1.2, 2.4, 0.02)).apply_translation([-0.65, 0, 0.5])
    mesh = trimesh.util.concatenate([trimesh.Trimesh(floor.vertices, floor.faces, process=False), board])
    lifted = lift_vertices(mesh, pictures.photos, pictures.load, 2, per_group=False)
    x = np.asarray(floor.vertices)[:, 0]
    under = np.flatnonzero(x < -0.5)
    assert not lifted.visible[under].any()
    # It takes that of the nearest floor that is seen, along the surface.
    assert (lifted.codes[under] == lifted.codes[under[0]]).all() and lifted.codes[under[0], 1] >= 0.5
    assert lifted.groups.min() >= 0
    # Drawn halfway to the mean of the group, of whichever vertices it is.
    drawn, seen = lift_vertices(mesh, pictures.photos, pictures.load, 2), np.flatnonzero(lifted.visible)
    own = seen[lifted.groups[seen] == lifted.groups[seen[0]]]
    wanted = (lifted.codes[own] + lifted.codes[np.unique(own)].astype(float).mean(axis=0)) / 2
    np.testing.assert_allclose(drawn.codes[own], wanted, atol=2e-3)


def test_doubled_vertices_get_one_feature(floor: trimesh.Trimesh, loose: trimesh.Trimesh, pictures: Any) -> None:
    lifted = lift_vertices(loose, pictures.photos, pictures.load, 2)
    joined = lift_vertices(floor, pictures.photos, pictures.load, 2)
    np.testing.assert_array_equal(lifted.codes, joined.codes[floor.faces.ravel()])


def test_a_mesh_elsewhere_is_refused(floor: trimesh.Trimesh, pictures: Any) -> None:
    away = trimesh.Trimesh(floor.vertices + [50.0, 0, 0], floor.faces, process=False)
    with pytest.raises(MeshError, match="photo"):
        lift_vertices(away, pictures.photos, pictures.load, 2)


def test_nearest_is_along_the_surface() -> None:
    # A strip 0-1-2-3 folded back, so that 3 is beside 0 in space; 4-5-6 is another part.
    points = np.array([[0, 0, 0], [1, 0, 0], [1, 0, 0.1], [0, 0, 0.1], [9, 0, 0], [9, 1, 0], [9, 0, 1.0]])
    faces = np.array([[0, 1, 1], [1, 2, 2], [2, 3, 3], [4, 5, 6]])
    seen = np.array([True, False, True, False, False, False, False])
    assert nearest_visible(points, faces, seen)[:4].tolist() == [0, 2, 2, 2]
    assert set(nearest_visible(points, faces, seen)[4:].tolist()) <= {0, 2}
    assert nearest_visible(points, faces, np.ones(7, bool)).tolist() == list(range(7))
