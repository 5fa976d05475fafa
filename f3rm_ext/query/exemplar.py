"""Queries by example: the feature of a place in a photo, the rest of the photo, and good places to choose.

They work with every extractor, whether or not it understands text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float32

from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.features.sampling import PackedMaps
from f3rm_ext.features.space import MIN_NORM
from f3rm_ext.query.embeddings import Embeddings
from f3rm_ext.query.options import Region

SCENE = 64
"""Clusters of the patches of a scene, at most."""
REST = 64
"""Clusters of the rest of an example's photo, at most."""
_PARTS = 4
"""Clusters of the thing that an example shows."""
_LIKENESS = 0.4
"""How near a cluster of the scene has to be to an example to count as like it, as a share of the median distance."""
_CLUSTERED = 2000
"""Patches that are sorted into clusters, at most."""
_KMEANS_SEED = 0
_KMEANS_ROUNDS = 10
_COMPARED_PHOTOS = 12
"""With how many photos a distinctive patch is compared, at most."""
_SAME = 1e-5
"""Directions count as the same up to this difference of their cosine from 1."""


def _region_direction(feature_map: FeatureMap, region: Region) -> Float32[np.ndarray, " feat"]:
    """The mean direction of a region, norm 1; 0 where the region has none."""
    packed = PackedMaps.pack([feature_map])
    places = torch.from_numpy(_sample_places(feature_map.grid, region))
    sampled = packed.sample(torch.zeros(len(places), dtype=torch.long), places)
    mean = (sampled / sampled.norm(dim=-1, keepdim=True).clamp_min(MIN_NORM)).mean(dim=0)
    return (mean / mean.norm().clamp_min(MIN_NORM)).numpy()


@dataclass(frozen=True)
class Example:
    """A place in an image, ready for a query."""

    positives: Embeddings
    """The feature there, and those of the rest of what lies there."""
    negatives: Embeddings
    """What else the scene and the image show; empty where they show nothing else."""


def take_example(
    feature_map: FeatureMap, region: Region, scene: Float32[np.ndarray, "clusters feat"] | None = None
) -> Example:
    """Finds the thing at a place, and what to tell it from.

    The thing of a point is the connected part of the image around it that is more like the point than like anything
    else in the scene; that of a box is what is so in the box. Its clusters are positives. Negatives are the clusters of
    the rest of the image, and those of the scene that are unlike the place: cos ≤ 1 − 0.4 (1 − m), where m is the
    median cosine of all of them, so that it depends neither on the feature nor on the scene. What is as like the place
    as nine tenths of the thing are is no negative: it may be another such thing, or the same one beyond what hides it.

    Args:
        scene: directions that the scene shows, from :func:`scene_clusters`; by default those of the image.

    Raises:
        ConfigError: the feature of the region is zero.
    """
    packed = append_residual(feature_map)
    place = _region_direction(packed, region)
    start = _embeddings(feature_map, torch.from_numpy(place[None]), (str(region),))
    unit = _unit_patches(packed.values)
    solid = np.linalg.norm(unit, axis=1) > 0.5
    scene = scene_clusters([feature_map]) if scene is None else scene
    unlike = _unlike(scene, place)
    if region.x_px is None:
        return Example(start, _embeddings(feature_map, unlike, _number("scene", unlike)))
    wins = solid & (unit @ place > (unit @ unlike.T).max(axis=1, initial=-1.0))
    thing = _grow(wins, feature_map.grid, region)
    if not region.is_point and not thing.any():
        thing = solid & select_patches(feature_map.grid, region)
    likeness = unit @ place
    same = wins & (likeness >= np.quantile(likeness[thing], 0.1) - _SAME) if thing.any() else thing
    parts, rest = (
        cluster_centres(unit[which], count) for which, count in ((thing, _PARTS), (solid & ~thing & ~same, REST))
    )
    negatives = np.concatenate([unlike, rest])
    sources = (*_number("scene", unlike), *_number(f"rest of {region.image}", rest))
    positives = Embeddings.join([start, _embeddings(feature_map, parts, _number(str(region), parts, "part"))])
    return Example(positives, _embeddings(feature_map, negatives, sources))


def join_examples(examples: Sequence[Example]) -> Example:
    """Joins examples of the same thing; a negative of one that is rather like another example is left out."""
    negatives = []
    for example in examples:
        own, kept = example.negatives, torch.ones(len(example.negatives), dtype=torch.bool)
        for other in examples:
            if other is not example and len(other.negatives):
                like, unlike = (own.values @ part.values.T for part in (other.positives, other.negatives))
                kept &= like.amax(dim=1) <= unlike.amax(dim=1)
        sources = tuple(source for source, keep in zip(own.sources, kept.tolist(), strict=True) if keep)
        negatives.append(Embeddings(own.values[kept], sources))
    return Example(Embeddings.join([example.positives for example in examples]), Embeddings.join(negatives))


def scene_clusters(maps: Sequence[FeatureMap]) -> Float32[np.ndarray, "clusters feat"]:
    """Returns the directions that photos show, at most 64: cluster centres of their patches by k-means.

    Residuals of codes are the last channel.
    """
    chances, parts = np.random.default_rng(_KMEANS_SEED), []
    for feature_map in maps:
        values = append_residual(feature_map).values
        solid = np.flatnonzero(np.linalg.norm(values.astype(np.float32), axis=-1) > MIN_NORM)
        chosen = chances.permutation(solid)[:_CLUSTERED]
        parts.append(_unit_patches(values.reshape(-1, values.shape[-1])[chosen]))
    return cluster_centres(np.concatenate(parts), SCENE)


def _unlike(scene: Float32[np.ndarray, "clusters feat"], place: Float32[np.ndarray, " feat"]) -> np.ndarray:
    """The clusters of a scene that a place does not belong to."""
    if not len(scene):
        return scene
    cosines = scene @ place
    return scene[1.0 - cosines >= max(_SAME, _LIKENESS * (1.0 - float(np.median(cosines))))]


def _grow(wins: Bool[np.ndarray, " points"], grid: PatchGrid, region: Region) -> Bool[np.ndarray, " points"]:
    """The patches of a thing: those around a point that are connected with it, or those in a box."""
    from scipy.ndimage import label

    if not region.is_point:
        return wins & select_patches(grid, region)
    own = np.square(grid.centres_px().reshape(-1, 2) - (region.y_px, region.x_px)).sum(axis=1).argmin()
    labelled: Any = label(wins.reshape(grid.rows, grid.cols))
    parts = labelled[0].reshape(-1)
    return parts == parts[own] if wins[own] else np.arange(len(wins)) == own


def _number(what: str, vectors: np.ndarray, kind: str = "cluster") -> tuple[str, ...]:
    return tuple(f"{what}, {kind} {i + 1}" for i in range(len(vectors)))


def _embeddings(feature_map: FeatureMap, vectors: torch.Tensor | np.ndarray, sources: tuple[str, ...]) -> Embeddings:
    """Embeddings of vectors of :func:`append_residual`."""
    vectors = torch.as_tensor(vectors)
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
    x_px, y_px = region.middle_px(0, 0)
    return np.asarray([[y_px, x_px]], dtype=np.float32)


def cluster_centres(unit: Float32[np.ndarray, "points feat"], count: int) -> Float32[np.ndarray, "clusters feat"]:
    """Mean directions of at most so many clusters; none of no points.

    Spherical k-means (Dhillon and Modha 2001), begun as k-means++ (Arthur and Vassilvitskii 2007).
    """
    from scipy.sparse import csr_matrix

    chances = np.random.default_rng(_KMEANS_SEED)
    if len(unit) > _CLUSTERED:
        unit = unit[chances.choice(len(unit), _CLUSTERED, replace=False)]
    centres, away = unit[:1], 1.0 - unit @ unit[0] if len(unit) else np.zeros(0)
    while len(centres) < count and away.max(initial=0.0) > _SAME:
        # Copies of a centre have no chance: by rounding alone they are a little away from it.
        far = np.where(away > _SAME, away, 0.0).astype(np.float64)
        centre = unit[chances.choice(len(unit), p=far / far.sum())]
        centres, away = np.concatenate([centres, centre[None]]), np.minimum(away, 1.0 - unit @ centre)
    ones, ends, before = np.ones(len(unit), dtype=np.float32), np.arange(len(unit) + 1), np.zeros(0)
    for _ in range(_KMEANS_ROUNDS if len(centres) else 0):
        own = (unit @ centres.T).argmax(axis=1)
        if np.array_equal(own, before):  # further rounds would change nothing
            break
        before = own
        sums = csr_matrix((ones, own, ends), shape=(len(unit), len(centres))).T @ unit
        lengths = np.linalg.norm(sums, axis=1)
        centres = sums[lengths > MIN_NORM] / lengths[lengths > MIN_NORM, None]
    return centres


def _unit_patches(values: np.ndarray) -> Float32[np.ndarray, "patches feat"]:
    flat = values.reshape(-1, values.shape[-1]).astype(np.float32)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), MIN_NORM)
