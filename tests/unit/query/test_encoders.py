"""Texts and examples: whose extractor, whose weights, and what goes on working without."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from PIL import Image

from f3rm_ext.errors import ConfigError, ExtractorError, WeightsNotFoundError
from f3rm_ext.features.base import ExtractorIdentity, FeatureMap, PatchGrid
from f3rm_ext.features.extractors import registry
from f3rm_ext.features.extractors.registry import understands_text
from f3rm_ext.query.encoders import DEFAULT_NEGATIVES, ExampleEncoder, TextEncoder
from f3rm_ext.query.exemplar import Example, scene_clusters, take_example
from f3rm_ext.query.options import Region
from f3rm_ext.query.run import Photos

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
        raise AssertionError("no image is read")


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
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    Silent.built.clear()


@pytest.fixture
def words_head(make_head: Callable[..., Any]) -> Callable[..., Any]:
    def make(extractor: str = "words", identity: dict[str, str] | None = None, **options: Any) -> Any:
        return make_head("w", DIM, 3, extractor=extractor, identity=identity or {}, **options)

    return make


def test_texts_become_directions(words_head) -> None:
    vectors = TextEncoder().encode(words_head(), ["a", "bbb"])
    torch.testing.assert_close(vectors.values, torch.eye(DIM)[[1, 3]])
    assert vectors.sources == ("a", "bbb") and not vectors.values.is_inference()
    codes = TextEncoder().encode(words_head(basis=torch.eye(DIM)[1:3]), ["a", "bbb"])
    torch.testing.assert_close(codes.values, torch.tensor([[1.0, 0.0], [0.0, 0.0]]))


def test_an_extractor_is_built_once(words_head) -> None:
    encoder = TextEncoder()
    assert len(encoder.encode(words_head(), [])) == 0 and Silent.built == [], "nothing is loaded before it is needed"
    for _ in range(2):
        encoder.encode(words_head(), DEFAULT_NEGATIVES)
    encoder.encode(words_head("words:weights=other"), ["a"])
    encoder.encode(words_head(), ["a"])
    assert Silent.built == ["here", "other"]


@pytest.mark.parametrize("prompts", [[""], ["cup", "  "]])
def test_empty_texts_are_refused(words_head, prompts) -> None:
    with pytest.raises(ConfigError, match="empty"):
        TextEncoder().encode(words_head(), prompts)
    assert Silent.built == []


def test_the_same_weights_are_required(words_head) -> None:
    encoder = TextEncoder()
    encoder.encode(words_head(identity={"model": "one", "weights": "hash of here", "resolution": "other"}), ["a"])
    for identity in ({"weights": "hash of others"}, {"model": "two"}):
        # Asked for again too, when the extractor is known already.
        with pytest.raises(ConfigError, match=r"hash of here|\(one\)"):
            encoder.encode(words_head(identity=identity), ["a"])
    assert Silent.built == ["here"]


def test_missing_weights_keep_their_kind_and_say_what_goes_on_working(words_head) -> None:
    with pytest.raises(WeightsNotFoundError, match=r"words\.pth .*by example"):
        TextEncoder().encode(words_head("words:weights=missing"), ["a"])
    with pytest.raises(ExtractorError, match=r"damaged.* by example"):
        TextEncoder().encode(words_head("words:weights=broken"), ["a"])
    with pytest.raises(ExtractorError, match=r"'speech'.* by example"):
        TextEncoder().encode(words_head("speech"), ["a"])


def test_weights_that_arrive_later_are_used(words_head, monkeypatch) -> None:
    encoder, head = TextEncoder(), words_head("words:weights=late")
    with monkeypatch.context() as patch:
        patch.setattr(Words, "__init__", lambda self, config, *, device: Silent(WordsConfig("missing"), device=device))
        with pytest.raises(WeightsNotFoundError):
            encoder.encode(head, ["a"])
    assert len(encoder.encode(head, ["a"])) == 1


@pytest.mark.parametrize("weights", ["here", "missing"])
def test_features_without_texts_say_so_whatever_their_weights(words_head, weights) -> None:
    with pytest.raises(ExtractorError, match=r"'w' \(silent.*clip.*example") as caught:
        TextEncoder().encode(words_head(f"silent:weights={weights}"), ["a"])
    assert not isinstance(caught.value, WeightsNotFoundError) and Silent.built == []


def test_who_understands_text() -> None:
    assert understands_text("words:weights=missing") and understands_text("clip") and understands_text("labels")
    assert not understands_text("silent") and not understands_text("dinov2:model=vits14")
    with pytest.raises(ExtractorError, match="'speech'"):
        understands_text("speech")


def test_texts_of_another_dimension_are_refused(words_head) -> None:
    for options in ({}, {"basis": torch.eye(DIM)[:2]}):
        with pytest.raises(ExtractorError, match=r"odd.*\(1, 7\).*6 "):
            TextEncoder().encode(words_head("odd", **options), ["a"])


# --- examples ---------------------------------------------------------------------------------------------------------


FILE, RUN = (40, 32), (20, 16)
"""Width and height of the photos on the disk, and as the run sees them."""


Encode = Callable[[Region], Example]


class Colors:
    """Features of a patch of 4 x 4 pixels are its mean colour, twice."""

    dim, batch_size = DIM, 1
    identity = SimpleNamespace(model="colours", weights="none")

    def patch_grid(self, height_px: int, width_px: int) -> PatchGrid:
        return PatchGrid.covering(height_px // 4, width_px // 4, height_px, width_px)

    def extract(self, images: list[np.ndarray]) -> list[torch.Tensor]:
        found = []
        for image in images:
            rows, cols = image.shape[0] // 4, image.shape[1] // 4
            mean = image.reshape(rows, 4, cols, 4, 3).mean(axis=(1, 3)) / 255.0
            found.append(torch.from_numpy(np.concatenate([mean, mean], axis=2)).float())
        return found


class OnePhoto(Photos):
    """A capture of one photo, which the run reads from ``small``."""

    def __init__(self, folder: Path, small: Path, feature_map: FeatureMap) -> None:
        self.folder, self.small, self.map = folder, small, feature_map

    @property
    def data(self) -> Path:
        return self.folder

    def find_photo(self, name: str) -> tuple[str, int] | None:
        return ("train", 0) if name == "a.png" or Path(name).resolve() == self.small else None

    def files(self, split: str) -> list[Path]:
        return [self.small]

    def cameras(self, split: str) -> Cameras:
        return Cameras(torch.eye(4)[None, :3], fx=9.0, fy=9.0, cx=10.0, cy=8.0, width=RUN[0], height=RUN[1])

    def scene_map(self, split: str, index: int, head: str) -> FeatureMap:
        return self.map

    def scene_clusters(self, head: str, load: object = None) -> np.ndarray:
        return scene_clusters([self.map])


@pytest.fixture
def photos(tmp_path: Path) -> Any:
    """A capture of one photo, left half red and right half green, at half the size of its file."""
    picture = np.zeros((FILE[1], FILE[0], 3), dtype=np.uint8)
    picture[:, : FILE[0] // 2, 0], picture[:, FILE[0] // 2 :, 1] = 200, 200
    (tmp_path / "capture" / "images").mkdir(parents=True)
    (tmp_path / "capture" / "images_2").mkdir()
    Image.fromarray(picture).save(tmp_path / "capture" / "images" / "a.png")
    small = tmp_path / "capture" / "images_2" / "a.png"
    Image.fromarray(picture[::2, ::2]).save(small)
    extractor = Colors()
    (values,) = extractor.extract([picture[::2, ::2]])
    feature_map = FeatureMap(values.numpy().astype(np.float16), extractor.patch_grid(RUN[1], RUN[0]))
    return OnePhoto(tmp_path / "capture", small, feature_map)


@pytest.fixture
def head(make_head: Callable[..., Any]) -> Any:
    return make_head(dim=DIM)


@pytest.fixture
def extract_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Colors]], None]:
    """Takes another extractor for the features of the head than :class:`Colors`."""

    def take(build: Callable[[], Colors]) -> None:
        monkeypatch.setattr(registry, "build_extractor", lambda text, device: build())

    take(Colors)
    return take


@pytest.fixture
def encode(photos: Any, head: Any, extract_with: Any) -> Encode:
    """Embeds a region."""
    encoder = ExampleEncoder(photos, torch.device("cpu"))
    return lambda region: encoder.encode(head, region)


def test_a_photo_by_name_is_in_pixels_of_the_file_the_run_reads(encode, photos) -> None:
    found = encode(Region("a.png", 15.0, 3.0)).positives
    torch.testing.assert_close(
        found.values[:1], take_example(photos.map, Region("a.png", 15.0, 3.0)).positives.values[:1]
    )
    assert found.sources[0] == "a.png:15,3"


def test_a_file_of_the_same_name_elsewhere_is_not_meant(encode, tmp_path, monkeypatch) -> None:
    _save(tmp_path / "a.png", np.zeros((4, 4, 3), np.uint8))
    wanted = encode(Region("a.png", 15.0, 3.0)).positives.values
    monkeypatch.chdir(tmp_path)
    torch.testing.assert_close(encode(Region("a.png", 15.0, 3.0)).positives.values, wanted)


def test_the_original_of_a_smaller_copy_is_in_its_own_pixels(encode, photos) -> None:
    path = str(photos.data / "images" / "a.png")
    found = encode(Region(path, 30.0, 6.0, 4.0, 4.0)).positives
    wanted = take_example(photos.map, Region("a.png", 15.0, 3.0, 2.0, 2.0)).positives
    torch.testing.assert_close(found.values[:1], wanted.values[:1])
    assert found.sources[0] == f"{path}:30,6,4,4"


def test_the_original_of_a_copy_is_told_from_others_by_its_folder(encode, photos, monkeypatch) -> None:
    original = photos.data / "images" / "left" / "a.png"
    original.parent.mkdir()
    shutil.copy(photos.data / "images" / "a.png", original)
    asked: list[str] = []
    monkeypatch.setattr(
        photos, "find_photo", lambda name: asked.append(name) or (("train", 0) if name == "left/a.png" else None)
    )
    assert encode(Region(str(original), 30.0, 6.0)).positives.sources[0] == f"{original}:30,6"
    assert "a.png" not in asked


def test_photos_need_no_weights(encode, photos, extract_with) -> None:
    def fail() -> Colors:
        raise WeightsNotFoundError("No weights: put them there.")

    extract_with(fail)
    encode(Region("a.png", 1.0, 1.0))
    with pytest.raises(WeightsNotFoundError, match="put them there"):
        encode(Region(str(_save(photos.data.parent / "b.png", np.zeros((8, 8, 3), np.uint8)))))


def _save(path: Path, picture: np.ndarray, **options: Any) -> Path:
    Image.fromarray(picture).save(path, **options)
    return path


def test_another_image_goes_through_the_extractor(encode, tmp_path) -> None:
    picture = np.zeros((16, 24, 3), dtype=np.uint8)
    picture[:, 12:, 2] = 250
    found = encode(Region(str(_save(tmp_path / "b.png", picture)), 20.0, 8.0)).positives
    torch.testing.assert_close(found.values[0], torch.tensor([0, 0, 1, 0, 0, 1]) / 2**0.5, atol=1e-3, rtol=0)


def test_transparent_images_are_on_white_and_turned_ones_upright(encode, tmp_path) -> None:
    clear = _save(tmp_path / "clear.png", np.zeros((8, 8, 4), dtype=np.uint8))
    white = torch.full((DIM,), DIM**-0.5)
    torch.testing.assert_close(encode(Region(str(clear))).positives.values[0], white, atol=1e-3, rtol=0)
    turned = np.zeros((8, 16, 3), dtype=np.uint8)
    turned[:, :8, 0] = turned[:, 8:, 1] = 250
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise: the left half comes to the top
    path = _save(tmp_path / "turned.png", turned, exif=exif)
    top = encode(Region(str(path), 4.0, 2.0)).positives.values[0]
    assert top[0] > 0.7 and top[1] < 0.01
    with pytest.raises(ConfigError, match="8 x 16"):
        encode(Region(str(path), 12.0, 4.0))


def test_codes_of_another_image_know_what_they_leave_out(photos, make_head, monkeypatch, extract_with) -> None:
    head = make_head(dim=2, basis=torch.eye(DIM)[:2])
    picture = np.zeros((8, 8, 3), dtype=np.uint8)
    picture[..., 0] = picture[..., 2] = 250
    monkeypatch.setattr(photos, "scene_clusters", lambda head: np.zeros((0, 3), np.float32))
    path = _save(photos.data.parent / "b.png", picture)
    found = ExampleEncoder(photos, torch.device("cpu")).encode(head, Region(str(path))).positives
    # Red is the first of four equal values; codes keep that one only.
    torch.testing.assert_close(found.values, torch.tensor([[0.5, 0.0]]), atol=2e-3, rtol=0)


def test_outside_of_the_image(encode, photos) -> None:
    with pytest.raises(ConfigError, match="20 x 16"):
        encode(Region("a.png", 21.0, 3.0))
    with pytest.raises(ConfigError, match="40 x 32"):
        encode(Region(str(photos.data / "images" / "a.png"), 30.0, 3.0, 11.0, 2.0))


def test_what_is_no_image(encode, tmp_path) -> None:
    (tmp_path / "text.png").write_text("hello")
    for name in ("text.png", "none.png"):
        with pytest.raises(ConfigError, match=name):
            encode(Region(str(tmp_path / name)))


def test_another_model_than_that_of_the_features(encode, head, tmp_path) -> None:
    head.identity["weights"] = "0123"
    with pytest.raises(ConfigError, match=r"weights.*toy"):
        encode(Region(str(_save(tmp_path / "b.png", np.zeros((8, 8, 3), np.uint8)))))


def test_extractors_that_need_files_get_them(encode, tmp_path, extract_with) -> None:
    class ByFile(Colors):
        def extract_files(self, images: list[np.ndarray], files: list[Path]) -> list[torch.Tensor]:
            raise ExtractorError(f"extracts {files[0].name}")

    extract_with(ByFile)
    with pytest.raises(ExtractorError, match=r"extracts b\.png"):
        encode(Region(str(_save(tmp_path / "b.png", np.zeros((8, 8, 3), np.uint8)))))
