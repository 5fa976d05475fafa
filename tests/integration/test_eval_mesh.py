"""``f3rm-ext eval mesh`` as a user types it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import trimesh

Typed = Callable[..., Any]


def test_the_truth_itself_scores_full(f3rm_ext: Typed, tiny_capture: Path, tmp_path: Path, open3d: ModuleType) -> None:
    mesh, out = tiny_capture / "gt_mesh.ply", tmp_path / "scores.json"
    done = f3rm_ext(
        *("eval", "mesh", mesh, "--truth", tiny_capture / "gt_mesh.npz", "--points", 20_000),
        *("--thresholds", 0.05, 0.1, "--seen-from", tiny_capture, "--crop-min", -2, -2, 0.05, "--out", out),
    ).succeeds()
    found = json.loads(out.read_text())
    assert found["accuracy"] < 0.05 and found["completeness"] < 0.05 and found["normal_consistency"] > 0.8
    assert [score["threshold"] for score in found["scores"]] == [0.05, 0.1]
    assert found["scores"][1]["f_score"] > 0.95 and found["protocol"] == "plain" and not found["icp"]
    # The crop and the cameras take points out.
    assert found["points"] < 20_000 and found["true_points"] < found["points"]
    assert "completeness" in done.stdout and "F-score at 0.05" in done.stdout


def test_a_shift_is_undone_by_a_matrix_or_icp(f3rm_ext: Typed, tmp_path: Path, open3d: ModuleType) -> None:
    truth = trimesh.creation.box((1, 2, 3))
    away = truth.copy().apply_translation([0.02, -0.03, 0.01])
    truth.export(tmp_path / "truth.ply")
    away.export(tmp_path / "away.ply")
    np.savetxt(tmp_path / "back.txt", trimesh.transformations.translation_matrix([-0.02, 0.03, -0.01]))
    accuracy = {}
    for name, more in (("as is", ()), ("matrix", ("--transform", tmp_path / "back.txt")), ("icp", ("--icp",))):
        f3rm_ext(
            *("eval", "mesh", tmp_path / "away.ply", "--truth", tmp_path / "truth.ply", "--points", 30_000),
            *("--out", tmp_path / "scores.json", *more),
        ).succeeds()
        accuracy[name] = json.loads((tmp_path / "scores.json").read_text())["chamfer"]
    assert accuracy["matrix"] < accuracy["as is"] - 0.004 and accuracy["icp"] < accuracy["as is"] - 0.003


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("none.ply", "--truth", "truth.ply"), "There is no file none.ply"),
        (("truth.ply", "--truth", "points.ply", "--seen-from", "."), "has points only"),
        (("truth.ply", "--truth", "truth.ply", "--protocol", "dtu"), "--observation-mask"),
        (("truth.ply", "--truth", "truth.ply", "--ground-plane", "p.mat"), "--protocol dtu"),
        (("truth.ply", "--truth", "truth.ply", "--protocol", "tanks-and-temples"), "Ignatius 0.003"),
        (("truth.ply", "--truth", "truth.ply", "--thresholds", "0"), "above 0"),
        (("truth.ply", "--truth", "truth.ply", "--crop-min", "9", "9", "9"), "No point of the mesh is left"),
        (("truth.ply", "--truth", "truth.ply", "--transform", "none.txt"), "cannot be read"),
        (("truth.ply", "--truth", "truth.ply", "--out", "scores.txt"), ".json"),
        (("empty.ply", "--truth", "truth.ply"), "no points and no faces"),
    ],
)
def test_mistakes(
    f3rm_ext: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    trimesh.creation.box((1, 2, 3)).export(tmp_path / "truth.ply")
    trimesh.PointCloud(np.random.default_rng(0).random((50, 3))).export(tmp_path / "points.ply")
    (tmp_path / "empty.ply").write_text("ply\nformat ascii 1.0\nelement vertex 0\nproperty float x\nend_header\n")
    monkeypatch.chdir(tmp_path)
    assert says in f3rm_ext("eval", "mesh", *arguments).refuses()
