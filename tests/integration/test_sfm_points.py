"""``f3rm-ext sfm points``: dense points of a capture."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import trimesh
from scipy.spatial import KDTree

from f3rm_ext.capture.points import read_point_cloud


def test_points_lie_on_the_surfaces_of_a_capture(
    run_command: Callable[..., Any], tiny_capture: Path, tmp_path: Path
) -> None:
    out = tmp_path / "dense"
    done = run_command("f3rm-ext", "sfm", "points", tiny_capture, "--out", out, "--points", 3000)
    assert done.code == 0, done.stderr
    meta = json.loads((out / "transforms.json").read_text())
    assert meta["ply_file_path"] == "stereo_points.ply" and (out / "images").is_dir()
    points, colors = read_point_cloud(out / "stereo_points.ply")
    assert len(points) == len(colors) and colors[-3000:].std() > 5
    truth = trimesh.load_mesh(out / "gt_mesh.ply", process=False)
    surface, _ = trimesh.sample.sample_surface(truth, 200_000, seed=0)[:2]
    far = KDTree(surface).query(points[-3000:])[0]
    assert np.median(far) < 0.1
    assert [path.name for path in tmp_path.iterdir()] == ["dense"], "a temporary folder is left"
    assert "Dense points: 3,000" in done.text


def test_a_folder_that_is_there_is_left_alone(
    run_command: Callable[..., Any], tiny_capture: Path, tmp_path: Path
) -> None:
    done = run_command("f3rm-ext", "sfm", "points", tiny_capture, "--out", tmp_path)
    assert done.code == 2 and "exists already" in done.stderr and not list(tmp_path.iterdir())
