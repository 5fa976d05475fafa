"""Where exemplars are taken from, and what a capture knows exactly."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.query.choice import deepest_pixel, sharpness, telling_patch
from f3rm_ext.report.measure import parse_exemplar
from f3rm_ext.capture.ground_truth import Truth


def test_deepest_pixel_is_the_middle_of_a_block() -> None:
    mask = np.zeros((20, 30), bool)
    mask[5:12, 10:17] = True
    assert deepest_pixel(mask) == (8, 13)


def test_deepest_pixel_keeps_away_from_the_border_of_the_image() -> None:
    row, col = deepest_pixel(np.ones((11, 31), bool))
    assert row == 5 and 5 <= col <= 25


def test_deepest_pixel_of_a_ring_lies_on_it() -> None:
    y, x = np.mgrid[:40, :40] - 20
    ring = np.abs(np.hypot(y, x) - 12) < 4
    assert ring[deepest_pixel(ring)]


def test_sharp_images_are_sharper() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (20, 20, 3), dtype=np.uint8)
    assert sharpness(noise) > sharpness(noise // 4) > sharpness(np.full((20, 20, 3), 9, np.uint8)) == 0


def feature_map(values: np.ndarray) -> FeatureMap:
    return FeatureMap(values.astype(np.float16), PatchGrid.covering(values.shape[0], values.shape[1], 80, 80))


def test_telling_patch_is_found_again_and_unlike_the_rest() -> None:
    plain, rare, lonely = np.eye(3)
    here = np.tile(plain, (8, 8, 1))
    here[3, 4], here[4, 3], here[0, 0] = rare, lonely, rare
    other = np.tile(plain, (8, 8, 1))
    other[6, 6] = rare
    # `lonely` is nowhere else, and the `rare` patch in the corner is not in the middle of the photo.
    assert telling_patch(feature_map(here), [feature_map(other)] * 3) == (35.0, 45.0)


def test_telling_patch_of_a_single_photo_and_of_a_tiny_one() -> None:
    here = np.random.default_rng(1).normal(size=(1, 1, 4))
    assert telling_patch(feature_map(here), []) == (40.0, 40.0)


@pytest.fixture
def capture(tmp_path: Path) -> Path:
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


def test_truth_reads_depth_in_metres_and_labels(capture: Path) -> None:
    truth = Truth(capture)
    image = capture / "images" / "a.png"
    depth, labels = truth.depth_m(image, 4, 6), truth.labels(image, 4, 6)
    assert depth is not None and labels is not None and truth.exact_depth
    np.testing.assert_allclose(depth, np.arange(24).reshape(4, 6) * 0.1, rtol=1e-6)
    assert labels[:, 0].tolist() == [0, 1, 2, 3]


def test_truth_takes_the_nearest_pixel_at_another_size(capture: Path) -> None:
    labels = Truth(capture / "transforms.json").labels(capture / "images" / "a.png", 2, 3)
    assert labels is not None and labels.shape == (2, 3) and labels[:, 0].tolist() == [1, 3]


def test_parts_of_the_room_are_no_objects(capture: Path) -> None:
    assert [(thing.label, thing.name) for thing in Truth(capture).things] == [(1, "cup"), (3, "hat")]
    (capture / "scene.json").unlink()
    assert [thing.name for thing in Truth(capture).things] == ["cup", "wall", "hat"]


def test_truth_of_photos_without_it_is_none(capture: Path) -> None:
    truth = Truth(capture)
    for image in (capture / "images" / "b.png", capture / "elsewhere.png"):
        assert truth.depth_m(image, 4, 6) is None and truth.labels(image, 4, 6) is None
    (capture / "transforms.json").write_text(json.dumps({"frames": [{"file_path": "images/a.png"}]}))
    plain = Truth(capture)
    assert not plain.exact_depth and plain.things == []


def test_exemplars_are_read() -> None:
    assert parse_exemplar("images/a.png:12.5,7", []) == ("a.png", (7.0, 12.5))
    assert parse_exemplar("C:/odd:name.png:1,2", []) == ("odd:name.png", (2.0, 1.0))


@pytest.mark.parametrize("text", ["vase", "a.png", "a.png:1", "a.png:1,2,3", "a.png:x,y"])
def test_exemplars_that_are_not_understood_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"frame_00001\.png:120,80.*cup"):
        parse_exemplar(text, ["cup"])
