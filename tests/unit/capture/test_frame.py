"""Capture and scene frame, against nerfstudio's own dataparser."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.capture.frame import CaptureFrame


@pytest.mark.parametrize(
    ("more", "colmap"),
    [
        ({}, False),
        ({"applied_transform": [[0, 1, 0, 0.5], [1, 0, 0, 2], [0, 0, -1, 0]]}, False),
        ({"applied_transform": [[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 7]], "applied_scale": 3.0}, False),
        ({"applied_scale": 0.25}, False),
        ({}, True),
    ],
    ids=["plain", "transformed", "both", "scaled", "old, with COLMAP's files"],
)
def test_cameras_come_back_to_where_transforms_json_has_them(capture: Any, more: dict[str, Any], colmap: bool) -> None:
    random, poses = np.random.default_rng(0), np.tile(np.eye(4), (6, 1, 1))
    poses[:, :3, :3], poses[:, :3, 3] = Rotation.random(6, random).as_matrix(), 3 * random.normal(size=(6, 3))
    for frame, pose in zip(capture.frames, poses, strict=True):
        frame["transform_matrix"] = pose.tolist()
    capture.meta |= more
    if colmap:
        (capture.folder / "colmap" / "sparse" / "0").mkdir(parents=True)
    config = CaptureDataParserConfig(data=capture.save().folder, eval_mode="all")
    outputs = config.setup().get_dataparser_outputs("train")
    frame = CaptureFrame.from_outputs(outputs, capture.folder)
    scene = outputs.cameras.camera_to_worlds.double().numpy()
    np.testing.assert_allclose(frame.to_capture(scene[:, :, 3]), poses[:, :3, 3], atol=1e-4)
    np.testing.assert_allclose(frame.directions_to_capture(scene[:, :, 2]), poses[:, :3, 2], atol=1e-5)
    np.testing.assert_allclose(frame.to_scene(poses[:, :3, 3]), scene[:, :, 3], atol=1e-4)


def test_other_kinds_of_captures(tmp_path: Path) -> None:
    outputs = SimpleNamespace(dataparser_transform=torch.eye(4)[:3], dataparser_scale=0.5)
    frame = CaptureFrame.from_outputs(outputs, tmp_path)  # type: ignore[arg-type]
    np.testing.assert_allclose(frame.to_capture(np.asarray([1.0, 2, 3])), [2, 4, 6])
    assert frame.describe() == {
        "scene_from_capture": np.eye(4)[:3].tolist(),
        "scene_units_per_capture_unit": 0.5,
    }
