"""Shapes are closed, turned outwards and smooth, and have the size that was asked for."""

import numpy as np
import pytest

from f3rm_ext.synthetic import objects, shapes
from f3rm_ext.synthetic.mesh import Mesh, placement

CLOSED = {
    "sphere": (shapes.sphere(0.5), 4 / 3 * np.pi * 0.5**3),
    "cylinder": (shapes.cylinder(0.3, 0.8), np.pi * 0.3**2 * 0.8),
    "torus": (shapes.torus(0.5, 0.2), 2 * np.pi**2 * 0.5 * 0.2**2),
    "box": (shapes.box(0.4, 0.5, 0.6), 0.12),
    "rounded box": (shapes.rounded_box(0.4, 0.5, 0.6, 0.01), 0.12),
    "cone": (
        shapes.lathe(np.array([[0, 0], [0.3, 0]]), shapes.resample([(0.3, 0), (0.003, 0.594)], 0.02)),
        np.pi * 0.018,
    ),
    "tube": (shapes.tube(np.linspace([0, 0, 0], [0, 0, 1], 8), 0.1, around=48), np.pi * 0.01),
    "isosurface": (
        shapes.isosurface(lambda p: np.linalg.norm(p, axis=-1) - 0.5, (-0.6,) * 3, (0.53,) * 3, 0.04),
        4 / 3 * np.pi * 0.5**3,
    ),
}


def face_normals(mesh: Mesh) -> np.ndarray:
    corners = mesh.vertices[mesh.faces]
    return np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])


def volume(mesh: Mesh) -> float:
    return float((mesh.vertices[mesh.faces[:, 0]] * face_normals(mesh)).sum() / 6)


@pytest.mark.parametrize("name", CLOSED)
def test_volume_and_outside(name: str) -> None:
    """The signed volume is right only for a closed mesh whose triangles all face outwards."""
    mesh, expected = CLOSED[name]
    assert volume(mesh) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", CLOSED)
def test_normals_follow_the_facets(name: str) -> None:
    mesh, _ = CLOSED[name]
    np.testing.assert_allclose(np.linalg.norm(mesh.normals, axis=1), 1, atol=1e-9)
    facets = face_normals(mesh)
    facets /= np.linalg.norm(facets, axis=1, keepdims=True)
    assert (facets[:, None] * mesh.normals[mesh.faces]).sum(axis=-1).min() > 0.8


@pytest.mark.parametrize("name", sorted(set(CLOSED) - {"isosurface"}))
def test_stands_on_the_ground(name: str) -> None:
    assert CLOSED[name][0].vertices[:, 2].min() == pytest.approx(0, abs=1e-9)


def test_placement_tilts_then_turns_then_shifts() -> None:
    np.testing.assert_allclose(placement(1, 2, 3, turn_deg=90, tilt_deg=90) @ [0, 1, 0, 1], [1, 2, 4, 1], atol=1e-12)
    np.testing.assert_allclose(placement(1, 2, 3, turn_deg=90) @ [1, 0, 0, 1], [1, 3, 3, 1], atol=1e-12)


@pytest.mark.parametrize("name", [*objects.TALL, *objects.SMALL])
def test_objects_fit_their_place_on_the_table(name: str) -> None:
    mesh = {**objects.TALL, **objects.SMALL}[name](objects.Workshop(np.random.default_rng(0)))
    low, high = mesh.vertices.min(axis=0), mesh.vertices.max(axis=0)
    assert low[2] == pytest.approx(0, abs=0.004)
    assert 0.04 < high[2] < 0.5
    reach = np.linalg.norm(mesh.vertices[:, :2], axis=1).max()
    # Ten small ones stand 0.31 m apart near the rim; the lamp in the middle leaves the tall ones 0.26 m.
    assert reach < (0.125 if name in objects.SMALL else 0.26)
    assert np.isfinite(mesh.normals).all() and len(mesh.material) == len(mesh.faces)
