"""Photos that hurt: blurred ones, and ones that show the same as another."""

import itertools
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from PIL import Image

FINGERPRINT_PX = 16
BLUR_LIMIT, BLUR_EXCESS = 0.5, 0.12
"""A photo counts as blurred if its blur is above the first, and above the median of all photos by the second."""
SAME_LEVELS = 0.6
"""Two photos count as the same if their fingerprints differ by less than this on average, in levels of 255."""


def blur_of(grey: Float[np.ndarray, "h w"]) -> float:
    """Returns how blurred a picture is, from 0 (sharp) to 1: the blur effect of Crete et al. (2007).

    It compares the differences between neighbouring pixels with those of a copy that is blurred once more, so it
    depends little on what the picture shows.

    Args:
        grey: levels from 0 to 1.
    """
    from skimage.measure import blur_effect

    return float(np.nan_to_num(blur_effect(grey), nan=1.0))


def fingerprint_of(grey: Float[np.ndarray, "h w"]) -> bytes:
    """Returns a tiny copy of a picture, by which equal ones are found."""
    picture = Image.fromarray(np.rint(grey * 255).astype(np.uint8))
    return picture.resize((FINGERPRINT_PX, FINGERPRINT_PX), Image.Resampling.BOX).tobytes()


def blurred(blur: Mapping[str, float]) -> list[str]:
    """Returns the names of blurred photos.

    >>> blurred({"a": 0.30, "b": 0.32, "c": 0.7})
    ['c']
    """
    if not blur:
        return []
    limit = max(BLUR_LIMIT, float(np.median(list(blur.values()))) + BLUR_EXCESS)
    return [name for name, value in blur.items() if value > limit]


def duplicates(fingerprints: Mapping[str, bytes]) -> dict[str, str]:
    """Returns for each photo that shows the same as an earlier one the name of that one.

    >>> duplicates({"a": bytes(4), "b": bytes([9, 9, 9, 9]), "c": bytes(4)})
    {'c': 'a'}
    """
    names = list(fingerprints)
    rows = [np.frombuffer(fingerprints[name], np.uint8).astype(np.int16) for name in names]
    found: dict[str, str] = {}
    for (i, first), (j, second) in itertools.combinations(enumerate(rows), 2):
        if names[j] not in found and names[i] not in found and np.abs(first - second).mean() < SAME_LEVELS:
            found[names[j]] = names[i]
    return found
