"""Colour maps, overlays, marks and data addresses."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from f3rm_ext.utils import pictures


def test_bytes_are_rounded_and_clipped() -> None:
    image = np.array([[[-1.0, 0.5, 2.0], [np.nan, 0.0, 1.0]]])
    np.testing.assert_array_equal(pictures.to_bytes(image), [[[0, 128, 255], [0, 0, 255]]])


def test_color_map_spans_its_range() -> None:
    from matplotlib import colormaps

    values = np.array([[-5.0, 0.0, 1.0, 9.0, np.nan]])
    colors = pictures.color_map(values, 0.0, 1.0, "inferno")
    first, last = (np.rint(np.array(colormaps["inferno"](end)[:3]) * 255) for end in (0.0, 1.0))
    np.testing.assert_array_equal(colors[0, [0, 1, 4]], [first] * 3)
    np.testing.assert_array_equal(colors[0, [2, 3]], [last] * 2)


def test_color_map_of_an_empty_range_does_not_divide_by_zero() -> None:
    assert pictures.color_map(np.ones((2, 2)), 1.0, 1.0, "turbo").shape == (2, 2, 3)


def test_overlay_is_brightest_where_the_score_is_highest() -> None:
    photo = np.full((4, 6, 3), 90, np.uint8)
    score = np.zeros((4, 6))
    score[1, 2] = 1.0
    brightness = pictures.heat_overlay(photo, score, 0.0, 1.0).astype(int).sum(axis=2)
    assert np.unravel_index(brightness.argmax(), brightness.shape) == (1, 2)
    assert (np.abs(brightness - brightness[0, 0]) <= 3).sum() == 23


def test_overlay_keeps_the_photo_recognisable_where_nothing_is_found() -> None:
    photo = np.zeros((2, 2, 3), np.uint8)
    photo[:, 1] = 250
    overlay = pictures.heat_overlay(photo, np.zeros((2, 2)), 0.0, 1.0).astype(int)
    assert (overlay[:, 1] - overlay[:, 0] > 60).all()


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


def test_a_region_is_no_larger_than_the_image() -> None:
    assert pictures.region_around(3.0, 3.0, 50, 8, 30) == (0, 0, 8, 8)


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


def test_color_stops_are_hexadecimal() -> None:
    stops = pictures.color_stops("inferno", 3)
    assert stops[0] == "#000004" and len(stops) == 3 and all(len(stop) == 7 for stop in stops)
