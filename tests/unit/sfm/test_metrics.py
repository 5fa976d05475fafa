"""Measures of poses, on errors that are known."""

from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from f3rm_ext.sfm import metrics
from f3rm_ext.sfm.cameras import CameraSet
from f3rm_ext.sfm.capture_cameras import CaptureCameras, match_images


def poses(count: int = 10, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return Rotation.from_quat(rng.normal(size=(count, 4))).as_matrix(), rng.normal(size=(count, 3))


def in_another_world(some: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    turn = Rotation.from_euler("xyz", [10, 200, 30], degrees=True).as_matrix()
    return turn @ some[0], 3.7 * some[1] @ turn.T + [5, 6, 7]


def test_the_world_does_not_matter() -> None:
    true = poses()
    found = metrics.compare_poses(in_another_world(true), true)
    assert found.rra == {"5": 1.0, "15": 1.0, "30": 1.0} and found.rta == found.rra
    assert found.auc_30 == 1.0 and found.center_accuracy == 1.0
    assert found.rotation_error_deg < 1e-6 and found.translation_error_deg < 1e-5 and found.center_error < 1e-9


def test_figures_are_those_of_their_definitions() -> None:
    true, rng = poses(), np.random.default_rng(1)
    turns = Rotation.from_rotvec(0.25 * rng.normal(size=(10, 3))).as_matrix()
    wrong = true[0] @ turns, true[1] + 0.25 * rng.normal(size=(10, 3))
    turned, aside = [], []
    for j in range(10):
        for i in range(j):
            (a, s), (b, t) = ((R[j].T @ R[i], R[j].T @ (c[i] - c[j])) for R, c in (wrong, true))
            turned.append(np.rad2deg(Rotation.from_matrix(a.T @ b).magnitude()))
            aside.append(np.rad2deg(np.arccos(abs(s @ t) / np.linalg.norm(s) / np.linalg.norm(t))))
    off = np.linalg.norm(metrics.align(wrong[1], true[1])(wrong[1]) - true[1], axis=1)
    size = max(np.linalg.norm(center - true[1].mean(axis=0)) for center in true[1])
    found = metrics.compare_poses(wrong, true)
    for limit in (5, 15, 30):
        assert found.rra[str(limit)] == np.mean([error < limit for error in turned])
        assert found.rta[str(limit)] == np.mean([error < limit for error in aside])
    assert 0 < found.rta["5"] < found.rta["15"] < 1 and found.rra["30"] != found.rta["30"]
    larger = np.maximum(turned, aside)
    assert found.auc_30 == pytest.approx(np.mean([(larger < limit).mean() for limit in range(1, 31)]))
    assert found.rotation_error_deg == pytest.approx(np.median(turned))
    assert found.translation_error_deg == pytest.approx(np.median(aside))
    assert found.center_accuracy == np.mean(off / size < 0.1) != np.mean(off < 0.1)
    assert found.center_error == pytest.approx(np.median(off) / size)
    assert found.center_error_units == pytest.approx(np.median(off))


def test_directions_lose_their_sign_as_published() -> None:
    rotations, centers = np.stack([np.eye(3)] * 2), np.array([[0.0, 0, 0], [1, 0, 0]])
    turned = np.array([[0.0, 0, 0], [np.cos(0.2), np.sin(0.2), 0]])
    errors = [metrics.relative_translation_errors_deg((rotations, c), (rotations, centers)) for c in (turned, -turned)]
    assert np.allclose(errors, np.rad2deg(0.2))


def test_missing_cameras_are_misses_of_all_their_pairs() -> None:
    true = poses(10)
    some = (true[0][:7], true[1][:7])
    found = metrics.compare_poses(some, some, all_true_centers=true[1], missing=3)
    assert found.rra["5"] == pytest.approx(21 / 45) and found.auc_30 == pytest.approx(21 / 45)
    assert found.center_accuracy == pytest.approx(0.7) and found.cameras == 7 and found.missing == 3
    assert metrics.compare_poses(some, some, all_true_centers=true[1]).rra["5"] == 1.0


def test_of_many_cameras_a_sample_of_pairs_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    true = poses(300)
    noise = Rotation.from_rotvec(np.random.default_rng(1).normal(scale=0.2, size=(300, 3))).as_matrix()
    seen = (true[0] @ noise, true[1] + 0.3 * poses(300, 2)[1])
    of_all = metrics.compare_poses(seen, true, missing=20)
    monkeypatch.setattr(metrics, "MOST_PAIRS", 10_000)
    some = metrics.compare_poses(seen, true, missing=20)
    assert (of_all.pairs, some.pairs) == (44_850, 10_000)
    assert some.rra["15"] != of_all.rra["15"] and some.rra == pytest.approx(of_all.rra, abs=0.02)
    assert some.rta == pytest.approx(of_all.rta, abs=0.02) and some.auc_30 == pytest.approx(of_all.auc_30, abs=0.02)
    assert metrics.compare_poses(seen, true, missing=20) == some, "the sample is not always the same"


def test_the_scene_scale_is_that_of_the_whole_sequence() -> None:
    true = poses(12)
    moved = true[1].copy()
    moved[0] += [0.3, 0, 0]
    near = metrics.compare_poses((true[0], moved), true)
    far = metrics.compare_poses((true[0], moved), true, all_true_centers=np.vstack([true[1], [[100.0, 0, 0]]]))
    assert near.center_error > 10 * far.center_error and near.center_error_units == far.center_error_units


def test_alignment_is_never_a_mirror() -> None:
    points = np.random.default_rng(0).normal(size=(20, 3))
    assert np.linalg.det(metrics.align(points, points * [1, 1, -1]).rotation) == pytest.approx(1)
    assert metrics.align(np.ones((3, 3)), points[:3]).scale == 1.0


def test_chamfer_is_of_squared_distances_in_both_directions() -> None:
    grid = np.stack(np.meshgrid(*[np.arange(4.0)] * 3), axis=-1).reshape(-1, 3)
    assert metrics.chamfer_distance(2 * grid + 1, grid) < 1e-20
    true = np.array([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]])
    wrong = true.copy()
    wrong[0] = [1.2, 0, 0]
    moved = metrics.align(wrong, true)(wrong)
    distances = np.linalg.norm(moved[:, None] - true[None], axis=-1)
    wanted = (distances.min(1) ** 2).mean() + (distances.min(0) ** 2).mean()
    assert metrics.chamfer_distance(wrong, true) == pytest.approx(wanted)


def test_images_are_paired_by_the_key_that_pairs_most(cameras: CameraSet) -> None:
    def captured(*names: str) -> CaptureCameras:
        return CaptureCameras(Path("capture"), [{"file_path": name} for name in names], cameras)

    true = captured("images/a.png", "b.png", "images/c.png")
    assert match_images(captured("images/c.png", "b.png", "images/a.png"), true) == [(2, 0), (1, 1), (0, 2)]
    assert match_images(captured("small/c.png", "b.png", "small/a.png"), true) == [(2, 0), (1, 1), (0, 2)], "names"
    assert match_images(captured("b.jpg", "images/a.png", "x.png"), true) == [(1, 0), (0, 1)], "stems"
    assert match_images(captured("b.png", "images/a.png", "b.jpg"), true) == [(1, 0), (0, 1)], "paths, which are clear"
