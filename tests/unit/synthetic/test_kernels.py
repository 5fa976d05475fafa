"""The fast ray caster against the readable one."""

import numpy as np
import pytest

from f3rm_ext.synthetic import shapes
from f3rm_ext.synthetic.kernels import MISS, build_tree, cast_brute_force, cast_many
from f3rm_ext.synthetic.mesh import join_meshes


def rays(number: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return spread * rng.normal(size=(number, 3)), rng.normal(size=(number, 3))


MESHES = {
    "torus": shapes.torus(0.8, 0.3, around=24, across=12),
    "box": shapes.box(1.0, 0.7, 0.4, 0.3),
    "heap": join_meshes(
        [shapes.sphere(0.3, 16).place(x, y, 0.1 * x) for x in (-1.0, 0.0, 1.0) for y in (-1.0, 0.0, 1.0)]
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_tree_finds_the_hits_of_brute_force(name: str) -> None:
    mesh = MESHES[name]
    vertices = mesh.vertices.astype(np.float32)
    origins, directions = rays(150, 0.6)
    expected, _ = cast_brute_force(vertices, mesh.faces, origins, directions)
    t, faces, weights = cast_many(build_tree(vertices, mesh.faces), origins, directions)
    hit = np.isfinite(expected)
    assert 20 < hit.sum() < 150
    np.testing.assert_array_equal(faces != MISS, hit)
    np.testing.assert_allclose(t[hit], expected[hit], rtol=1e-5)
    # The reported face and weights describe the same point as t does.
    u, v = weights[hit].T[:, :, None]
    a, b, c = vertices[mesh.faces[faces[hit]]].astype(float).transpose(1, 0, 2)
    np.testing.assert_allclose((1 - u - v) * a + u * b + v * c, (origins + t[:, None] * directions)[hit], atol=2e-6)


def test_axis_parallel_rays_are_not_lost() -> None:
    """Their slab test divides by zero."""
    mesh = MESHES["box"]
    origins = np.array([[0.01, 0.02, 5.0], [0.01, 5.0, 0.21], [5.0, 0.02, 0.21], [0.6, 0.02, 5.0]])
    directions = np.array([[0.0, 0.0, -1.0], [0.0, -1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])
    t, faces, _ = cast_many(build_tree(mesh.vertices, mesh.faces), origins, directions)
    np.testing.assert_allclose(t[:3], [4.6, 4.65, 4.5], atol=1e-6)
    assert faces[3] == MISS


def test_nothing_behind_far_is_hit() -> None:
    mesh = MESHES["box"]
    origins, directions = np.array([[0.0, 0.0, 5.0]]), np.array([[0.0, 0.0, -1.0]])
    tree = build_tree(mesh.vertices, mesh.faces)
    assert cast_many(tree, origins, directions, far=4.5)[1][0] == MISS
    assert cast_many(tree, origins, directions, far=4.7)[1][0] != MISS


def test_no_ray_slips_between_triangles() -> None:
    """From inside a closed mesh every ray hits, those at its vertices and edges too."""
    mesh = shapes.sphere(1.0, 24)
    vertices = mesh.vertices.astype(np.float32)
    centre = np.array([0.0, 0.0, 1.0])
    corners = vertices[mesh.faces].astype(float)
    aims = np.concatenate([vertices, corners[:, :2].mean(axis=1), corners.mean(axis=1)]) - centre
    _, faces, _ = cast_many(build_tree(vertices, mesh.faces), np.tile(centre, (len(aims), 1)), aims)
    assert (faces != MISS).all()


def test_every_triangle_is_in_the_tree_once() -> None:
    mesh = MESHES["heap"]
    tree = build_tree(mesh.vertices, mesh.faces)
    np.testing.assert_array_equal(np.sort(tree.order), np.arange(len(mesh.faces)))
    assert tree.count.sum() == len(mesh.faces)


def test_triangles_in_one_point_do_not_hang_the_build() -> None:
    vertices = np.tile(np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]]), (50, 1))
    tree = build_tree(vertices, np.arange(150).reshape(50, 3))
    assert cast_many(tree, np.array([[0.2, 0.2, 1.0]]), np.array([[0.0, 0.0, -1.0]]))[0][0] == pytest.approx(1.0)
