"""Examples from photos of a capture and from any other image."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from PIL import Image

from f3rm_ext.errors import ConfigError, ExtractorError, WeightsNotFoundError
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.features.extractors import registry
from f3rm_ext.query.example_encoder import Examples
from f3rm_ext.query.exemplar import Region, exemplar
from f3rm_ext.query.run import Photos

DIM = 6
FILE, RUN = (40, 32), (20, 16)
"""Width and height of the photos on the disk, and as the run sees them."""


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

    def feature_map(self, split: str, index: int, head: str) -> FeatureMap:
        return self.map


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
def examples(photos: Any, make_head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Examples:
    monkeypatch.setattr(registry, "build_extractor", lambda text, device: Colors())
    return Examples(photos, make_head(dim=DIM), torch.device("cpu"))


def test_a_photo_by_name_is_in_pixels_of_the_file_the_run_reads(examples: Examples, photos: Any) -> None:
    found = examples.example(Region("a.png", 15.0, 3.0)).positives
    torch.testing.assert_close(found.values, exemplar(photos.map, Region("a.png", 15.0, 3.0)).values)
    assert found.sources == ("a.png:15,3",)


def test_a_file_of_the_same_name_elsewhere_is_not_meant(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path / "a.png", np.zeros((4, 4, 3), np.uint8))
    wanted = examples.example(Region("a.png", 15.0, 3.0)).positives.values
    monkeypatch.chdir(tmp_path)
    torch.testing.assert_close(examples.example(Region("a.png", 15.0, 3.0)).positives.values, wanted)


def test_the_original_of_a_smaller_copy_is_in_its_own_pixels(examples: Examples, photos: Any) -> None:
    path = str(photos.data / "images" / "a.png")
    found = examples.example(Region(path, 30.0, 6.0, 4.0, 4.0)).positives
    wanted = exemplar(photos.map, Region("a.png", 15.0, 3.0, 2.0, 2.0))
    torch.testing.assert_close(found.values, wanted.values)
    assert found.sources == (f"{path}:30,6,4,4",)


def test_photos_need_no_weights(examples: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str, device: torch.device) -> None:
        raise WeightsNotFoundError("No weights: put them there.")

    monkeypatch.setattr(registry, "build_extractor", fail)
    examples.example(Region("a.png", 1.0, 1.0))
    with pytest.raises(WeightsNotFoundError, match=r"put them there. Examples from photos of the capture go on"):
        examples.example(Region(str(_save(examples.photos.data.parent / "b.png", np.zeros((8, 8, 3), np.uint8)))))


def _save(path: Path, picture: np.ndarray, **options: Any) -> Path:
    Image.fromarray(picture).save(path, **options)
    return path


def test_another_image_is_looked_at_by_the_extractor(examples: Examples, tmp_path: Path) -> None:
    picture = np.zeros((16, 24, 3), dtype=np.uint8)
    picture[:, 12:, 2] = 250
    found = examples.example(Region(str(_save(tmp_path / "b.png", picture)), 20.0, 8.0)).positives
    torch.testing.assert_close(found.values[0], torch.tensor([0, 0, 1, 0, 0, 1]) / 2**0.5, atol=1e-3, rtol=0)


def test_transparent_images_are_on_white_and_turned_ones_upright(examples: Examples, tmp_path: Path) -> None:
    clear = _save(tmp_path / "clear.png", np.zeros((8, 8, 4), dtype=np.uint8))
    white = torch.full((DIM,), DIM**-0.5)
    torch.testing.assert_close(examples.example(Region(str(clear))).positives.values[0], white, atol=1e-3, rtol=0)
    turned = np.zeros((8, 16, 3), dtype=np.uint8)
    turned[:, :8, 0] = turned[:, 8:, 1] = 250
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise: the left half comes to the top
    path = _save(tmp_path / "turned.png", turned, exif=exif)
    top = examples.example(Region(str(path), 4.0, 2.0)).positives.values[0]
    assert top[0] > 0.7 and top[1] < 0.01
    with pytest.raises(ConfigError, match="8 x 16 pixels"):
        examples.example(Region(str(path), 12.0, 4.0))


def test_codes_of_another_image_know_what_they_leave_out(photos: Any, make_head: Callable, monkeypatch: Any) -> None:
    monkeypatch.setattr(registry, "build_extractor", lambda text, device: Colors())
    head = make_head(dim=2, basis=torch.eye(DIM)[:2])
    picture = np.zeros((8, 8, 3), dtype=np.uint8)
    picture[..., 0] = picture[..., 2] = 250
    path = _save(photos.data.parent / "b.png", picture)
    found = Examples(photos, head, torch.device("cpu")).example(Region(str(path))).positives
    # Red is the first of four equal values; codes keep that one only.
    torch.testing.assert_close(found.values, torch.tensor([[0.5, 0.0]]), atol=2e-3, rtol=0)


def test_outside_of_the_image(examples: Examples, photos: Any) -> None:
    with pytest.raises(ConfigError, match="lies outside the image, which has 20 x 16 pixels"):
        examples.example(Region("a.png", 21.0, 3.0))
    with pytest.raises(ConfigError, match="40 x 32 pixels"):
        examples.example(Region(str(photos.data / "images" / "a.png"), 30.0, 3.0, 11.0, 2.0))


def test_no_such_image(examples: Examples) -> None:
    with pytest.raises(ConfigError, match=r"There is no image 'c.png', neither among the photos .* nor as a file"):
        examples.example(Region("c.png", 1.0, 1.0))


def test_a_file_that_is_no_image(examples: Examples, tmp_path: Path) -> None:
    (tmp_path / "c.png").write_text("hello")
    with pytest.raises(ConfigError, match=r"c.png cannot be read"):
        examples.example(Region(str(tmp_path / "c.png")))


def test_another_model_than_that_of_the_features(examples: Examples, tmp_path: Path) -> None:
    examples.head.identity["weights"] = "0123"
    with pytest.raises(ConfigError, match=r"weights of toy .* are not those"):
        examples.example(Region(str(_save(tmp_path / "b.png", np.zeros((8, 8, 3), np.uint8)))))


def test_extractors_that_need_files_get_them(examples: Examples, tmp_path: Path, monkeypatch: Any) -> None:
    class ByFile(Colors):
        def extract_files(self, images: list[np.ndarray], files: list[Path]) -> list[torch.Tensor]:
            raise ExtractorError(f"asked for {files[0].name}")

    monkeypatch.setattr(registry, "build_extractor", lambda text, device: ByFile())
    with pytest.raises(ExtractorError, match=r"asked for b\.png"):
        examples.example(Region(str(_save(tmp_path / "b.png", np.zeros((8, 8, 3), np.uint8)))))
