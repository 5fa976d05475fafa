"""What the report measures of a run, and its queries."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.capture.ground_truth import CaptureGroundTruth
from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.query.options import Region
from f3rm_ext.query.run import Run, load_run
from f3rm_ext.workflow import measure as module
from f3rm_ext.workflow.measure import Measure

QuerySpec = Callable[..., dict[str, Any]]
Mask = Callable[[Callable[[int], np.ndarray]], None]


@pytest.fixture(scope="module")
def run(untrained: Any) -> Run:
    loaded = load_run(untrained.config)
    # A field that was not trained is as empty with few samples.
    loaded.model.proposal_sampler.num_proposal_samples_per_ray = (16, 12)
    loaded.model.proposal_sampler.num_nerf_samples_per_ray = 8
    return loaded


@pytest.fixture
def measured(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QuerySpec:
    """Measures a view of the run; returns what measure.json says."""
    monkeypatch.setattr(module, "load_run", lambda path: run)

    def measure(**options: Any) -> dict[str, Any]:
        Measure(load_config=Path("config.yml"), out=tmp_path / "out", **{"max_views": 1, **options}).main()
        return json.loads((tmp_path / "out" / "measure.json").read_text())

    return measure


@pytest.fixture
def no_labels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A capture that knows nothing of itself."""
    monkeypatch.setattr(module, "CaptureGroundTruth", lambda data: CaptureGroundTruth(tmp_path))


def test_everything_is_measured(measured: QuerySpec, run: Run, tmp_path: Path) -> None:
    record = measured()
    assert record["steps"] == 1 and record["train_images"] == 9 and record["eval_images"] == 3
    assert record["heads"] == {"labels": f"labels:data={run.data}"} and record["device"] == "cpu"
    (view,) = record["views"]
    assert (view["image"], view["width"], view["height"]) == ("frame_00003.png", 64, 48)
    names = {"true", "rendered", "depth", "true_depth", "features", "true_features", "heat"}
    assert set(view["files"]) == names
    for name in (*view["files"].values(), "exemplar_photo.png", "exemplar_crop.png"):
        assert (tmp_path / "out" / name).is_file()
    with Image.open(tmp_path / "out" / view["files"]["true"]) as picture:
        np.testing.assert_array_equal(np.asarray(picture), run.photo("test", 0))
    assert record["depth"]["views"] == 1 and record["depth"]["median_m"] > 0


def test_training_views_are_shown_where_no_photo_is_held_out(
    measured: QuerySpec, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run.manager, "eval_dataset", None)
    record = measured()
    (view,) = record["views"]
    assert record["eval_images"] == 0 and view["image"] == run.files("train")[0].name
    with Image.open(tmp_path / "out" / view["files"]["true"]) as picture:
        np.testing.assert_array_equal(np.asarray(picture), run.photo("train", 0))


def test_a_favourite_object_is_queried_first_and_then_all(measured: QuerySpec, run: Run) -> None:
    query = measured()["query"]
    names = [entry["name"] for entry in query["objects"]]
    assert query["object"] == next(name for name in module.FAVOURITES if name in names)
    assert query["is_point"] and query["head"] == "labels" and query["threshold"] == module.PINNED_THRESHOLD
    truth = CaptureGroundTruth(run.data)
    for entry in (query, *query["objects"]):
        split, index = run.find_photo(entry["image"]) or ("", 0)
        labels = truth.labels(run.files("train")[index], 48, 64)
        assert split == "train" and labels is not None
        name = entry.get("name") or entry["object"]
        assert truth.names[labels[int(entry["y"]), int(entry["x"])]] == name
    (shown,) = query["views"]
    assert {"inside", "visible"} < set(shown) and query["low"] <= shown["score"] == pytest.approx(query["high"])


def test_each_photo_with_examples_is_rendered_once(measured: QuerySpec, run: Run, watch_calls: Callable) -> None:
    rendered, taken = watch_calls(Run, "scene_map"), watch_calls(module, "take_example")
    names = [entry["name"] for entry in measured()["query"]["objects"]]
    things = CaptureGroundTruth(run.data).things
    assert names == [thing.name for thing in things if thing.name in names], "in the order of the capture"
    maps = {call.args[2]: call.result for call in rendered}
    assert len(rendered) == len(maps) < len(taken)
    for call in taken:
        _, index = run.find_photo(call.args[1].image) or ("", -1)
        assert call.args[0] is maps[index]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_objects_are_scored_by_the_pixels_found(
    measured: QuerySpec, run: Run, monkeypatch: pytest.MonkeyPatch, sign: float
) -> None:
    """A field that renders exactly the labels finds everything; one that renders their negative nothing."""
    import torch

    truth = CaptureGroundTruth(run.data)

    def perfect(model: Any, camera: Any, queries: Any) -> Any:
        labels = truth.labels(run.files("test")[0], 48, 64)
        assert labels is not None
        numbers = torch.tensor([truth.names.index(query.name) for query in queries])
        scores = sign * (torch.from_numpy(labels)[..., None] == numbers).float()
        return scores, model.render_camera(camera, {})

    monkeypatch.setattr(module, "score_image", perfect)
    seen = [entry for entry in measured()["query"]["objects"] if entry["views"]]
    assert len(seen) > 3 and all(entry["views"] == 1 for entry in seen)
    assert {entry["iou"] for entry in seen} == {float(sign > 0)}
    assert {entry["hits"] for entry in seen} == {int(sign > 0)}


def test_objects_no_view_shows_are_not_judged(measured: QuerySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_VISIBLE_PX", 10_000)
    query = measured()["query"]
    assert all((entry["views"], entry["hits"], entry["iou"]) == (0, 0, None) for entry in query["objects"])
    assert query["views"][0]["visible"] is False


@pytest.mark.usefixtures("no_labels")
def test_a_capture_without_labels_is_queried_for_a_patch(measured: QuerySpec) -> None:
    record = measured()
    query = record["query"]
    assert query["object"] is None and query["objects"] == [] and record["depth"] is None
    assert set(query["views"][0]) == {"view", "row", "col", "score", "file"}
    assert "true_depth" not in record["views"][0]["files"] and "depth_error_m" not in record["views"][0]
    assert 16 <= query["x"] <= 48 and 12 <= query["y"] <= 36, "in the middle half"


def test_a_place_of_ones_own(measured: QuerySpec, run: Run) -> None:
    labels = CaptureGroundTruth(run.data).labels(run.files("train")[0], 48, 64)
    assert labels is not None
    for text, middle, is_point in (
        ("images/frame_00001.png:12.5,7.5", (12.5, 7.5), True),
        ("frame_00001.png:10,20,8,4", (14.0, 22.0), False),
        ("frame_00001.png", (32.0, 24.0), False),
    ):
        query = measured(exemplar=text)["query"]
        assert (query["image"], query["x"], query["y"]) == ("frame_00001.png", *middle)
        assert query["exemplar"] == text
        assert query["is_point"] is is_point
        name = CaptureGroundTruth(run.data).names[labels[int(middle[1]), int(middle[0])]]
        assert query["object"] == (name if name in CaptureGroundTruth(run.data).classes else None)
        assert len(query["objects"]) > 3


def test_an_exemplar_is_told_in_pixels_of_its_file(run: Run) -> None:
    cameras = copy.deepcopy(run.cameras("train"))
    cameras.rescale_output_resolution(0.5)
    measure = Measure(load_config=Path("config.yml"), out=Path("out"))
    measure.run = SimpleNamespace(files=run.files, cameras=lambda split: cameras)  # type: ignore[assignment]
    assert str(measure._in_file(0, Region.parse("frame_00001.png:10,20,8,4"))) == "frame_00001.png:20,40,16,8"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("duckling", r"no training image duckling .*choose one like frame_00001\.png, .*or one of the objects .*rug"),
        ("frame_00003.png:1,1", r"no training image frame_00003\.png"),
        ("frame_00001.png:1", "is not understood"),
        ("frame_00001.png:64.5,1", "outside the image, which has 64 x 48 pixels"),
        ("frame_00001.png:60,1,5,5", "outside the image"),
    ],
)
def test_places_that_are_not_there(measured: QuerySpec, tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measured(exemplar=text)
    assert not (tmp_path / "out" / "measure.json").exists()


@pytest.fixture
def mask_photos(monkeypatch: pytest.MonkeyPatch) -> Mask:
    """Gives the photos of the run masks: those of each index."""
    return lambda kept: monkeypatch.setattr(Run, "photo_mask", lambda self, split, index: kept(index))


def test_what_masks_leave_out_is_grey_and_counts_for_nothing(
    measured: QuerySpec, run: Run, tmp_path: Path, mask_photos: Mask
) -> None:
    everything = measured()
    labels = CaptureGroundTruth(run.data).labels(run.files("test")[0], 48, 64)
    assert labels is not None
    kept = np.zeros((48, 64), dtype=bool)
    kept[:24] = True
    mask_photos(lambda index: kept)
    record = measured()
    (view,) = record["views"]
    assert {"true", "rendered", "depth", "true_depth", "features", "true_features", "heat"} == set(view["files"])
    for name, file in view["files"].items():
        with Image.open(tmp_path / "out" / file) as image:
            picture = np.asarray(image)
        lower = picture[24:]
        ring = 0 if name != "heat" else 0.2  # the ring around the best pixel may reach over
        assert (lower != 128).any(axis=-1).mean() <= ring and picture[:24].std() > 1, name
    assert view["depth_error_m"] != everything["views"][0]["depth_error_m"]
    assert record["query"]["views"][0]["row"] < 24
    names = CaptureGroundTruth(run.data).names
    below = {name for name in names if (labels == names.index(name))[:24].sum() < 25}
    found = {entry["name"] for entry in record["query"]["objects"] if entry["views"]}
    assert found and not found & below


def test_views_of_which_nothing_is_kept_are_passed_over(measured: QuerySpec, run: Run, mask_photos: Mask) -> None:
    whole = np.ones((48, 64), dtype=bool)
    mask_photos(lambda index: whole if index == 1 else ~whole)
    assert [view["image"] for view in measured(max_views=3)["views"]] == [run.files("test")[1].name]
    mask_photos(lambda index: ~whole)
    with pytest.raises(CaptureError, match="masks leave nothing"):
        measured(max_views=3)


def test_a_run_without_features_is_measured_too(measured: QuerySpec, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.model.feature_field, "heads", type(run.model.feature_field.heads)())
    record = measured()
    assert record["query"] is None and record["heads"] == {}
    assert set(record["views"][0]["files"]) == {"true", "rendered", "depth", "true_depth"}
