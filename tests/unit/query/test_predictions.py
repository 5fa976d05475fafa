"""Predictions of other programs, judged against labels whose answers are known exactly."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.capture.ground_truth import CaptureGroundTruth, PolygonLabels
from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.query.evaluation import LabelledPoints
from f3rm_ext.query.predictions import Judgement, PredictionFolder, TrainingPhotos, judge_points, judge_views
from f3rm_ext.utils.output_folder import file_names

WIDTH, HEIGHT = 20, 10
SQUARES = {"blue mug": (2, 2), "plate": (12, 3)}
"""Left and top of squares of 6 pixels, in both photos."""


def square(left: int, top: int) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), dtype=bool)
    mask[top : top + 6, left : left + 6] = True
    return mask


@pytest.fixture
def labels(tmp_path: Path) -> PolygonLabels:
    """LERF-OVS labels of two photos."""
    folder = tmp_path / "labels"
    folder.mkdir()
    for name in ("a", "b"):
        objects = [
            {"category": thing, "segmentation": [[x, y], [x + 6, y], [x + 6, y + 6], [x, y + 6]]}
            for thing, (x, y) in SQUARES.items()
        ]
        info = {"name": f"{name}.jpg", "width": WIDTH, "height": HEIGHT}
        (folder / f"{name}.json").write_text(json.dumps({"info": info, "objects": objects}))
    return PolygonLabels(folder)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., PredictionFolder]:
    """Writes predictions: {photo: {class: array}}, as PNG or npy."""

    def write(values: dict[str, dict[str, np.ndarray]], png: bool = False) -> PredictionFolder:
        for photo, classes in values.items():
            (tmp_path / "out" / photo).mkdir(parents=True)
            for name, array in classes.items():
                path = tmp_path / "out" / photo / name
                if png:
                    Image.fromarray((array * 255).astype(np.uint8)).save(f"{path}.png")
                else:
                    np.save(f"{path}.npy", array)
        return PredictionFolder(tmp_path / "out")

    return write


def judge(predictions: PredictionFolder, labels: PolygonLabels, trained: TrainingPhotos | None = None) -> Judgement:
    classes = list(labels.classes)
    return judge_views(predictions, labels, labels.images, trained or TrainingPhotos([]), classes, 0.5)


@pytest.mark.parametrize("png", [False, True])
def test_known_answers_are_scored_exactly(
    labels: PolygonLabels, write: Callable[..., PredictionFolder], png: bool
) -> None:
    """The mug is right; the plate is shifted by half its width, has twice its area, or is missing."""
    x, y = SQUARES["plate"]
    right = square(*SQUARES["blue mug"])
    double = np.zeros_like(right)
    double[0:9, x : x + 8] = True  # 72 pixels, all 36 of the plate among them
    out = write({"a": {"blue-mug": right, "Plate": square(x - 3, y)}, "b": {"blue_mug": right, "plate": double}}, png)
    result = judge(out, labels)
    classes, means = result.rendered.summarize_classes(), result.rendered.summary()
    assert classes["blue mug"]["miou"] == classes["blue mug"]["boundary_iou"] == 1.0
    assert classes["plate"]["miou"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert classes["plate"]["macc"] == pytest.approx((1 / 2 + 1) / 2)
    assert (means["pairs"], means["iou_above_25"], means["iou_above_50"]) == (4, 1.0, 0.5)
    assert means["miou"] == means["best_miou"] == pytest.approx((1 + 1 + 1 / 3 + 1 / 2) / 4)
    assert result.judged == ["a", "b"] and not result.missing


def test_what_is_not_predicted_is_a_miss(labels: PolygonLabels, write: Callable[..., PredictionFolder]) -> None:
    result = judge(write({"a": {"plate": square(*SQUARES["plate"])}, "c": {"plate": square(0, 0)}}), labels)
    means = result.rendered.summary()
    assert (means["pairs"], means["miou"], means["localisation"]) == (4, 0.25, 0.25)
    assert (result.missing, result.unlabelled) == (["b"], ["c"])
    assert any("b" in sentence for sentence in result.notices())


def test_photos_of_one_name_are_not_judged_by_one_prediction(
    labels: PolygonLabels, write: Callable[..., PredictionFolder]
) -> None:
    predictions = write({"a": {"plate": square(*SQUARES["plate"])}})
    photos = [*labels.images, labels.images[1]]
    judge_views(predictions, labels, photos, TrainingPhotos([]), list(labels.classes), 0.5)  # without predictions
    with pytest.raises(CaptureError, match="called a,"):
        judge_views(predictions, labels, [*photos, photos[0]], TrainingPhotos([]), list(labels.classes), 0.5)


def test_shuffled_labels_score_nothing(labels: PolygonLabels, write: Callable[..., PredictionFolder]) -> None:
    mug, plate = (square(*place) for place in SQUARES.values())
    means = judge(write({name: {"plate": mug, "blue mug": plate} for name in "ab"}), labels).rendered.summary()
    assert means["miou"] == means["localisation"] == means["boundary_iou"] == 0.0


def test_scores_have_a_pinned_and_a_best_threshold(
    labels: PolygonLabels, write: Callable[..., PredictionFolder]
) -> None:
    """Scores at half the size of the labels; all are below the pinned threshold."""
    scores = {name: np.where(square(*place), 0.4, 0.1)[::2, ::2].astype("f4") for name, place in SQUARES.items()}
    means = judge(write({"a": scores, "b": scores}), labels).rendered.summary()
    assert means["miou"] == 0.0 and means["best_miou"] > 0.6 and means["localisation"] == 1.0
    assert 0.1 < means["best_threshold"] <= 0.4


def test_photos_that_were_trained_on_are_left_out(
    labels: PolygonLabels, write: Callable[..., PredictionFolder], tmp_path: Path
) -> None:
    """By name, and by content under another name."""
    mug = square(*SQUARES["blue mug"])
    out = write({name: {"blue mug": mug} for name in "ab"})
    (tmp_path / "names.txt").write_text("b.jpg\n\n")
    result = judge(out, labels, TrainingPhotos.read(tmp_path / "names.txt"))
    assert (result.judged, result.training) == (["a"], ["b"])
    (tmp_path / "a.jpg").write_bytes(b"the same photo")
    (tmp_path / "copy.jpg").write_bytes(b"the same photo")
    trained = TrainingPhotos([tmp_path / "copy.jpg"])
    assert tmp_path / "a.jpg" in trained and tmp_path / "names.txt" not in trained
    with pytest.raises(CaptureError, match="trained on"):
        judge(out, labels, TrainingPhotos([Path("a.png"), Path("b.png")]))


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("plate.npy", np.full((4, 4), 7.0), "reach 7"),
        ("plate.npy", np.full((4, 4), np.inf), "between -1 and 1"),
        ("plate.npy", np.zeros((4, 4, 2)), "3 axes"),
        ("plate.npy", b"no array", "write it again"),
        ("plate.png", b"no picture", "write it again"),
        ("plate.npy", np.array([{}]), "write it again"),
    ],
)
def test_damaged_predictions_are_named(
    labels: PolygonLabels, tmp_path: Path, name: str, content: object, word: str
) -> None:
    (tmp_path / "out" / "a").mkdir(parents=True)
    path = tmp_path / "out" / "a" / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(ConfigError, match=word):
        judge(PredictionFolder(tmp_path / "out"), labels)
    with pytest.raises(ConfigError, match="no folder"):
        PredictionFolder(tmp_path / "elsewhere")


@pytest.mark.parametrize(("kind", "copies"), [("npz", 1), ("ply", 1), ("npz", 3)])
def test_points_answer_for_the_surface_near_them(tmp_path: Path, kind: str, copies: int) -> None:
    """Two classes along a line; the far half of the second has no predicted points. Copies of points change nothing."""
    from f3rm_ext.utils.ply import write_ply

    places = np.stack([np.linspace(0, 1, 200), np.zeros(200), np.zeros(200)], axis=1).astype(np.float32)
    surface = LabelledPoints(places, np.repeat([1, 2], 100))
    truth = CaptureGroundTruth(tmp_path)
    truth.names = ("nothing", "mug", "plate")
    truth.things = truth._read_things()
    near = places[:150]
    scores = np.stack([np.repeat([1.0, 0.0], [100, 50]), np.repeat([0.0, 1.0], [100, 50])], axis=1).astype(np.float32)
    near, scores = near.repeat(copies, axis=0), scores.repeat(copies, axis=0)
    if kind == "npz":
        np.savez(tmp_path / "points.npz", positions=near, scores=scores, names=np.array(["mug", "plate"]))
    else:
        columns = dict(zip("xyz", near.T, strict=True))
        columns |= {"score_mug": scores[:, 0], "score_plate": scores[:, 1]}
        with (tmp_path / "points.ply").open("wb") as stream:
            write_ply(stream, columns)
    metrics = judge_points(PredictionFolder(tmp_path), surface, truth, ["mug", "plate"], 0.5)
    assert metrics is not None
    classes = metrics.summarize_classes()
    assert classes["mug"]["miou"] == 1.0
    assert classes["plate"]["miou"] == pytest.approx(0.5, abs=0.05)  # 50 of 100, and those within reach of the last
    assert judge_points(PredictionFolder(tmp_path / ".."), surface, truth, ["mug"], 0.5) is None


@pytest.mark.parametrize("photos", [("a", "b"), ("IMG (1)", "Büro 2")])
def test_own_scores_are_read(labels: PolygonLabels, tmp_path: Path, photos: tuple[str, str]) -> None:
    for path, photo in zip(sorted((tmp_path / "labels").iterdir()), photos, strict=True):
        frame = json.loads(path.read_text())
        path.write_text(json.dumps({**frame, "info": {**frame["info"], "name": f"{photo}.jpg"}}))
    folder = tmp_path / "out" / "scores"
    folder.mkdir(parents=True)
    scores = np.stack([square(*place) for place in SQUARES.values()], axis=-1).astype(np.float16)
    for name in file_names(photos):
        np.savez(folder / f"{name}.npz", scores=scores, names=np.array(list(SQUARES)))
    predictions = PredictionFolder(tmp_path / "out")
    assert torch.equal(
        predictions.scores(file_names(photos)[0], ["plate"], HEIGHT, WIDTH)["plate"],
        torch.from_numpy(square(*SQUARES["plate"]).astype(np.float32)),
    )
    result = judge(predictions, PolygonLabels(tmp_path / "labels"))
    assert result.rendered.summary()["miou"] == 1.0 and result.judged == list(photos) and not result.missing
