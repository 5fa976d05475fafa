"""What a capture knows exactly: label images, depth, and polygons."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.capture.ground_truth import LABEL_KEYS, CaptureGroundTruth, PolygonLabels
from f3rm_ext.errors import CaptureError


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


def test_truth_reads_depth_in_metres_and_labels(labelled) -> None:
    truth = CaptureGroundTruth(labelled)
    image = labelled / "images" / "a.png"
    depth, labels = truth.depth_m(image, 4, 6), truth.labels(image, 4, 6)
    np.testing.assert_allclose(depth, np.arange(24).reshape(4, 6) * 0.1, rtol=1e-6)
    assert labels[:, 0].tolist() == [0, 1, 2, 3]


def test_depth_may_be_a_numpy_file(labelled) -> None:
    meta, image = json.loads((labelled / "transforms.json").read_text()), labelled / "images" / "a.png"
    before = CaptureGroundTruth(labelled).depth_m(image, 4, 6)
    meta["frames"][0]["depth_file_path"] = "depth/a.npy"
    (labelled / "transforms.json").write_text(json.dumps(meta))
    with Image.open(labelled / "depth" / "a.png") as depth:
        np.save(labelled / "depth" / "a.npy", np.asarray(depth).astype(np.float32))
    np.testing.assert_allclose(CaptureGroundTruth(labelled).depth_m(image, 4, 6), before, rtol=1e-6)
    (labelled / "depth" / "a.npy").write_bytes(b"")
    with pytest.raises(CaptureError, match=r"depth/a\.npy"):
        CaptureGroundTruth(labelled).depth_m(image, 4, 6)


def test_truth_takes_the_nearest_pixel_at_another_size(labelled) -> None:
    labels = CaptureGroundTruth(labelled / "transforms.json").labels(labelled / "images" / "a.png", 2, 3)
    assert labels is not None and labels.shape == (2, 3) and labels[:, 0].tolist() == [1, 3]


def test_parts_of_the_room_are_no_objects(labelled) -> None:
    assert [(thing.label, thing.name) for thing in CaptureGroundTruth(labelled).things] == [(1, "cup"), (3, "hat")]
    (labelled / "scene.json").unlink()
    assert [thing.name for thing in CaptureGroundTruth(labelled).things] == ["cup", "wall", "hat"]


def test_truth_of_photos_without_it_is_none(labelled) -> None:
    truth = CaptureGroundTruth(labelled)
    for image in (labelled / "images" / "b.png", labelled / "elsewhere.png"):
        assert truth.depth_m(image, 4, 6) is None and truth.labels(image, 4, 6) is None
    (labelled / "transforms.json").write_text(json.dumps({"frames": [{"file_path": "images/a.png"}]}))
    plain = CaptureGroundTruth(labelled)
    assert plain.depth_m(labelled / "images" / "a.png", 4, 6) is None and plain.things == []


def test_label_path_and_label_file_path_mean_the_same(labelled) -> None:
    path = labelled / "transforms.json"
    meta = json.loads(path.read_text())
    frame = meta["frames"][0]
    frame["label_path"] = frame.pop("label_file_path")
    frame["depth_path"] = frame.pop("depth_file_path")
    path.write_text(json.dumps(meta))
    truth, image = CaptureGroundTruth(labelled), labelled / "images" / "a.png"
    assert truth.has_labels
    assert truth.labels(image, 4, 6) is not None and truth.depth_m(image, 4, 6) is not None
    assert truth.files(LABEL_KEYS) == [labelled / "labels" / "a.png"]


def test_copies_of_the_photos_at_other_sizes_have_the_same_labels(labelled) -> None:
    truth = CaptureGroundTruth(labelled)
    found, same = (truth.labels(labelled / folder / "a.png", 2, 3) for folder in ("images_4", "images"))
    assert found is not None and same is not None
    np.testing.assert_array_equal(found, same)


def test_photos_of_the_same_name_are_not_mixed_up(labelled) -> None:
    path = labelled / "transforms.json"
    meta = json.loads(path.read_text())
    meta["frames"].append({"file_path": "right/a.png"})
    path.write_text(json.dumps(meta))
    truth = CaptureGroundTruth(labelled)
    assert truth.labels(labelled / "images" / "a.png", 4, 6) is not None
    for other in ("right", "images_4"):
        assert truth.labels(labelled / other / "a.png", 4, 6) is None


def test_a_view_has_masks_and_boxes_of_what_is_seen(labelled) -> None:
    view = CaptureGroundTruth(labelled).view(labelled / "images" / "a.png", 4, 6)
    # Rows 0 to 3 are background, cup, wall (a part of the room) and hat.
    assert set(view.masks) == {"cup", "hat"} == set(view.boxes)
    assert view.masks["cup"].sum(axis=1).tolist() == [0, 6, 0, 0]
    assert view.boxes == {"cup": ((0.0, 1.0, 6.0, 2.0),), "hat": ((0.0, 3.0, 6.0, 4.0),)}
    half = CaptureGroundTruth(labelled).view(labelled / "images" / "a.png", 2, 3)
    assert half is not None and set(half.masks) == {"cup", "hat"}  # the nearest pixels are those of rows 1 and 3
    assert half.boxes["cup"] == ((0.0, 0.0, 3.0, 1.0),)


def test_a_box_is_tight(labelled) -> None:
    pixels = np.zeros((4, 6), np.uint8)
    pixels[1, 2] = pixels[2, 4] = 3
    Image.fromarray(pixels).save(labelled / "labels" / "a.png")
    view = CaptureGroundTruth(labelled).view(labelled / "images" / "a.png", 4, 6)
    assert view is not None and view.boxes == {"hat": ((2.0, 1.0, 5.0, 3.0),)}


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"frames": None},
        {"frames": "broken"},
        {"frames": [3, {"file_path": 3}, {}]},
        {"frames": [{"file_path": "images/a.png", "label_file_path": "labels/a.png"}]},
        {"frames": [{"file_path": "images/a.png"}], "classes": ["nothing", "cup"]},
        {"frames": [{"file_path": "images/a.png"}], "depth_unit_scale_factor": 1e-3},
        {"frames": [{"file_path": "images/a.png", "depth_file_path": "depth/a.png"}]},
        {"frames": [], "classes": "cup"},
        [],
    ],
)
def test_captures_that_say_nothing_have_no_labels(labelled, meta) -> None:
    (labelled / "transforms.json").write_text(json.dumps(meta))
    truth = CaptureGroundTruth(labelled)
    assert not truth.has_labels
    assert truth.view(image := labelled / "images" / "a.png", 4, 6) is None and truth.depth_m(image, 4, 6) is None


def test_a_capture_without_transforms_says_nothing(tmp_path) -> None:
    assert CaptureGroundTruth(tmp_path).classes == () and not CaptureGroundTruth(tmp_path / "nowhere").has_labels


def test_files_that_cannot_be_read_are_named(labelled) -> None:
    image = labelled / "images" / "a.png"
    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(labelled / "labels" / "a.png")
    with pytest.raises(CaptureError, match=r"labels/a\.png.* 3 axes"):
        CaptureGroundTruth(labelled).view(image, 4, 6)
    (labelled / "depth" / "a.png").write_bytes(b"\x89PNG cut short")
    with pytest.raises(CaptureError, match=r"depth/a\.png"):
        CaptureGroundTruth(labelled).depth_m(image, 4, 6)
    (labelled / "transforms.json").write_text("{")
    with pytest.raises(CaptureError, match=r"transforms\.json"):
        CaptureGroundTruth(labelled)


# --- polygons --------------------------------------------------------------------------------------------------------

SQUARE = [[2, 1], [6, 1], [6, 4], [2, 4]]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., PolygonLabels]:
    """Writes one frame of 12 x 8 pixels with these objects, and reads the folder."""

    def make(*objects: dict[str, Any], name: str = "frame_00001", **info: object) -> PolygonLabels:
        content = {"info": {"name": f"{name}.jpg", "width": 12, "height": 8, **info}, "objects": list(objects)}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return PolygonLabels(tmp_path)

    return make


def thing(category: str, polygon: list, **more: object) -> dict[str, Any]:
    return {"category": category, "segmentation": polygon, **more}


def test_a_polygon_covers_the_pixels_whose_centres_it_has(write) -> None:
    labels = write(thing("cup", SQUARE))
    view = labels.view(Path("images/frame_00001.jpg"), 8, 12)
    assert labels.classes == ("cup",) and view is not None
    expected = np.zeros((8, 12), bool)
    expected[1:4, 2:6] = True
    np.testing.assert_array_equal(view.masks["cup"], expected)
    assert view.boxes["cup"] == ((2.0, 1.0, 6.0, 4.0),), "without a box it is that of the polygon"


def test_polygons_at_other_sizes(write) -> None:
    view = write(thing("cup", SQUARE, bbox=[2, 1, 6, 4])).view(Path("frame_00001.png"), 16, 36)
    expected = np.zeros((16, 36), bool)
    expected[2:8, 6:18] = True
    np.testing.assert_array_equal(view.masks["cup"], expected)
    assert view.boxes["cup"] == ((6.0, 2.0, 18.0, 8.0),)


def test_slanted_polygons_against_a_test_of_every_pixel(write) -> None:
    corners = np.array([[1.3, 0.4], [10.6, 2.2], [7.1, 7.7]])
    view = write(thing("cup", corners.tolist())).view(Path("frame_00001.jpg"), 80, 120)
    y, x = np.mgrid[:80, :120] + 0.5
    sides = []
    for (ax, ay), (bx, by) in zip(10 * corners, 10 * np.roll(corners, -1, axis=0), strict=True):
        sides.append((bx - ax) * (y - ay) - (by - ay) * (x - ax) > 0)
    exact = np.all(sides, axis=0) | ~np.any(sides, axis=0)
    assert exact.sum() > 1000
    np.testing.assert_array_equal(view.masks["cup"], exact)


def test_polygons_that_leave_the_image_or_cross_themselves(write) -> None:
    bow = [[-4, 2], [16, 6], [16, 2], [-4, 6]]  # two triangles that meet in the middle
    view = write(thing("bow", bow), thing("outside", [[20, 1], [30, 1], [25, 5]])).view(Path("frame_00001.jpg"), 8, 12)
    assert view is not None and not view.masks["outside"].any()
    expected = np.zeros((8, 12), bool)
    expected[3:5, :3] = expected[3:5, 8:] = True  # at half a pixel from the middle row the sides are at 3.5 and 8.5
    np.testing.assert_array_equal(view.masks["bow"], expected)


def test_two_objects_of_one_category(write) -> None:
    other = [[8, 5], [10, 5], [10, 7], [8, 7]]
    labels = write(thing("cup", SQUARE), thing("spoon", other), thing("cup", other, bbox=[7.5, 5, 10, 7]))
    view = labels.view(Path("frame_00001.jpg"), 8, 12)
    assert labels.classes == ("cup", "spoon") and view is not None
    assert view.masks["cup"].sum() == 12 + 4 and view.masks["spoon"].sum() == 4
    assert view.boxes["cup"] == ((2.0, 1.0, 6.0, 4.0), (7.5, 5.0, 10.0, 7.0))


def test_frames_are_found_by_name(write, tmp_path) -> None:
    write(thing("cup", SQUARE))
    labels = write(thing("spoon", SQUARE), name="frame_00002")
    (tmp_path / "notes.json").write_text(json.dumps({"scene": "figurines"}))
    (tmp_path / "frame_00001.jpg").touch()
    labels = PolygonLabels(tmp_path)
    view = labels.view(Path("elsewhere/frame_00002.png"), 8, 12)
    assert labels.classes == ("cup", "spoon") and view is not None and set(view.masks) == {"spoon"}
    assert labels.view(Path("frame_00003.jpg"), 8, 12) is None


def test_objects_come_in_the_order_of_the_files(write) -> None:
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    labels = [write(thing(f"thing {number}", SQUARE), name=f"frame_{number}") for number in order][-1]
    assert labels.classes == tuple(f"thing {number}" for number in sorted(order))


def test_coordinates_in_one_list_are_points_too(write) -> None:
    flat = [coordinate for point in SQUARE for coordinate in point]
    for polygon in (flat, [flat]):
        view = write(thing("cup", polygon)).view(Path("frame_00001.jpg"), 8, 12)
        assert view is not None and view.masks["cup"].sum() == 12


@pytest.mark.parametrize(
    ("entry", "info"),
    [
        ({"category": "cup"}, {}),
        ({"segmentation": SQUARE}, {}),
        (thing("cup", [[1, 2], [3, 4]]), {}),
        (thing("cup", [[1, 2], [3, "x"], [5, 6]]), {}),
        (thing("cup", [[1, 2, 3], [4, 5], [6, 7]]), {}),
        (thing("cup", [[1, 2], [3, float("nan")], [5, 6]]), {}),
        (thing("cup", SQUARE, bbox=[1, 2, 3]), {}),
        (thing("cup", [1, 2, 3, 4, 5]), {}),
        ("cup", {}),
        (thing("cup", SQUARE), {"width": 0}),
        (thing("cup", SQUARE), {"height": "tall"}),
        (thing("cup", SQUARE), {"width": None}),
    ],
)
def test_labels_that_are_not_understood_are_named(write, entry, info) -> None:
    with pytest.raises(CaptureError, match=r"frame_00001\.json.*width and height"):
        write(entry, **info)


def test_folders_without_labels_are_named(tmp_path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CaptureError, match="labels"):
            PolygonLabels(folder)
    (tmp_path / "frame.json").write_text("{")
    with pytest.raises(CaptureError, match=r"frame\.json"):
        PolygonLabels(tmp_path)
