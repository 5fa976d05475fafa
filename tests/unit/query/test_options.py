"""From what is typed to queries."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from f3rm_ext.errors import ConfigError, ExtractorError
from f3rm_ext.query import parsing as asking
from f3rm_ext.query.embeddings import Embeddings
from f3rm_ext.query.encoders import DEFAULT_NEGATIVES, TextEncoder
from f3rm_ext.query.example_encoder import Example
from f3rm_ext.query.exemplar import Region
from f3rm_ext.query.options import QueryOptions
from f3rm_ext.query.parsing import build_queries, parse_queries
from f3rm_ext.query.run import Run


def options(**given: Any) -> QueryOptions:
    return QueryOptions(load_config=Path("config.yml"), **given)


class Encoder(TextEncoder):
    """Embeds a text as a fixed random direction; remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[tuple[str, ...]] = []

    def encode(self, head: Any, prompts: Sequence[str]) -> Embeddings:
        self.prompts.append(tuple(prompts))
        if head.extractor == "mute":
            raise ExtractorError("It understands no text.")
        rows = [torch.randn(head.dim, generator=torch.Generator().manual_seed(len(text))) for text in prompts]
        return Embeddings.of_full(torch.stack(rows), tuple(prompts))


@pytest.fixture
def run(make_field: Callable, make_head: Callable, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run with two features, whose photos are all the same."""

    class Examples:
        def __init__(self, run: Any, head: Any, device: Any) -> None:
            self.head = head

        def example(self, region: Region) -> Example:
            positives = Embeddings.of_full(torch.ones(1, self.head.dim), (str(region),))
            if not region.is_point:
                return Example(positives, Embeddings.empty(self.head.dim))
            return Example(positives, Embeddings.of_full(torch.eye(self.head.dim)[:2], ("table", "wall")))

    monkeypatch.setattr(asking, "Examples", Examples)
    model = make_field(make_head(), make_head("other", dim=12, extractor="mute"))
    return Run(model, manager=None, config=None, checkpoint=Path("step.ckpt"), step=0)  # type: ignore[arg-type]


def test_texts_with_and_without_names() -> None:
    mug, fruit = parse_queries(options(text=("blue mug", "fruit = banana | plantain")))
    assert (mug.name, mug.prompts) == ("blue mug", ("blue mug",))
    assert (fruit.name, fruit.prompts) == ("fruit", ("banana", "plantain"))


def test_a_text_of_alternatives_is_called_by_the_first() -> None:
    (asked,) = parse_queries(options(text=("banana|plantain",)))
    assert asked.name == "banana"


def test_examples_and_vectors_with_and_without_names() -> None:
    given = options(exemplar=("a/b.png:1,2", "face=a/b.png:1,2,3,4"), vector=("v/mug.npy", "cup=v/mug.npy"))
    found = [(asked.kind, asked.name) for asked in parse_queries(given)]
    assert found == [("exemplar", "b.png:1,2"), ("exemplar", "face"), ("vector", "mug"), ("vector", "cup")]
    regions = [asked.region for asked in parse_queries(given)[:2]]
    assert regions == [Region("a/b.png", 1.0, 2.0), Region("a/b.png", 1.0, 2.0, 3.0, 4.0)]
    assert parse_queries(given)[3].file == Path("v/mug.npy")


def test_an_equals_sign_in_a_path_is_no_name() -> None:
    (asked,) = parse_queries(options(exemplar=("runs/lr=3/b.png:1,2",)))
    assert asked.region == Region("runs/lr=3/b.png", 1.0, 2.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": ("",)}, "text to look for is empty"),
        ({"text": ("mug | ",)}, "text to look for is empty"),
        ({"text": ("name=",)}, "text to look for is empty"),
        ({"text": ("mug", "mug | cup")}, "Two queries are called 'mug'"),
        ({"exemplar": ("a.png:1,2,3",)}, "is not understood"),
        ({"exemplar": ("a.png:1,2,0,4",)}, "is empty"),
        ({"vector": ("cup=",)}, "names no file"),
        ({"text": ("mug",), "negative": ("none", "table")}, "goes with no other"),
        ({"text": ("mug",), "negative": (" ",)}, "after --negative is empty"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"threshold": 1.5}, "--threshold is 1.5"),
    ],
)
def test_bad_options(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**given)


def test_default_negatives(run: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.ones(40))
    vector_file = str(tmp_path / "v.npy")
    given = options(text=("mug|cup",), exemplar=("a.png:1,2", "a.png"), vector=(vector_file,), temperature=0.3)
    text, example, whole, vector = build_queries(given, run, Encoder())
    assert text.positives.sources == ("mug", "cup") and text.negatives.sources == DEFAULT_NEGATIVES
    assert example.negatives.sources == ("table", "wall")
    for query in (whole, vector):
        assert query.negatives.sources == ("the mean of all photos",) and query.is_relevancy
        mean = run.model.heads["toy"].display_mean
        torch.testing.assert_close(query.negatives.values[0], mean / mean.norm())
    assert {query.temperature for query in (text, example, whole, vector)} == {0.3}
    assert {query.head for query in (text, example, whole, vector)} == {"toy"}


def test_given_negatives_go_for_all(run: Any) -> None:
    given = options(text=("mug",), exemplar=("a.png:1,2",), negative=("table", "floor"))
    queries = build_queries(given, run, Encoder())
    assert [query.negatives.sources for query in queries] == [("table", "floor")] * 2


def test_no_negatives_give_cosines_and_need_no_text(run: Any) -> None:
    encoder = Encoder()
    queries = build_queries(options(exemplar=("a.png:1,2",), negative=("none",), feature="other"), run, encoder)
    assert not queries[0].is_relevancy and queries[0].positives.values.shape == (1, 12) and not encoder.prompts


def test_examples_need_no_text(run: Any) -> None:
    encoder = Encoder()
    build_queries(options(exemplar=("a.png:1,2",), feature="other"), run, encoder)
    assert not encoder.prompts


@pytest.mark.parametrize("given", [{"text": ("mug",)}, {"exemplar": ("a.png",), "negative": ("table",)}])
def test_texts_for_a_feature_that_understands_none(run: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ExtractorError, match="understands no text"):
        build_queries(options(feature="other", **given), run, Encoder())


def test_unknown_feature(run: Any) -> None:
    with pytest.raises(ConfigError, match=r"no feature 'clip'.*toy, other"):
        build_queries(options(text=("mug",), feature="clip"), run, Encoder())
