"""Checks of poses, intrinsics and dataparser outputs."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs

from f3rm_ext.capture import checks
from f3rm_ext.errors import CaptureError


def rotation(seed: int = 0) -> np.ndarray:
    q = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))[0]
    return q * np.sign(np.linalg.det(q))


def pose(turn: np.ndarray | None = None) -> np.ndarray:
    matrix = np.eye(4)
    matrix[:3, :3] = rotation() if turn is None else turn
    matrix[:3, 3] = [3.0, -2.0, 0.5]
    return matrix


def test_good_poses_pass_even_when_rounded():
    for seed in range(20):
        checks.check_pose(pose(rotation(seed)).tolist(), f"{seed}.png")
        checks.check_pose(pose(rotation(seed)).round(3).tolist(), f"{seed}.png")
        checks.check_pose(pose(rotation(seed))[:3], f"{seed}.png")


def with_entry(row: int, column: int, value: float) -> np.ndarray:
    matrix = pose()
    matrix[row, column] = value
    return matrix


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (with_entry(0, 3, np.nan), "NaN or infinite"),
        (with_entry(1, 1, np.inf), "NaN or infinite"),
        (with_entry(0, 0, 5.0), "is not rigid"),
        (pose(np.zeros((3, 3))), "is not rigid"),
        (pose(2.5 * rotation()), "scale of 2.5"),
        (pose(rotation() @ np.diag([1.0, 1.0, -1.0])), "mirrors"),
        (pose(rotation() @ np.array([[1, 0.05, 0], [0, 1, 0], [0, 0, 1]])), "is not rigid"),
        (pose().T, "last row"),
        (np.eye(3), "4 x 4"),
        (np.eye(4)[None], "4 x 4"),
        (None, "4 x 4"),
        ([[1, 0], [0]], "4 x 4"),
        ([["a"] * 4] * 4, "4 x 4"),
    ],
)
def test_bad_poses_are_named(matrix: object, message: str):
    with pytest.raises(CaptureError, match=message) as caught:
        checks.check_pose(matrix, "frame/a.png")
    assert "frame/a.png" in str(caught.value)


def test_intrinsics_become_per_frame_only_where_a_frame_has_its_own():
    meta = {
        "fl_x": 10, "w": 8, "k1": 0.1, "p1": 0.2, "other": 1,
        "frames": [{"file_path": "a", "w": 9, "k1": 0.5}, {"file_path": "b"}],
    }  # fmt: skip
    before = copy.deepcopy(meta)
    result = checks.per_frame_intrinsics(meta)
    assert meta == before, "the argument must not change"
    assert result["fl_x"] == 10 and result["other"] == 1 and "w" not in result and "k1" not in result
    assert result["frames"][0] == {"file_path": "a", "w": 9, "k1": 0.5}, "its distortion is a whole"
    assert result["frames"][1] == {"file_path": "b", "w": 8, "k1": 0.1, "p1": 0.2}


def outputs(folder: Path, count: int = 3) -> DataparserOutputs:
    paths = [folder / f"{i}.png" for i in range(count)]
    for path in paths:
        path.touch()
    poses = torch.from_numpy(np.stack([pose(rotation(i))[:3] for i in range(count)])).float()
    cameras = Cameras(camera_to_worlds=poses, fx=10.0, fy=10.0, cx=5.0, cy=5.0, width=10, height=10)
    return DataparserOutputs(image_filenames=paths, cameras=cameras)


def test_single_images_and_missing_files_of_outputs(tmp_path: Path):
    with pytest.raises(CaptureError, match="single image"):
        checks.check_dataparser_outputs(outputs(tmp_path, 1))
    checks.check_dataparser_outputs(outputs(tmp_path, 1), min_images=1)
    result = outputs(tmp_path)
    checks.check_dataparser_outputs(result)
    (tmp_path / "1.png").unlink()
    with pytest.raises(CaptureError, match=r"1 of 3.*1\.png"):
        checks.check_dataparser_outputs(result)
    checks.check_dataparser_outputs(result, check_files=False)


@pytest.mark.parametrize(("value", "message"), [(float("nan"), "NaN"), (4.0, "not rigid")])
def test_bad_poses_of_outputs(tmp_path: Path, value: float, message: str):
    result = outputs(tmp_path)
    result.cameras.camera_to_worlds[2, 0, 0] = value
    with pytest.raises(CaptureError, match=rf"2\.png .*{message}"):
        checks.check_dataparser_outputs(result)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("applied_transform", [[math.nan] * 4] * 3),
        ("applied_transform", np.zeros((3, 4)).tolist()),
        ("applied_transform", "text"),
        ("applied_transform", [[1, 0, 0, 0], [0, 1, 0], [0, 0, 1, 0]]),
        ("applied_scale", 0),
        ("applied_scale", math.inf),
        ("k1", math.nan),
        ("depth_unit_scale_factor", 10**400),
        ("train_filenames", 3),
        ("ply_file_path", {}),
        ("orientation_override", "sideways"),
        ("file_path", "x" * 5000),
        ("file_path", "x" * 300),
        ("mask_path", "a\0b"),
        ("depth_file_path", None),
        ("file_path", "\ud800"),
    ],
)
def test_what_stands_in_transforms_is_checked_when_it_is_read(tmp_path: Path, key: str, value: object) -> None:
    frame = {"file_path": "a.png"}
    owner = frame if key in ("file_path", "mask_path", "depth_file_path") else {}
    owner[key] = value
    (tmp_path / "transforms.json").write_text(json.dumps({**owner, "frames": [frame]}))
    with pytest.raises(CaptureError, match=key):
        checks.read_transforms(tmp_path)


def test_a_square_applied_transform_is_taken_as_nerfstudio_reads_it(tmp_path: Path) -> None:
    meta = {"frames": [], "applied_transform": np.eye(4).tolist()}
    (tmp_path / "transforms.json").write_text(json.dumps(meta))
    assert np.shape(checks.read_transforms(tmp_path)[0]["applied_transform"]) == (3, 4)
