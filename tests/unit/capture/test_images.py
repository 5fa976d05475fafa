"""Checks of image files."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.capture.images import image_size, image_sizes, tell_apart
from f3rm_ext.errors import CaptureError

NOISE = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)


@pytest.fixture(params=["png", "jpg", "webp", "bmp"])
def path(request, tmp_path: Path) -> Path:
    path = tmp_path / f"a.{request.param}"
    Image.fromarray(NOISE).save(path)
    return path


def test_sizes(path: Path):
    assert image_size(path) == (60, 40)
    assert image_sizes([path, path]) == [(60, 40)] * 2


def test_files_cut_short(path: Path):
    data = path.read_bytes()
    for part in (0.97, 0.5, 0.1, 0.0):
        path.write_bytes(data[: int(part * len(data))])
        with pytest.raises(CaptureError, match=path.name):
            image_size(path)


def test_a_complete_file_is_not_decoded(tmp_path: Path, watch_calls):
    paths = [tmp_path / "a.png", tmp_path / "a.jpg"]
    for path in paths:
        Image.fromarray(NOISE).save(path)
    decoded = watch_calls(Image.Image, "load")
    assert image_sizes(paths) == [(60, 40)] * 2 and not decoded


def test_a_jpeg_with_more_behind_it_is_decoded_to_be_sure(tmp_path: Path):
    path = tmp_path / "motion.jpg"
    Image.fromarray(NOISE).save(path)
    path.write_bytes(path.read_bytes() + bytes(200_000))
    assert image_size(path) == (60, 40)


def test_other_files(tmp_path: Path):
    path = tmp_path / "a.png"
    path.write_text("not an image")
    with pytest.raises(CaptureError, match="not an image"):
        image_size(path)
    with pytest.raises(CaptureError, match="is not there"):
        image_size(tmp_path / "b.png")


@pytest.mark.parametrize("mode", ["P", "LA", "CMYK", "1", "I;16"])
def test_modes_that_nerfstudio_would_misread(tmp_path: Path, mode: str):
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    image = Image.new("I;16", (4, 4)) if mode == "I;16" else Image.fromarray(NOISE).convert(mode)
    image.save(path)
    with pytest.raises(CaptureError, match=f"colour mode {mode}"):
        image_size(path)
    image_size(path, mask=True)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_usable_modes(tmp_path: Path, mode: str):
    Image.fromarray(NOISE).convert(mode).save(tmp_path / "a.png")
    image_size(tmp_path / "a.png")


def test_photos_of_one_name_are_told_apart():
    files = ["/a/left/1.png", "/a/right/1.png", "/a/2.png", "/a/2.png", "/b/left/1.png", "3.png"]
    names = ["a/left/1.png", "right/1.png", "2.png", "2.png", "b/left/1.png", "3.png"]
    assert tell_apart([Path(file) for file in files]) == tell_apart(files) == names
    assert tell_apart([]) == []
