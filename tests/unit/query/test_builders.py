"""A query for every class: by text and by example, and what each is told from."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from f3rm_ext.capture.ground_truth import LabelledView, Truth
from f3rm_ext.errors import ConfigError
from f3rm_ext.query.builders import Negatives, exemplar_queries, mean_of_photos, text_queries
from f3rm_ext.query.encoders import DEFAULT_NEGATIVES, TextEncoder
from f3rm_ext.query.evaluation import MIN_VISIBLE_PX
from f3rm_ext.query.run import Run, load_run

MEAN = ("the mean of all photos",)


@pytest.fixture(scope="module")
def run(untrained: Any) -> Run:
    return load_run(untrained.config)


@pytest.fixture(scope="module")
def head(run: Run) -> Any:
    return run.model.query_heads()["labels"]


def one_hot(head: Any, truth: Truth, name: str) -> torch.Tensor:
    return torch.eye(head.dim)[list(truth.names).index(name)]


@pytest.mark.parametrize(
    ("negatives", "count"), [("common", 4), ("others", 1), ("both", 5), ("none", 0)], ids=get_args(Negatives)
)
def test_queries_by_text(run: Run, head: Any, negatives: Negatives, count: int) -> None:
    truth = Truth(run.data)
    queries = text_queries(head, ["vase", "apple"], TextEncoder(), negatives, 0.3)
    assert [query.name for query in queries] == ["vase", "apple"]
    for query, other in zip(queries, ("apple", "vase"), strict=True):
        torch.testing.assert_close(query.positives.values[0], one_hot(head, truth, query.name))
        assert query.positives.sources == (query.name,) and query.head == "labels" and query.temperature == 0.3
        expected = (*DEFAULT_NEGATIVES, other)
        assert query.negatives.sources == {4: expected[:4], 1: expected[4:], 5: expected, 0: ()}[count]
        if count in (1, 5):
            torch.testing.assert_close(query.negatives.values[-1], one_hot(head, truth, other))


def test_nothing_to_ask_for(head: Any) -> None:
    assert text_queries(head, [], TextEncoder(), "both") == []


def test_the_mean_of_all_photos(run: Run, head: Any) -> None:
    """Against the mean of the stored training maps."""
    maps = [run.feature_map("train", i, "").values.reshape(-1, head.dim) for i in range(len(run.files("train")))]
    mean = np.concatenate(maps).astype(np.float64).mean(axis=0)
    found = mean_of_photos(head)
    np.testing.assert_allclose(found.values[0], mean / np.linalg.norm(mean), atol=0.03)
    assert found.sources == MEAN


@pytest.mark.parametrize("negatives", get_args(Negatives))
def test_queries_by_example_are_one_pixel_of_each_class(run: Run, head: Any, negatives: Negatives) -> None:
    truth = Truth(run.data)
    queries = exemplar_queries(run, head, truth, truth.classes, negatives, 0.3)
    assert len(queries) > 3
    photos = {query.positives.sources[0].split(":")[0] for query in queries}
    (photo,) = photos
    split, index = run.find_photo(photo) or ("", 0)
    assert split == "train"
    labels = truth.labels(run.files("train")[index], 48, 64)
    assert labels is not None
    for query in queries:
        x_px, y_px = map(float, query.positives.sources[0].split(":")[1].split(","))
        assert truth.names[labels[int(y_px), int(x_px)]] == query.name and x_px % 1 == y_px % 1 == 0.5
        torch.testing.assert_close(query.positives.values[0], one_hot(head, truth, query.name))
        kinds = [source for source in query.negatives.sources if source.startswith(f"{photo} without it, kind ")]
        assert bool(kinds) == (negatives in ("common", "both"))
        others = [other.positives.sources[0] for other in queries if other is not query]
        others = others if negatives in ("others", "both") else []
        assert query.negatives.sources == (*kinds, *others) and query.temperature == 0.3


def test_the_photo_that_shows_most_classes_is_taken(run: Run, head: Any) -> None:
    truth = Truth(run.data)
    queries = exemplar_queries(run, head, truth, truth.classes, "none")

    def seen(file: Path) -> int:
        view = truth.view(file, 48, 64)
        assert view is not None
        return sum(int(mask.sum()) >= MIN_VISIBLE_PX for mask in view.masks.values())

    assert len(queries) == max(seen(file) for file in run.files("train"))


def test_a_photo_may_be_named(run: Run, head: Any) -> None:
    truth = Truth(run.data)
    for file in run.files("train")[:2]:
        queries = exemplar_queries(run, head, truth, truth.classes, "none", photo=file.name)
        assert {query.positives.sources[0].split(":")[0] for query in queries} == {file.name}


@pytest.mark.parametrize("photo", ["frame_00003.png", "nowhere.png"])
def test_only_training_photos_give_examples(run: Run, head: Any, photo: str) -> None:
    truth = Truth(run.data)
    with pytest.raises(ConfigError, match=rf"no training photo called {photo} with labels"):
        exemplar_queries(run, head, truth, truth.classes, "none", photo=photo)


def test_only_classes_asked_for_and_seen_well_enough(run: Run, head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = {name: np.zeros((48, 64), bool) for name in ("large", "small", "unasked")}
    masks["large"][:5, :5], masks["small"][10:14, :6], masks["unasked"][20:40, :] = True, True, True

    class Labels:
        classes = ("large", "small", "unasked", "absent")

        def view(self, image: Path, height_px: int, width_px: int) -> LabelledView:
            return LabelledView(masks, {})

    queries = exemplar_queries(run, head, Labels(), ["large", "small", "absent"], "none")
    assert [query.name for query in queries] == ["large"]


def test_photos_without_labels_give_no_examples(run: Run, head: Any) -> None:
    class Nothing:
        classes = ("cup",)

        def view(self, image: Path, height_px: int, width_px: int) -> None:
            return None

    with pytest.raises(ConfigError, match="no training photo with labels"):
        exemplar_queries(run, head, Nothing(), ["cup"], "none")
