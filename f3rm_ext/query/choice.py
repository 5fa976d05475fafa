"""Choosing what to ask for: a pixel inside an object's mask, or the most telling patch of a photo."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from f3rm_ext.features.base import FeatureMap

_OTHERS = 12
"""Photos a patch is compared with."""


def deepest_pixel(mask: Bool[np.ndarray, "h w"]) -> tuple[int, int]:
    """Row and column of the pixel farthest from the edge of a mask that is not empty; borders of the image count."""
    from scipy.ndimage import distance_transform_edt

    depth = np.asarray(distance_transform_edt(np.pad(mask, 1)))[1:-1, 1:-1]
    row, col = np.unravel_index(int(depth.argmax()), depth.shape)
    return int(row), int(col)


def sharpness(image: np.ndarray) -> float:
    """Variance of the Laplacian of an image's lightness: high for sharp, low for blurred photos."""
    from scipy.ndimage import laplace

    return float(laplace(np.asarray(image, dtype=np.float32).mean(axis=2)).var())


def telling_patch(feature_map: FeatureMap, others: Sequence[FeatureMap]) -> tuple[float, float]:
    """Where in a photo to take an exemplar from when nobody says.

    The patch is in the middle half of the photo, is found again in the other photos, and is unlike most of what they
    show: the mean over photos of its best cosine, less its mean cosine with everything, is greatest.

    Args:
        feature_map: of the photo.
        others: of other photos of the same scene; the photo itself where there is no other.

    Returns:
        Position (y, x) in pixels of the photo.
    """
    grid = feature_map.grid
    rows, cols = (slice(count // 4, max(count // 4 + 1, count - count // 4)) for count in (grid.rows, grid.cols))
    candidates = _unit(feature_map.values[rows, cols])
    shape = feature_map.values[rows, cols].shape[:2]
    again, common = np.zeros(len(candidates)), np.zeros(len(candidates))
    chosen = list(others)[:: max(1, len(others) // _OTHERS)][:_OTHERS] or [feature_map]
    for other in chosen:
        cosines = candidates @ _unit(other.values).T
        again += cosines.max(axis=1)
        common += cosines.mean(axis=1)
    row, col = np.unravel_index(int((again - common).argmax()), shape)
    y_px, x_px = grid.centres_px()[rows, cols][row, col]
    return float(y_px), float(x_px)


def _unit(values: np.ndarray) -> Float[np.ndarray, "patches feat"]:
    flat = values.reshape(-1, values.shape[-1]).astype(np.float32)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-8)
