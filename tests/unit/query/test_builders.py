"""From what is typed, and from labelled classes, to queries; and what each is compared with."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from f3rm_ext.capture.ground_truth import CaptureGroundTruth, LabelledView
from f3rm_ext.errors import ConfigError, ExtractorError
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.query import builders
from f3rm_ext.query.builders import (
    Negatives,
    draw_places,
    encode_queries,
    exemplar_queries,
    mean_of_photos,
    text_queries,
)
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.encoders import DEFAULT_NEGATIVES, ExampleEncoder, TextEncoder
from f3rm_ext.query.exemplar import Example
from f3rm_ext.query.options import QueryOptions, Region, parse_queries
from f3rm_ext.query.run import Photos, Run

MEAN = ("the mean of all photos",)


@pytest.fixture(scope="module")
def head(run: Run) -> Any:
    return run.model.query_heads()["labels"]


def one_hot(head: Any, truth: CaptureGroundTruth, name: str) -> torch.Tensor:
    return torch.eye(head.dim)[list(truth.names).index(name)]


@pytest.mark.parametrize(
    ("negatives", "count"), [("common", 4), ("others", 1), ("both", 5), ("none", 0)], ids=get_args(Negatives)
)
def test_queries_by_text(run: Run, head: Any, negatives: Negatives, count: int) -> None:
    truth = CaptureGroundTruth(run.data)
    assert text_queries(head, [], TextEncoder(), negatives) == []
    queries = text_queries(head, ["vase", "apple"], TextEncoder(), negatives, 0.3)
    assert [query.name for query in queries] == ["vase", "apple"]
    for query, other in zip(queries, ("apple", "vase"), strict=True):
        torch.testing.assert_close(query.positives.values[0], one_hot(head, truth, query.name))
        assert query.positives.sources == (query.name,) and query.head == "labels" and query.temperature == 0.3
        expected = (*DEFAULT_NEGATIVES, other)
        assert query.negatives.sources == {4: expected[:4], 1: expected[4:], 5: expected, 0: ()}[count]
        if count in (1, 5):
            torch.testing.assert_close(query.negatives.values[-1], one_hot(head, truth, other))


def test_only_names_that_labels_know_can_be_looked_for(run: Run) -> None:
    given = dict(load_config=Path("config.yml"), text=("Vase | apple",), negative=("unicorn",))
    (query,) = encode_queries(parse_queries(QueryOptions(**given)), run)
    assert query.positives.sources == ("Vase", "apple") and query.negatives.sources == ("unicorn",)
    with pytest.raises(ExtractorError, match=r"'unicorn'.*vase"):
        encode_queries(parse_queries(QueryOptions(**{**given, "text": ("vase | unicorn",)})), run)


def test_the_mean_of_all_photos(run: Run, head: Any) -> None:
    """Against the mean of the stored training maps."""
    maps = [run.feature_map("train", i, "").values.reshape(-1, head.dim) for i in range(len(run.files("train")))]
    mean = np.concatenate(maps).astype(np.float64).mean(axis=0)
    found = mean_of_photos(head)
    np.testing.assert_allclose(found.values[0], mean / np.linalg.norm(mean), atol=0.03)
    assert found.sources == MEAN


@pytest.mark.parametrize("negatives", get_args(Negatives))
def test_queries_by_example_are_one_pixel_of_each_class_in_drawn_photos(
    run: Run, head: Any, negatives: Negatives
) -> None:
    truth = CaptureGroundTruth(run.data)

    def load(index: int) -> FeatureMap:
        return run.feature_map("train", index, head.name)

    draws = exemplar_queries(run, head, draw_places(run, truth, truth.classes, 3), negatives, 0.3, load)
    assert len(draws) == 3 and len(draws[0]) > 3
    for queries in draws:
        for query in queries:
            photo, place = query.positives.sources[0].split(":")
            split, index = run.find_photo(photo) or ("", 0)
            assert split == "train"
            labels = truth.labels(run.files("train")[index], 48, 64)
            assert labels is not None
            x_px, y_px = map(float, place.split(","))
            assert truth.names[labels[int(y_px), int(x_px)]] == query.name and x_px % 1 == y_px % 1 == 0.5
            torch.testing.assert_close(query.positives.values[0], one_hot(head, truth, query.name))
            clusters = [source for source in query.negatives.sources if ", cluster " in source]
            assert bool(clusters) == (negatives in ("common", "both"))
            others = [source for other in queries if other is not query for source in other.positives.sources]
            others = others if negatives in ("others", "both") else []
            assert query.negatives.sources == (*clusters, *others) and query.temperature == 0.3
    names = [query.name for query in draws[0]]
    assert all([query.name for query in queries] == names for queries in draws)
    places = [{queries[column].positives.sources for queries in draws} for column in range(len(names))]
    assert max(map(len, places)) == 3, "each draw takes another photo"
    again = exemplar_queries(run, head, draw_places(run, truth, truth.classes), negatives, 0.3, load)
    assert [query.positives.sources for query in again[0]] == [query.positives.sources for query in draws[0]]


def test_a_photo_may_be_named(run: Run, head: Any) -> None:
    truth = CaptureGroundTruth(run.data)
    for file in run.files("train")[:2]:
        (queries,) = exemplar_queries(run, head, draw_places(run, truth, truth.classes, 2, file.name), "none")
        assert {query.positives.sources[0].split(":")[0] for query in queries} == {file.name}


@pytest.mark.parametrize("photo", ["frame_00003.png", "nowhere.png"])
def test_only_training_photos_give_examples(run: Run, head: Any, photo: str) -> None:
    truth = CaptureGroundTruth(run.data)
    with pytest.raises(ConfigError, match=photo):
        draw_places(run, truth, truth.classes, photo=photo)


def test_only_named_classes_that_are_seen_well_enough(run: Run, head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = {name: np.zeros((48, 64), bool) for name in ("large", "small", "unnamed")}
    masks["large"][:5, :5], masks["small"][10:14, :6], masks["unnamed"][20:40, :] = True, True, True

    class Labels:
        classes = ("large", "small", "unnamed", "absent")

        def view(self, image: Path, height_px: int, width_px: int) -> LabelledView:
            return LabelledView(masks, {})

    assert [place.name for place in draw_places(run, Labels(), ["large", "small", "absent"])] == ["large"]
    monkeypatch.setattr(Labels, "view", lambda *_: None)
    with pytest.raises(ConfigError, match="no training photo"):
        draw_places(run, Labels(), ["large"])


# --- from what is typed -----------------------------------------------------------------------------------------------


class ToyTextEncoder(TextEncoder):
    """Embeds a text as a fixed random direction; remembers the texts."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[tuple[str, ...]] = []

    def encode(self, head: Any, prompts: Sequence[str], *, known: bool = False) -> Embeddings:
        self.prompts.append(tuple(prompts))
        if head.extractor == "mute":
            raise ExtractorError("It understands no text.")
        rows = [torch.randn(head.dim, generator=torch.Generator().manual_seed(len(text))) for text in prompts]
        return Embeddings.from_full(torch.stack(rows), tuple(prompts))


@pytest.fixture
def toy(make_field: Callable, make_head: Callable, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with two features; its photos are all the same."""

    class ToyExampleEncoder(ExampleEncoder):
        def encode(self, head: Any, region: Region) -> Example:
            positives = Embeddings.from_full(torch.ones(1, head.dim), (str(region),))
            if not region.is_point:
                return Example(positives, Embeddings.empty(head.dim))
            return Example(positives, Embeddings.from_full(torch.eye(head.dim)[:2], ("table", "wall")))

    monkeypatch.setattr(builders, "ExampleEncoder", ToyExampleEncoder)
    model = make_field(make_head(), make_head("other", dim=12, extractor="mute"))
    return Photos(model, manager=None)  # type: ignore[arg-type]


def encoded(photos: Any, encoder: TextEncoder, **given: Any) -> list[Query]:
    return encode_queries(parse_queries(QueryOptions(load_config=Path("config.yml"), **given)), photos, encoder)


def test_default_negatives(toy: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.ones(40))
    vector_file = str(tmp_path / "v.npy")
    given = dict(text=("mug|cup",), exemplar=("a.png:1,2", "a.png"), vector=(vector_file,), temperature=0.3)
    text, example, whole, vector = encoded(toy, ToyTextEncoder(), **given)
    assert text.positives.sources == ("mug", "cup") and text.negatives.sources == DEFAULT_NEGATIVES
    assert example.negatives.sources == ("table", "wall")
    for query in (whole, vector):
        assert query.negatives.sources == ("the mean of all photos",) and query.is_relevancy
        mean = toy.model.heads["toy"].display_mean
        torch.testing.assert_close(query.negatives.values[0], mean / mean.norm())
    assert {query.temperature for query in (text, example, whole, vector)} == {0.3}
    assert {query.head for query in (text, example, whole, vector)} == {"toy"}


def test_several_examples_and_counterexamples(toy: Any) -> None:
    given = dict(exemplar=("cup=a.png:1,2 | b.png:3,4",), negative_exemplar=("c.png:5,6", "d.png"))
    (query,) = encoded(toy, ToyTextEncoder(), **given)
    assert query.positives.sources == ("a.png:1,2", "b.png:3,4")
    assert query.negatives.sources == ("table", "wall", "table", "wall", "c.png:5,6", "d.png")
    (query,) = encoded(toy, ToyTextEncoder(), text=("mug",), negative_exemplar=("c.png:5,6",))
    assert query.negatives.sources == (*DEFAULT_NEGATIVES, "c.png:5,6")


def test_no_negatives_give_cosines_and_need_no_text(toy: Any) -> None:
    encoder = ToyTextEncoder()
    queries = encoded(toy, encoder, exemplar=("a.png:1,2",), negative=("none",), feature="other")
    assert not queries[0].is_relevancy and queries[0].positives.values.shape == (1, 12)
    encoded(toy, encoder, exemplar=("a.png:1,2",), feature="other")
    assert not encoder.prompts


@pytest.mark.parametrize("given", [{"text": ("mug",)}, {"exemplar": ("a.png",), "negative": ("table",)}])
def test_texts_for_a_feature_that_understands_none(toy: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ExtractorError, match="understands no text"):
        encoded(toy, ToyTextEncoder(), feature="other", **given)
