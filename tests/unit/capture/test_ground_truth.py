"""What a capture knows exactly: label images, depth, and polygons."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.capture.ground_truth import Truth


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    for name in ("images", "depth", "labels"):
        (tmp_path / name).mkdir()
    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(tmp_path / "images" / "a.png")
    Image.fromarray(np.arange(24, dtype=np.uint16).reshape(4, 6) * 100).save(tmp_path / "depth" / "a.png")
    Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6) // 6).save(tmp_path / "labels" / "a.png")
    frame = {"file_path": "images/a.png", "depth_file_path": "depth/a.png", "label_file_path": "labels/a.png"}
    meta = {
        "depth_unit_scale_factor": 1e-3,
        "classes": ["background", "cup", "wall", "hat"],
        "frames": [frame, {"file_path": "images/b.png"}],
    }
    (tmp_path / "transforms.json").write_text(json.dumps(meta))
    objects = [{"label": i, "kind": kind} for i, kind in ((1, "object"), (2, "room"), (3, "furniture"))]
    (tmp_path / "scene.json").write_text(json.dumps({"objects": objects}))
    return tmp_path


def test_truth_reads_depth_in_metres_and_labels(labelled: Path) -> None:
    truth = Truth(labelled)
    image = labelled / "images" / "a.png"
    depth, labels = truth.depth_m(image, 4, 6), truth.labels(image, 4, 6)
    assert depth is not None and labels is not None and truth.exact_depth
    np.testing.assert_allclose(depth, np.arange(24).reshape(4, 6) * 0.1, rtol=1e-6)
    assert labels[:, 0].tolist() == [0, 1, 2, 3]


def test_truth_takes_the_nearest_pixel_at_another_size(labelled: Path) -> None:
    labels = Truth(labelled / "transforms.json").labels(labelled / "images" / "a.png", 2, 3)
    assert labels is not None and labels.shape == (2, 3) and labels[:, 0].tolist() == [1, 3]


def test_parts_of_the_room_are_no_objects(labelled: Path) -> None:
    assert [(thing.label, thing.name) for thing in Truth(labelled).things] == [(1, "cup"), (3, "hat")]
    (labelled / "scene.json").unlink()
    assert [thing.name for thing in Truth(labelled).things] == ["cup", "wall", "hat"]


def test_truth_of_photos_without_it_is_none(labelled: Path) -> None:
    truth = Truth(labelled)
    for image in (labelled / "images" / "b.png", labelled / "elsewhere.png"):
        assert truth.depth_m(image, 4, 6) is None and truth.labels(image, 4, 6) is None
    (labelled / "transforms.json").write_text(json.dumps({"frames": [{"file_path": "images/a.png"}]}))
    plain = Truth(labelled)
    assert not plain.exact_depth and plain.things == []
