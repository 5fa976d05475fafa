"""What an example is told from: the other things in its own photo."""

import warnings

import numpy as np
import torch
from jaxtyping import Float32
from scipy.cluster.vq import kmeans2

from f3rm_ext.features.base import FeatureMap
from f3rm_ext.query.embeddings import Embeddings
from f3rm_ext.query.exemplar import Region, patches_in, with_residual

KINDS = 12
"""How many kinds of thing a photo is taken to show."""
_SEED = 0
_ROUNDS = 20


def background_clusters(feature_map: FeatureMap, region: Region) -> Embeddings:
    """Directions of what else a photo shows: its patches, sorted into a few kinds by k-means.

    A box is told from what lies outside of it; a point from all kinds but the one it belongs to. One mean over all
    photos, in contrast, is like nothing in particular, and nearly everything is less like it than like the example.

    Args:
        feature_map: of the photo, in the distilled space.
        region: in pixels of the image the map was made from, inside of it.

    Returns:
        At most :data:`KINDS` directions; none where the region is all of the photo, or the photo shows nothing else.
    """
    values = with_residual(feature_map).values
    patches = values.reshape(-1, values.shape[-1]).astype(np.float32)
    lengths = np.linalg.norm(patches, axis=1)
    usable = lengths > 1e-8
    unit = patches / np.where(usable, lengths, 1.0)[:, None]
    own = patches_in(feature_map.grid, region)
    told_apart = usable & ~own
    if told_apart.sum() < 2:
        return Embeddings.empty(feature_map.values.shape[-1])
    kinds = _kinds(unit[told_apart])
    if region.is_point:
        kinds = np.delete(kinds, (kinds @ unit[_nearest_patch(feature_map, region)]).argmax(), axis=0)
    return _vectors(kinds, region, codes=feature_map.residual_norm is not None)


def _nearest_patch(feature_map: FeatureMap, region: Region) -> int:
    centres = feature_map.grid.centres_px().reshape(-1, 2)
    return int(np.square(centres - (region.y_px, region.x_px)).sum(axis=1).argmin())


def _kinds(unit: Float32[np.ndarray, "points feat"]) -> Float32[np.ndarray, "kinds feat"]:
    """Mean directions of the kinds."""
    count = min(KINDS, len(np.unique(unit, axis=0)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "One of the clusters is empty", UserWarning)
        means, kind_of = kmeans2(unit, count, iter=_ROUNDS, minit="++", rng=_SEED)
    means = means[np.unique(kind_of)]
    return means / np.linalg.norm(means, axis=1, keepdims=True).clip(1e-8)


def _vectors(kinds: Float32[np.ndarray, "kinds feat"], region: Region, codes: bool) -> Embeddings:
    sources = tuple(f"{region.image} without it, kind {i + 1}" for i in range(len(kinds)))
    values = torch.from_numpy(kinds)
    if codes:
        return Embeddings.of_codes(values[:, :-1], sources, values[:, -1])
    return Embeddings.of_codes(values, sources)
