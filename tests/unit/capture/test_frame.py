"""Capture and scene frame, against nerfstudio's own dataparser."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.capture.frame import CaptureFrame


def poses(count: int = 5) -> np.ndarray:
    random, made = np.random.default_rng(0), []
    for _ in range(count):
        rotation, _ = np.linalg.qr(random.normal(size=(3, 3)))
        rotation *= np.sign(np.linalg.det(rotation))
        made.append(np.block([[rotation, random.normal(size=(3, 1)) * 3], [np.zeros((1, 3)), 1]]))
    return np.asarray(made)


def capture(folder: Path, **more: object) -> Path:
    (folder / "images").mkdir()
    frames = []
    for number, pose in enumerate(poses()):
        Image.new("RGB", (8, 6)).save(folder / "images" / f"{number}.png")
        frames.append({"file_path": f"images/{number}.png", "transform_matrix": pose.tolist()})
    intrinsics = {"fl_x": 8.0, "fl_y": 8.0, "cx": 4.0, "cy": 3.0, "w": 8, "h": 6}
    (folder / "transforms.json").write_text(json.dumps({**intrinsics, "frames": frames, **more}))
    return folder


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"applied_transform": [[0, 1, 0, 0.5], [1, 0, 0, 2], [0, 0, -1, 0]]},
        {"applied_transform": [[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 7]], "applied_scale": 3.0},
        {"applied_scale": 0.25},
    ],
    ids=["plain", "transformed", "both", "scaled"],
)
def test_cameras_come_back_to_where_transforms_json_has_them(tmp_path: Path, more: dict[str, object]) -> None:
    data = capture(tmp_path, **more)
    config = CaptureDataParserConfig(data=data, eval_mode="all")
    outputs = config.setup().get_dataparser_outputs("train")
    frame = CaptureFrame.from_outputs(outputs, data)
    scene = outputs.cameras.camera_to_worlds.double().numpy()
    np.testing.assert_allclose(frame.to_capture(scene[:, :, 3]), poses()[:, :3, 3], atol=1e-4)
    np.testing.assert_allclose(frame.directions_to_capture(scene[:, :, 2]), poses()[:, :3, 2], atol=1e-5)
    np.testing.assert_allclose(frame.to_scene(poses()[:, :3, 3]), scene[:, :, 3], atol=1e-4)


def test_captures_of_old_versions_with_colmap_beside_them(tmp_path: Path) -> None:
    data = capture(tmp_path)
    (tmp_path / "colmap" / "sparse" / "0").mkdir(parents=True)
    outputs = CaptureDataParserConfig(data=data, eval_mode="all").setup().get_dataparser_outputs("train")
    frame = CaptureFrame.from_outputs(outputs, data)
    scene = outputs.cameras.camera_to_worlds[:, :, 3].double().numpy()
    np.testing.assert_allclose(frame.to_capture(scene), poses()[:, :3, 3], atol=1e-4)


def test_other_kinds_of_captures(tmp_path: Path) -> None:
    outputs = SimpleNamespace(dataparser_transform=torch.eye(4)[:3], dataparser_scale=0.5)
    frame = CaptureFrame.from_outputs(outputs, tmp_path)  # type: ignore[arg-type]
    np.testing.assert_allclose(frame.to_capture(np.asarray([1.0, 2, 3])), [2, 4, 6])
    assert frame.describe() == {
        "scene_from_capture": np.eye(4)[:3].tolist(),
        "scene_units_per_capture_unit": 0.5,
    }
