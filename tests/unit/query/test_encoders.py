"""Text queries: whose extractor, whose weights, and what goes on working without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
import torch

from f3rm_ext.errors import ConfigError, ExtractorError, WeightsNotFoundError
from f3rm_ext.features.base import ExtractorIdentity, PatchGrid
from f3rm_ext.features.extractors import registry
from f3rm_ext.features.extractors.registry import understands_text
from f3rm_ext.query.encoders import DEFAULT_NEGATIVES, TextEncoder, split_prompts

DIM = 6


@dataclass
class WordsConfig:
    weights: str = "here"


class Silent:
    """Features without a text tower."""

    config_class = WordsConfig
    batch_size = 1
    dim = DIM
    built: ClassVar[list[str]] = []

    def __init__(self, config: WordsConfig, *, device: torch.device) -> None:
        if config.weights == "missing":
            raise WeightsNotFoundError("The weights of words are not on this machine: put words.pth there.")
        if config.weights == "broken":
            raise ConfigError("The file words.pth is damaged.")
        self.built.append(config.weights)
        self.config, self.device = config, device

    @property
    def identity(self) -> ExtractorIdentity:
        return ExtractorIdentity("words", "one", f"hash of {self.config.weights}", "any", "none")

    def patch_grid(self, height_px: int, width_px: int) -> PatchGrid:
        return PatchGrid.covering(1, 1, height_px, width_px)

    def extract(self, images: Sequence[Any]) -> list[torch.Tensor]:
        raise AssertionError("no image is looked at")


class Words(Silent):
    """A direction for every word, by its length."""

    size = DIM

    def encode_text(self, prompts: Sequence[str]) -> torch.Tensor:
        return 3.0 * torch.eye(self.size)[[len(prompt) % self.size for prompt in prompts]]


class Odd(Words):
    """Gives texts another dimension than images."""

    size = DIM + 1


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {"words": Words, "silent": Silent, "odd": Odd}

    class Point(EntryPoint):
        def load(self) -> Any:
            return classes[self.name]

    points = {name: [Point(name, f"tests:{name}", "f3rm_ext.extractors")] for name in classes}
    monkeypatch.setattr(registry, "_registered", lambda: points)
    Silent.built.clear()


@pytest.fixture
def words_head(make_head: Callable[..., Any]) -> Callable[..., Any]:
    def make(extractor: str = "words", identity: dict[str, str] | None = None, **options: Any) -> Any:
        return make_head("w", DIM, 3, extractor=extractor, identity=identity or {}, **options)

    return make


def test_texts_become_directions(words_head: Callable[..., Any]) -> None:
    vectors = TextEncoder().encode(words_head(), ["a", "bbb"])
    torch.testing.assert_close(vectors.values, torch.eye(DIM)[[1, 3]])
    assert vectors.sources == ("a", "bbb") and not vectors.values.is_inference()


def test_texts_are_written_in_codes(words_head: Callable[..., Any]) -> None:
    head = words_head(basis=torch.eye(DIM)[1:3])
    vectors = TextEncoder().encode(head, ["a", "bbb"])
    torch.testing.assert_close(vectors.values, torch.tensor([[1.0, 0.0], [0.0, 0.0]]))


def test_an_extractor_is_built_once(words_head: Callable[..., Any]) -> None:
    encoder = TextEncoder()
    assert Silent.built == [], "nothing is loaded before it is needed"
    for _ in range(2):
        encoder.encode(words_head(), DEFAULT_NEGATIVES)
    encoder.encode(words_head("words:weights=other"), ["a"])
    encoder.encode(words_head(), ["a"])
    assert Silent.built == ["here", "other"]


def test_no_texts_need_no_extractor(words_head: Callable[..., Any]) -> None:
    assert len(TextEncoder().encode(words_head(), [])) == 0
    assert Silent.built == []


@pytest.mark.parametrize("prompts", [[""], ["cup", "  "]])
def test_empty_texts_are_refused(words_head: Callable[..., Any], prompts: list[str]) -> None:
    with pytest.raises(ConfigError, match="text to look for is empty"):
        TextEncoder().encode(words_head(), prompts)
    assert Silent.built == []


def test_the_same_weights_are_required(words_head: Callable[..., Any]) -> None:
    encoder = TextEncoder()
    encoder.encode(words_head(identity={"model": "one", "weights": "hash of here", "resolution": "other"}), ["a"])
    for identity in ({"weights": "hash of others"}, {"model": "two"}):
        # Asked for again too, when the extractor is known already.
        with pytest.raises(ConfigError, match=r"words on this machine .* are not those the feature 'w' was made with"):
            encoder.encode(words_head(identity=identity), ["a"])
    assert Silent.built == ["here"]


def test_missing_weights_keep_their_kind_and_say_what_goes_on_working(words_head: Callable[..., Any]) -> None:
    with pytest.raises(WeightsNotFoundError, match=r"put words\.pth there\. Queries by example go on working\.$"):
        TextEncoder().encode(words_head("words:weights=missing"), ["a"])
    with pytest.raises(ExtractorError, match=r"damaged\. Queries by example go on working\.$"):
        TextEncoder().encode(words_head("words:weights=broken"), ["a"])


def test_weights_that_arrive_later_are_used(words_head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, head = TextEncoder(), words_head("words:weights=late")
    with monkeypatch.context() as patch:
        patch.setattr(Words, "__init__", lambda self, config, *, device: Silent(WordsConfig("missing"), device=device))
        with pytest.raises(WeightsNotFoundError):
            encoder.encode(head, ["a"])
    assert len(encoder.encode(head, ["a"])) == 1


@pytest.mark.parametrize("weights", ["here", "missing"])
def test_features_without_texts_say_so_whatever_their_weights(words_head: Callable[..., Any], weights: str) -> None:
    with pytest.raises(ExtractorError, match=r"'w' \(silent.*\) understands no text. Queries by example") as caught:
        TextEncoder().encode(words_head(f"silent:weights={weights}"), ["a"])
    assert not isinstance(caught.value, WeightsNotFoundError) and Silent.built == []


def test_who_understands_text() -> None:
    assert understands_text("words:weights=missing") and understands_text("clip") and understands_text("labels")
    assert not understands_text("silent") and not understands_text("dinov2:model=vits14")
    with pytest.raises(ExtractorError, match="no extractor 'speech'"):
        understands_text("speech")


def test_extractors_that_are_not_installed(words_head: Callable[..., Any]) -> None:
    with pytest.raises(ExtractorError, match=r"no extractor 'speech'.*Queries by example go on working\."):
        TextEncoder().encode(words_head("speech"), ["a"])


def test_texts_of_another_dimension_are_refused(words_head: Callable[..., Any]) -> None:
    for options in ({}, {"basis": torch.eye(DIM)[:2]}):
        with pytest.raises(ExtractorError, match=r"odd gave texts of shape \(1, 7\) .* 6 dimensions"):
            TextEncoder().encode(words_head("odd", **options), ["a"])


def test_alternatives_are_split() -> None:
    assert split_prompts("blue mug") == ["blue mug"]
    assert split_prompts(" mug| cup ") == ["mug", "cup"]
    for text in ("", "  ", "mug|", "|"):
        with pytest.raises(ConfigError, match="text to look for is empty"):
            split_prompts(text)
