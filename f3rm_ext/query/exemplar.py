"""Queries by example: the feature of a place in a photo, the rest of the photo, and good places to choose.

They work with every extractor, whether or not it understands text.
"""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32

from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.features.sampling import PackedMaps
from f3rm_ext.query.embeddings import Embeddings
from f3rm_ext.query.options import Region

MAX_CLUSTERS = 12
"""Into how many clusters the patches of a photo are sorted, at most."""
_KMEANS_SEED = 0
_KMEANS_ROUNDS = 20
_COMPARED_PHOTOS = 12
"""With how many photos a distinctive patch is compared, at most."""
_MIN_LENGTH = 1e-8


def embed_region(feature_map: FeatureMap, region: Region) -> Embeddings:
    """Returns the feature of a region: interpolated at a point, or the mean direction of a box or the whole image.

    The region is in pixels of the image that the map was made from. Raises ConfigError if the feature is zero.
    """
    packed = PackedMaps.pack([append_residual(feature_map)])
    places = torch.from_numpy(_sample_places(feature_map.grid, region))
    sampled = packed.sample(torch.zeros(len(places), dtype=torch.long), places)
    unit = sampled / sampled.norm(dim=-1, keepdim=True).clamp_min(_MIN_LENGTH)
    mean = unit.mean(dim=0, keepdim=True)
    return _embeddings(feature_map, mean, (str(region),))


def background_clusters(feature_map: FeatureMap, region: Region) -> Embeddings:
    """Returns the directions of what else a photo shows: cluster centres of its patches by k-means.

    A box is compared with the patches outside it, and a point with all clusters but its own. The mean over all photos
    would be a weak negative: it resembles nothing in particular, so nearly every pixel would score above ½.

    Returns:
        At most :data:`MAX_CLUSTERS` directions; none where the region is the whole photo or the photo shows nothing
        else.
    """
    values = append_residual(feature_map).values
    patches = values.reshape(-1, values.shape[-1]).astype(np.float32)
    lengths = np.linalg.norm(patches, axis=1)
    has_direction = lengths > _MIN_LENGTH
    unit = patches / np.where(has_direction, lengths, 1.0)[:, None]
    outside = has_direction & ~select_patches(feature_map.grid, region)
    if outside.sum() < 2:
        return Embeddings.empty(feature_map.values.shape[-1])
    centres = _cluster_centres(unit[outside])
    if region.is_point:
        own = (centres @ unit[_nearest_patch(feature_map, region)]).argmax()
        centres = np.delete(centres, own, axis=0)
    sources = tuple(f"rest of {region.image}, cluster {i + 1}" for i in range(len(centres)))
    return _embeddings(feature_map, torch.from_numpy(centres), sources)


def _embeddings(feature_map: FeatureMap, vectors: torch.Tensor, sources: tuple[str, ...]) -> Embeddings:
    """Embeddings of vectors of :func:`append_residual`."""
    if feature_map.residual_norm is None:
        return Embeddings.from_codes(vectors, sources)
    return Embeddings.from_codes(vectors[:, :-1], sources, vectors[:, -1])


def append_residual(feature_map: FeatureMap) -> FeatureMap:
    """Returns the map with the norm of what codes leave out as a last channel, where there is such a norm."""
    if feature_map.residual_norm is None:
        return feature_map
    values = np.concatenate([feature_map.values, feature_map.residual_norm[..., None]], axis=-1)
    return FeatureMap(values=values, grid=feature_map.grid)


def select_patches(grid: PatchGrid, region: Region) -> Bool[np.ndarray, " points"]:
    """Says which patches have their centre in a box or in the whole image; none for a point."""
    centres = grid.centres_px().reshape(-1, 2)
    if region.x_px is None or region.y_px is None:
        return np.ones(len(centres), dtype=bool)
    low = np.asarray([region.y_px, region.x_px])
    high = low + (region.height_px or 0.0, region.width_px or 0.0)
    inside = ((centres >= low) & (centres <= high)).all(axis=1)
    return inside if region.width_px is not None else np.zeros_like(inside)


def deepest_pixel(mask: Bool[np.ndarray, "h w"]) -> tuple[int, int]:
    """Returns row and column of the pixel farthest from the edge of a mask and from the border of the image.

    >>> mask = np.zeros((20, 30), dtype=bool)
    >>> mask[5:12, 10:17] = True
    >>> deepest_pixel(mask)
    (8, 13)
    """
    from scipy.ndimage import distance_transform_edt

    depth = np.asarray(distance_transform_edt(np.pad(mask, 1)))[1:-1, 1:-1]
    row, col = np.unravel_index(int(depth.argmax()), depth.shape)
    return int(row), int(col)


def sharpness(image: np.ndarray) -> float:
    """Returns the variance of the Laplacian of an image's lightness: high for sharp photos, low for blurred ones."""
    from scipy.ndimage import laplace

    return float(laplace(np.asarray(image, dtype=np.float32).mean(axis=2)).var())


def distinctive_patch(feature_map: FeatureMap, others: Sequence[FeatureMap]) -> tuple[float, float]:
    """Chooses where in a photo to take an exemplar from, (y, x) in pixels.

    The patch lies in the middle half of the photo, appears in the other photos too, and is unlike most of what they
    show: it maximises the mean over photos of its best cosine, less its mean cosine with all patches. Without other
    photos of the scene it is compared with its own.
    """
    grid = feature_map.grid
    rows, cols = (slice(count // 4, max(count // 4 + 1, count - count // 4)) for count in (grid.rows, grid.cols))
    candidates = _unit_patches(feature_map.values[rows, cols])
    shape = feature_map.values[rows, cols].shape[:2]
    best, mean = np.zeros(len(candidates)), np.zeros(len(candidates))
    compared = list(others)[:: max(1, len(others) // _COMPARED_PHOTOS)][:_COMPARED_PHOTOS] or [feature_map]
    for other in compared:
        cosines = candidates @ _unit_patches(other.values).T
        best += cosines.max(axis=1)
        mean += cosines.mean(axis=1)
    row, col = np.unravel_index(int((best - mean).argmax()), shape)
    y_px, x_px = grid.centres_px()[rows, cols][row, col]
    return float(y_px), float(x_px)


def _sample_places(grid: PatchGrid, region: Region) -> Float32[np.ndarray, "points 2"]:
    """Where a region is sampled (y, x): its point, or the patch centres in its box, or its middle if there are none."""
    inside = select_patches(grid, region)
    if inside.any():
        return grid.centres_px().reshape(-1, 2)[inside]
    left, top, right, bottom = region.box_px(0, 0)
    return np.asarray([[(top + bottom) / 2, (left + right) / 2]], dtype=np.float32)


def _nearest_patch(feature_map: FeatureMap, region: Region) -> int:
    centres = feature_map.grid.centres_px().reshape(-1, 2)
    return int(np.square(centres - (region.y_px, region.x_px)).sum(axis=1).argmin())


def _cluster_centres(unit: Float32[np.ndarray, "points feat"]) -> Float32[np.ndarray, "clusters feat"]:
    """Mean directions of the clusters."""
    from scipy.cluster.vq import kmeans2  # slow to import

    count = min(MAX_CLUSTERS, len(np.unique(unit, axis=0)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "One of the clusters is empty", UserWarning)
        means, cluster_of = kmeans2(unit, count, iter=_KMEANS_ROUNDS, minit="++", rng=_KMEANS_SEED)
    means = means[np.unique(cluster_of)]
    return means / np.linalg.norm(means, axis=1, keepdims=True).clip(_MIN_LENGTH)


def _unit_patches(values: np.ndarray) -> Float[np.ndarray, "patches feat"]:
    flat = values.reshape(-1, values.shape[-1]).astype(np.float32)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), _MIN_LENGTH)
