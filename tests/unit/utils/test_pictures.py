"""Bytes, marks, regions and data addresses."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.query.encoders import read_upright
from f3rm_ext.utils import pictures


def test_bytes_are_rounded_and_clipped() -> None:
    image = np.array([[[-1.0, 0.5, 2.0], [np.nan, 0.0, 1.0]]])
    np.testing.assert_array_equal(pictures.to_bytes(image), [[[0, 128, 255], [0, 0, 255]]])


def test_light_is_that_of_the_standard() -> None:
    light = pictures.to_linear(np.array([0.0, 0.02, 0.04045, 0.5, 1.0]))
    np.testing.assert_allclose(light, [0.0, 0.001548, 0.0031308, 0.2140411, 1.0], atol=1e-6)
    values = np.linspace(0.0, 1.0, 101)
    np.testing.assert_allclose(pictures.to_srgb(pictures.to_linear(values)), values, atol=1e-4)


def test_marks_are_drawn_on_a_copy() -> None:
    photo = np.full((60, 80, 3), 128, np.uint8)
    ring = pictures.mark_spot(photo, 30, 40)
    assert (photo == 128).all()
    changed = np.argwhere((ring != 128).any(axis=2))
    assert np.abs(changed.mean(axis=0) - [30, 40]).max() < 1
    assert (ring[30, 40] == 128).all(), "the marked pixel itself stays visible"
    box = pictures.mark_box(photo, 10, 20, 30, 50)
    assert (box[9, 20:50] == 255).all() and (box[30, 20:50] == 255).all()
    assert (box[10:30, 20:50] == 128).all(), "the region itself is untouched"


@pytest.mark.parametrize(("suffix", "kind"), [("png", np.uint16), ("tif", np.uint16), ("tif", np.float32)])
def test_pictures_of_more_than_eight_bits_keep_their_levels(tmp_path: Path, suffix: str, kind: type) -> None:
    levels = (4 * np.indices((20, 30)).sum(axis=0)).astype(np.uint8)
    values = levels.astype(kind) * 257 if kind is np.uint16 else levels.astype(kind) / 255
    Image.fromarray(values).save(tmp_path / f"grey.{suffix}")
    np.testing.assert_array_equal(pictures.read_picture(tmp_path / f"grey.{suffix}"), levels[..., None].repeat(3, 2))
    np.testing.assert_array_equal(read_upright(tmp_path / f"grey.{suffix}"), levels[..., None].repeat(3, 2))


@pytest.mark.parametrize(
    ("row", "col", "expected"),
    [
        (50.0, 50.0, (40, 40, 60, 60)),
        (0.0, 0.0, (0, 0, 20, 20)),
        (99.5, 10.0, (80, 0, 100, 20)),
        (50.0, 500.0, (40, 180, 60, 200)),
    ],
)
def test_regions_lie_inside_the_image(row: float, col: float, expected: tuple[int, int, int, int]) -> None:
    assert pictures.region_around(row, col, 20, 100, 200) == expected


def test_data_uri_holds_the_picture() -> None:
    image = np.zeros((20, 30, 3), np.uint8)
    image[..., 0] = 200
    uri = pictures.data_uri(image)
    assert uri.startswith("data:image/jpeg;base64,")
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as back:
        assert back.size == (30, 20)
        assert np.abs(np.asarray(back).astype(int) - image).max() <= 4


def test_large_pictures_are_reduced() -> None:
    uri = pictures.data_uri(np.zeros((100, 400, 3), np.uint8), max_side_px=100)
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as back:
        assert back.size == (100, 25)
