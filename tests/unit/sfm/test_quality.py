"""Blurred photos and photos that show the same are named, and no others."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from f3rm_ext.sfm.quality import find_blurred, find_duplicates, make_fingerprint, measure_blur


@pytest.fixture(scope="module")
def scene() -> np.ndarray:
    """A textured picture, larger than what photos show of it."""
    rng = np.random.default_rng(0)
    levels = np.sum([gaussian_filter(rng.normal(size=(300, 420)), sigma) * sigma for sigma in (1.0, 3.0, 9.0)], axis=0)
    return (levels - levels.min()) / np.ptp(levels)


def test_blur_grows_with_blur_whatever_the_picture_shows(scene: np.ndarray) -> None:
    values = [measure_blur(gaussian_filter(scene, sigma)) for sigma in (0, 1, 2, 4)]
    assert values == sorted(values) and values[-1] - values[0] > 0.2
    assert measure_blur(np.full((50, 50), 0.5)) >= 0.5
    photos = {f"{i}": scene[i * 5 : 200 + i * 5, i * 8 : 300 + i * 8] for i in range(8)}
    photos["soft"] = gaussian_filter(photos["3"], 4)
    assert find_blurred({name: measure_blur(photo) for name, photo in photos.items()}) == ["soft"]


def test_the_same_picture_is_named_with_its_first_and_a_moved_one_is_not(scene: np.ndarray) -> None:
    rng = np.random.default_rng(1)
    first = scene[20:220, 20:320]
    photos = {
        "first": first,
        "moved": scene[20:220, 26:326],
        "again": np.clip(first + rng.normal(scale=0.01, size=first.shape), 0, 1),
        "third": first,
    }
    found = find_duplicates({name: make_fingerprint(photo) for name, photo in photos.items()})
    assert found == {"again": "first", "third": "first"}
