"""Distances between surfaces whose distances are known."""

import numpy as np
import pytest
import trimesh

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.mesh_files import SurfacePoints
from f3rm_ext.mesh.metrics import Comparison, compare, sample_mesh
from f3rm_ext.mesh.protocols import plain_comparison


def ball(radius: float) -> trimesh.Trimesh:
    return trimesh.creation.icosphere(5, radius)


def plane(height: float, side: float = 1.0, flip: bool = False) -> trimesh.Trimesh:
    corners = np.array([[0, 0, height], [side, 0, height], [side, side, height], [0, side, height]])
    faces = np.array([[0, 1, 2], [0, 2, 3]])
    return trimesh.Trimesh(corners, faces[:, ::-1] if flip else faces, process=False)


def test_concentric_balls_are_their_radii_apart() -> None:
    found = compare(plain_comparison(ball(1.1), ball(1.0), 60_000), (0.09, 0.11))
    assert found.accuracy == pytest.approx(0.1, abs=1.5e-3) and found.completeness == pytest.approx(0.1, abs=1.5e-3)
    assert found.chamfer == pytest.approx((found.accuracy + found.completeness) / 2)
    assert [score.f_score for score in found.scores] == [pytest.approx(0, abs=0.01), pytest.approx(1, abs=0.01)]
    assert found.normal_consistency is not None and found.normal_consistency > 0.99


def test_a_hole_costs_completeness_only() -> None:
    whole, half = plane(0.0), plane(0.0, side=0.5)
    found = compare(plain_comparison(half, whole, 40_000), (0.02,))
    assert found.accuracy < 0.005 < 0.1 < found.completeness
    (score,) = found.scores
    assert score.precision == 1 and score.recall == pytest.approx(0.27, abs=0.02)
    assert score.f_score == pytest.approx(2 * score.recall / (1 + score.recall))


def test_normals_may_point_either_way_but_not_across() -> None:
    same = compare(plain_comparison(plane(0.01, flip=True), plane(0.0), 5000), (0.02,))
    assert same.normal_consistency == pytest.approx(1)
    steep = plane(0.0)
    steep.apply_transform(trimesh.transformations.rotation_matrix(np.pi / 3, [1, 0, 0]))
    tilted = compare(plain_comparison(steep, plane(0.0), 5000), (0.02,))
    assert tilted.normal_consistency == pytest.approx(0.5, abs=1e-6)


def test_points_without_normals_have_no_normal_consistency() -> None:
    bare = SurfacePoints(sample_mesh(plane(0.0), 1000).positions, None)
    found = compare(plain_comparison(plane(0.1), bare, 1000), (0.2,))
    assert found.normal_consistency is None and found.record()["normal_consistency"] is None
    assert found.accuracy == pytest.approx(0.1, abs=0.01) and found.true_points == 1000


def test_outliers_do_not_count_in_means_but_in_scores() -> None:
    near, far = sample_mesh(plane(0.0), 900).positions, sample_mesh(plane(50.0), 100).positions
    ours, truth = SurfacePoints(np.concatenate([near, far]), None), SurfacePoints(near, None)
    found = compare(Comparison(ours, truth, ours, truth, max_distance=20.0), (1.0,))
    assert found.accuracy == 0 and found.scores[0].precision == pytest.approx(0.9)


def test_what_does_not_count_still_is_near() -> None:
    comparison = plain_comparison(plane(0.0), plane(0.0), 4000)
    left = comparison.truth.positions[:, 0] < 0.5
    found = compare(comparison.restrict(truth=left), (0.02,))
    assert found.accuracy < 0.01 and found.true_points == int(left.sum())


def test_nothing_to_compare() -> None:
    nothing, something = SurfacePoints(np.zeros((0, 3)), None), sample_mesh(plane(0.0), 10)
    with pytest.raises(MeshError, match="of the mesh"):
        compare(Comparison(nothing, something, something, something), (0.1,))
    with pytest.raises(MeshError, match=" 20 "):
        away = sample_mesh(plane(90.0), 10)
        compare(Comparison(something, away, something, away, max_distance=20.0), ())
    with pytest.raises(MeshError, match="area"):
        sample_mesh(trimesh.Trimesh(np.zeros((3, 3)), [[0, 1, 2]], process=False), 10)
