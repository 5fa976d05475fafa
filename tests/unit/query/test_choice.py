"""Where exemplars are taken from when nobody says."""

import numpy as np

from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.query.choice import deepest_pixel, sharpness, telling_patch


def test_deepest_pixel_is_the_middle_of_a_block() -> None:
    mask = np.zeros((20, 30), bool)
    mask[5:12, 10:17] = True
    assert deepest_pixel(mask) == (8, 13)


def test_deepest_pixel_keeps_away_from_the_border_of_the_image() -> None:
    row, col = deepest_pixel(np.ones((11, 31), bool))
    assert row == 5 and 5 <= col <= 25


def test_deepest_pixel_of_a_ring_lies_on_it() -> None:
    y, x = np.mgrid[:40, :40] - 20
    ring = np.abs(np.hypot(y, x) - 12) < 4
    assert ring[deepest_pixel(ring)]


def test_sharp_images_are_sharper() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (20, 20, 3), dtype=np.uint8)
    assert sharpness(noise) > sharpness(noise // 4) > sharpness(np.full((20, 20, 3), 9, np.uint8)) == 0


def feature_map(values: np.ndarray) -> FeatureMap:
    return FeatureMap(values.astype(np.float16), PatchGrid.covering(values.shape[0], values.shape[1], 80, 80))


def test_telling_patch_is_found_again_and_unlike_the_rest() -> None:
    plain, rare, lonely = np.eye(3)
    here = np.tile(plain, (8, 8, 1))
    here[3, 4], here[4, 3], here[0, 0] = rare, lonely, rare
    other = np.tile(plain, (8, 8, 1))
    other[6, 6] = rare
    # `lonely` is nowhere else, and the `rare` patch in the corner is not in the middle of the photo.
    assert telling_patch(feature_map(here), [feature_map(other)] * 3) == (35.0, 45.0)


def test_telling_patch_of_a_single_photo_and_of_a_tiny_one() -> None:
    here = np.random.default_rng(1).normal(size=(1, 1, 4))
    assert telling_patch(feature_map(here), []) == (40.0, 40.0)
