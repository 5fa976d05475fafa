"""Conventions of DTU and Tanks and Temples, on surfaces small enough to count."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import trimesh
from scipy.io import savemat
from scipy.spatial import KDTree

from f3rm_ext.errors import ConfigError, MeshError
from f3rm_ext.mesh.mesh_files import SurfacePoints
from f3rm_ext.mesh.metrics import compare
from f3rm_ext.mesh.protocols import (
    DtuMasks,
    capture_views,
    dtu_comparison,
    icp_transform,
    plain_comparison,
    tanks_comparison,
    thin_out,
    transform_surface,
    visible_points,
    volume_mask,
    voxel_means,
)


def sheet(z_mm: float, side_mm: float = 10.0) -> trimesh.Trimesh:
    corners = np.array([[0, 0, z_mm], [side_mm, 0, z_mm], [side_mm, side_mm, z_mm], [0, side_mm, z_mm]])
    return trimesh.Trimesh(corners, [[0, 1, 2], [0, 2, 3]], process=False)


@pytest.fixture
def masks(tmp_path: Path) -> DtuMasks:
    """The left half of 10 × 10 × 10 mm was observed; the ground is z = 1."""
    observed = np.ones((11, 11, 11), np.uint8)
    observed[6:] = 0
    savemat(tmp_path / "mask.mat", {"ObsMask": observed, "BB": np.array([[0.0, 0, 0], [10, 10, 10]]), "Res": 1.0})
    savemat(tmp_path / "plane.mat", {"P": np.array([[0.0], [0], [1], [-1]])})
    return DtuMasks.read(tmp_path / "mask.mat", tmp_path / "plane.mat")


def test_points_thinned_out_are_apart_and_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    points = SurfacePoints(np.random.default_rng(0).random((4000, 3)), None)
    for slab in (1 << 20, 500):
        monkeypatch.setattr("f3rm_ext.mesh.protocols._SLAB", slab)
        kept = thin_out(points, 0.08).positions
        distance, _ = KDTree(kept).query(kept, k=2)
        assert distance[:, 1].min() > 0.08
        assert KDTree(kept).query(points.positions)[0].max() <= 0.08


def test_dtu_counts_what_was_observed_above_the_ground(masks: DtuMasks) -> None:
    comparison = dtu_comparison(sheet(5.0), sheet(5.5), masks)
    assert comparison.surface.positions[:, 0].max() < 5.5 < comparison.near_surface.positions[:, 0].max()
    assert len(comparison.truth) == len(comparison.near_truth)
    found = compare(comparison, (1.0,))
    assert found.accuracy == pytest.approx(0.5, abs=0.05) == found.completeness
    with pytest.raises(MeshError, match="of the truth"):
        compare(dtu_comparison(sheet(5.0), sheet(0.5), masks), (1.0,))


def test_dtu_leaves_out_what_is_far(masks: DtuMasks) -> None:
    pair = trimesh.util.concatenate([sheet(5.0), sheet(60.0)])
    assert compare(dtu_comparison(sheet(5.0), pair, masks), (1.0,)).completeness < 0.2


def test_dtu_refuses_other_files_and_units(masks: DtuMasks, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.mat"):
        DtuMasks.read(tmp_path / "none.mat", None)
    with pytest.raises(ConfigError, match="lacks ObsMask"):
        DtuMasks.read(tmp_path / "plane.mat", None)
    with pytest.raises(MeshError, match="frame and units"):
        dtu_comparison(sheet(5.0, side_mm=1e5), sheet(5.0), masks)


def test_tanks_takes_one_point_per_voxel(open3d: ModuleType) -> None:
    comparison = tanks_comparison(sheet(0.0), sheet(0.3), None, 1.0)
    assert len(comparison.surface) == pytest.approx(400, rel=0.1)
    (score,) = compare(comparison, (1.0,)).scores
    assert score.f_score == 1
    assert compare(comparison, (0.2,)).scores[0].f_score == 0


def test_voxel_means_keep_unit_normals(open3d: ModuleType) -> None:
    points = SurfacePoints(np.random.default_rng(0).random((500, 3)), np.tile([0.0, 0, 1], (500, 1)))
    reduced = voxel_means(points, 0.5)
    assert reduced.normals is not None and len(reduced) == pytest.approx(8, abs=19)
    np.testing.assert_allclose(reduced.normals, np.tile([0.0, 0, 1], (len(reduced), 1)), atol=1e-6)
    for side in (0.0, 1e-12):
        with pytest.raises(MeshError, match="--thresholds"):
            voxel_means(points, side)


def test_polygon(open3d: ModuleType, tmp_path: Path) -> None:
    polygon = {
        "class_name": "SelectionPolygonVolume",
        "version_major": 1,
        "version_minor": 0,
        "orthogonal_axis": "Z",
        "axis_min": -1.0,
        "axis_max": 1.0,
        "bounding_polygon": [[0, 0, 0], [5, 0, 0], [5, 5, 0], [0, 5, 0]],
    }
    (tmp_path / "crop.json").write_text(json.dumps(polygon))
    points = SurfacePoints(np.array([[1.0, 1, 0], [6, 1, 0], [1, 1, 3], [4, 4, -0.5]]), None)
    assert volume_mask(points, tmp_path / "crop.json").tolist() == [True, False, False, True]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="no polygon"):
        volume_mask(points, tmp_path / "other.json")
    with pytest.raises(ConfigError, match=r"none\.json"):
        volume_mask(points, tmp_path / "none.json")


def test_icp_finds_the_motion(open3d: ModuleType) -> None:
    truth = SurfacePoints(np.random.default_rng(0).random((3000, 3)) * [1, 2, 3], None)
    motion = trimesh.transformations.rotation_matrix(0.02, [0, 0, 1])
    motion[:3, 3] = 0.01, -0.02, 0.01
    away = transform_surface(truth, np.linalg.inv(motion))
    np.testing.assert_allclose(icp_transform(away, truth, 0.1), motion, atol=5e-3)


def test_a_box_gets_points_of_its_own() -> None:
    wide = trimesh.util.concatenate([sheet(0.0, 1000.0), sheet(5.0)])
    comparison = plain_comparison(wide, wide, 2000, (-1.0, -1.0, 4.0), None)
    assert len(comparison.surface) == len(comparison.truth) == 2000 < len(comparison.near_surface)
    assert (comparison.surface.positions[:, 2] == 5).all()
    found = compare(comparison, (1.0,))
    assert found.scores[0].f_score == 1
    # Half of a face that reaches out of the box does not count.
    half = plain_comparison(sheet(0.0), sheet(0.0), 2000, None, (5.0, 20.0, 1.0))
    assert half.surface.positions[:, 0].max() <= 5 and len(half.surface) == pytest.approx(1000, rel=0.1)


def test_what_is_behind_outside_or_hidden_is_not_seen(tiny_capture: Path, open3d: ModuleType) -> None:
    views, frame = capture_views(tiny_capture)
    center = frame.to_capture(views.positions.double().numpy())[0]
    ahead = frame.directions_to_capture(views.forward.double().numpy())[0]
    anywhere = np.random.default_rng(0).uniform(-4, 4, (500, 3))
    points = np.concatenate([center + np.outer([1.0, 2.0], ahead), anywhere])
    viewmats, Ks = views.viewmats.double().numpy(), views.Ks.double().numpy()
    at = np.einsum("vij,nj->vni", viewmats[:, :3, :3], frame.to_scene(points)) + viewmats[:, None, :3, 3]
    x, y, z = np.moveaxis(np.einsum("vij,vnj->vni", Ks, at), -1, 0)
    inside = (z > 0) & (x >= 0) & (x < 64 * z) & (y >= 0) & (y < 48 * z)
    # Nothing hides any of them.
    far = trimesh.creation.box((1e-3, 1e-3, 1e-3)).apply_translation(center + 100)
    found = visible_points(points, far, tiny_capture)
    np.testing.assert_array_equal(found, inside.sum(axis=0) >= 2)
    assert found[:2].all() and 0.05 < found.mean() < 0.95
    shell = trimesh.creation.icosphere(4, 0.2).apply_translation(points[1])
    counted: list[int] = []
    hidden = visible_points(points, shell, tiny_capture, counted.append)
    assert not hidden[1] and counted[-1] == len(views.widths)
