"""``f3rm-ext sfm points``: dense points of a capture."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import trimesh
from scipy.spatial import KDTree

from f3rm_ext.capture.points import read_point_cloud


@pytest.fixture
def beside_photos(tiny_capture: Path, tmp_path: Path) -> Path:
    """The tiny capture with its photos outside of its folder."""
    folder = tmp_path / "captures" / "room"
    folder.mkdir(parents=True)
    shutil.copytree(tiny_capture / "images", tmp_path / "captures" / "photos")
    for item in tiny_capture.iterdir():
        if item.name not in ("images", "transforms.json"):
            (folder / item.name).symlink_to(item)
    text = (tiny_capture / "transforms.json").read_text()
    (folder / "transforms.json").write_text(text.replace('"images/', '"../photos/'))
    return folder


def test_points_lie_on_the_surfaces_of_a_capture(
    run_command: Callable[..., Any], beside_photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "copies" / "of" / "dense"
    done = run_command("f3rm-ext", "sfm", "points", beside_photos, "--out", out, "--points", 3000).succeeds()
    meta = json.loads((out / "transforms.json").read_text())
    assert meta["ply_file_path"] == "stereo_points.ply"
    assert all((out / frame["file_path"]).is_file() for frame in meta["frames"])
    assert {*meta["train_filenames"]} <= {frame["file_path"] for frame in meta["frames"]}
    points, colors = read_point_cloud(out / "stereo_points.ply")
    (count,) = re.findall(r"Dense points: ([\d,]+)", done.stdout)
    dense = int(count.replace(",", ""))
    assert 1000 < dense <= 3000 and len(points) == len(colors) > dense and colors[-dense:].std() > 5
    truth = trimesh.load_mesh(out / "gt_mesh.ply", process=False)
    surface, _ = trimesh.sample.sample_surface(truth, 200_000, seed=0)[:2]
    far = KDTree(surface).query(points[-dense:])[0]
    assert np.median(far) < 0.1
    assert [path.name for path in out.parent.iterdir()] == ["dense"], "a temporary folder is left"


def test_a_folder_that_is_there_is_left_alone(
    run_command: Callable[..., Any], tiny_capture: Path, tmp_path: Path
) -> None:
    done = run_command("f3rm-ext", "sfm", "points", tiny_capture, "--out", tmp_path)
    done.refuses("--out")
    assert not list(tmp_path.iterdir())


def test_photos_that_show_nothing(run_command: Callable[..., Any], beside_photos: Path, tmp_path: Path) -> None:
    for photo in beside_photos.parent.glob("photos/*"):
        cv2.imwrite(str(photo), np.full_like(cv2.imread(str(photo)), 90))
    done = run_command("f3rm-ext", "sfm", "points", beside_photos, "--out", tmp_path / "dense")
    done.refuses("--side")
    assert not (tmp_path / "dense").exists()


def test_points_of_the_capture_that_are_nan_are_left_out(
    run_command: Callable[..., Any], tiny_capture: Path, beside_photos: Path, tmp_path: Path
) -> None:
    cloud = trimesh.load_mesh(tiny_capture / "gt_mesh.ply", process=False).vertices[:10].copy()
    cloud[3] = np.nan
    trimesh.PointCloud(cloud).export(beside_photos / "points.ply")
    meta = json.loads((beside_photos / "transforms.json").read_text())
    (beside_photos / "transforms.json").write_text(json.dumps({**meta, "ply_file_path": "points.ply"}))
    out = tmp_path / "dense"
    done = run_command("f3rm-ext", "sfm", "points", beside_photos, "--out", out, "--points", 100).succeeds()
    points = read_point_cloud(out / "stereo_points.ply")[0]
    assert "9 of the capture" in done.stdout and np.isfinite(points).all()
