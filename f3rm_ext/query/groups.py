"""Groups of points in space, such as Gaussians: things and their parts, found without labels. Pure maths.

Each point has a descriptor: its feature, and how much each photo sees of it. Neighbours with like descriptors become
parts, by the graph-based segmentation of Felzenszwalb and Huttenlocher (2004). Then the two adjacent parts whose mean
descriptors are nearest are joined, again and again, until none are near enough (agglomerative clustering by centroids,
within the graph of neighbours).
"""

import heapq
from collections import defaultdict

import numpy as np
import torch
from jaxtyping import Bool, Float, Float16, Float32, Int, Int32, Int64
from torch import Tensor

from f3rm_ext.features.space import MIN_NORM
from f3rm_ext.query.relevancy import OTHER
from f3rm_ext.utils.pictures import pick_evenly

GROUP_SHARE = 0.5
"""Share of the group's mean in the code of a point. With all of it small things vanish in groups of larger ones, and
nothing finds parts of a group."""
SEEN_PHOTOS = 64
"""Photos that tell which points are seen together, at most."""

_NEIGHBOURS = 10
_REACH = 4.0
"""Neighbours are apart at most this many times the typical distance between near points."""
_DIMENSIONS = 32
_SAMPLE = 4096
"""Points that scales and principal components are fitted to, at most."""
_CHUNK = 8192
_LEAST_SPREAD = 0.05
"""Unit vectors with a smaller mean squared distance are all alike, and their differences are noise."""
_SEEN = 0.5
"""Weight of being seen together, beside the feature's 1. With 0, a group is less often one thing."""
_PART = 0.3
"""k of Felzenszwalb and Huttenlocher, in typical distances of descriptors."""
_ALIKE = 0.6
"""Parts are joined up to this distance of their descriptors, as a share of the typical distance of two points."""
_LARGE = 1e-3
"""Share of all that photos see from which a part is no longer joined more readily for being small."""


class Seen:
    """How much each of up to 64 photos sees of each point."""

    def __init__(self, points: int, photos: int) -> None:
        self._columns = {photo: column for column, photo in enumerate(pick_evenly(photos, SEEN_PHOTOS))}
        self._roots = np.zeros((points, len(self._columns)), np.float16)

    def add(
        self, photo: int, weights: Float[np.ndarray, " some"], which: Int[np.ndarray, " some"] | slice = slice(None)
    ) -> None:
        """Takes how much a photo sees of some points, of all by default: their sums of compositing weights, say."""
        if photo in self._columns:
            self._roots[which, self._columns[photo]] = np.sqrt(weights)

    def group(
        self,
        points: Float[np.ndarray, "points 3"],
        features: Float[np.ndarray, "points feat"],
        solid: Bool[np.ndarray, " points"],
    ) -> Int32[np.ndarray, " points"]:
        """Groups the points, see :func:`group_points`."""
        return group_points(points, features, self._roots, solid).astype(np.int32)


def group_points(
    points: Float[np.ndarray, "points 3"],
    features: Float[np.ndarray, "points feat"],
    seen: Float[np.ndarray, "points photos"],
    solid: Bool[np.ndarray, " points"],
) -> Int64[np.ndarray, " points"]:
    """Groups points by like feature, by position and by being seen together.

    Memory is that of 32 numbers per point and as many as there are photos, whatever the dimension of the features.

    Args:
        features: of any norm; points whose feature is 0 get no group.
        seen: square root of how much each photo sees of each point: of the sum of its compositing weights, say.
        solid: points that count; others get no group.

    Returns:
        Number of each point's group, the largest group first; -1 for points without one.
    """
    groups = np.full(len(points), OTHER)
    chosen = np.flatnonzero(solid & np.isfinite(points).all(axis=1) & seen.any(axis=1) & features.any(axis=1))
    if len(chosen) < 2:
        groups[chosen] = 0
        return groups
    own = seen[chosen].astype(np.float32)
    masses = np.einsum("pv,pv->p", own, own, dtype=np.float64)
    masses /= masses.sum()
    descriptors = np.concatenate([_scale(reduce_features(features, chosen)), _scale(_unit(own), _SEEN)], axis=1)
    pairs = neighbour_pairs(points[chosen])
    apart = np.linalg.norm(descriptors[pairs[:, 0]] - descriptors[pairs[:, 1]], axis=1)
    parts = segment_graph(len(chosen), pairs, apart, _PART)
    joined = join_parts(parts, pairs, descriptors, masses)
    order = np.argsort(-np.bincount(joined, masses), kind="stable")
    groups[chosen] = np.argsort(order)[joined]
    return groups


def reduce_features(
    features: Float[np.ndarray, "points feat"], chosen: Int64[np.ndarray, " some"]
) -> Float32[np.ndarray, "some coord"]:
    """Returns some of the features, as unit vectors in at most 32 coordinates that keep their distances best."""
    sample = _unit(features[_sample(chosen)].astype(np.float32))
    _, _, axes = np.linalg.svd(sample, full_matrices=False)
    chunks = (features[chosen[first : first + _CHUNK]] for first in range(0, len(chosen), _CHUNK))
    return np.concatenate([_unit(chunk.astype(np.float32)) @ axes[:_DIMENSIONS].T for chunk in chunks])


def neighbour_pairs(points: Float[np.ndarray, "points 3"]) -> Int64[np.ndarray, "pairs 2"]:
    """Returns the pairs of neighbouring points: each with its 10 nearest, unless they are unusually far apart."""
    from scipy.spatial import KDTree

    away, near = map(np.asarray, KDTree(points).query(points, k=min(_NEIGHBOURS + 1, len(points))))
    own = np.median(away[:, 1:4], axis=1)
    reach = _REACH * np.maximum(own, np.median(own))
    first, second = np.repeat(np.arange(len(points)), near.shape[1] - 1), near[:, 1:].ravel()
    close = (away[:, 1:].ravel() <= np.minimum(reach[first], reach[second])) & (first != second)
    return np.unique(np.sort(np.stack([first, second], axis=1)[close], axis=1), axis=0)


def segment_graph(
    count: int, pairs: Int64[np.ndarray, "pairs 2"], apart: Float[np.ndarray, " pairs"], scale: float
) -> Int64[np.ndarray, " points"]:
    """Divides a graph into parts, by Felzenszwalb and Huttenlocher (2004).

    Two parts are joined by an edge that is no longer than the longest edge within each, plus ``scale`` over its size.

    Args:
        apart: length of each edge.
    """
    # The longest edge within each part plus scale over its size; a single point has no edge.
    parent, sizes, longest = list(range(count)), [1] * count, [scale] * count
    order = np.argsort(apart, kind="stable")
    for (one, two), length in zip(pairs[order].tolist(), apart[order].tolist(), strict=True):
        first, second = _root(parent, one), _root(parent, two)
        if first != second and length <= min(longest[first], longest[second]):
            parent[second] = first
            sizes[first] += sizes[second]
            longest[first] = length + scale / sizes[first]
    return _number_roots(parent)


def join_parts(
    parts: Int64[np.ndarray, " points"],
    pairs: Int64[np.ndarray, "pairs 2"],
    descriptors: Float[np.ndarray, "points coord"],
    masses: Float[np.ndarray, " points"],
) -> Int64[np.ndarray, " points"]:
    """Joins adjacent parts with like mean descriptors, the most alike first; small ones more readily than large ones.

    Args:
        masses: weight of each point; all together 1.
    """
    mass = np.bincount(parts, masses)
    means = np.stack([np.bincount(parts, masses * column) for column in descriptors.T], axis=1) / mass[:, None]
    adjacent: dict[int, set[int]] = defaultdict(set)
    for one, two in np.unique(parts[pairs], axis=0).tolist():
        if one != two:
            adjacent[one].add(two)
            adjacent[two].add(one)

    def measure(one: int, two: int) -> float:
        apart = means[one] - means[two]
        return float(apart @ apart * min(1.0, min(mass[one], mass[two]) / _LARGE)) ** 0.5

    parent, changes = list(range(len(mass))), [0] * len(mass)
    heap = [(measure(one, two), one, two, 0, 0) for one in adjacent for two in adjacent[one] if one < two]
    heapq.heapify(heap)
    while heap:
        apart, one, two, *known = heapq.heappop(heap)
        if apart > _ALIKE:
            break
        if known != [changes[one], changes[two]]:
            continue  # either has been joined with another part since
        share = mass[two] / (mass[one] + mass[two])
        means[one] += share * (means[two] - means[one])
        mass[one] += mass[two]
        # After this no entry of the heap counts that knows either part as it was.
        parent[two], changes[one], changes[two] = one, changes[one] + 1, -1
        for other in adjacent.pop(two) - {one}:
            adjacent[other].remove(two)
            adjacent[other].add(one)
            adjacent[one].add(other)
        adjacent[one].remove(two)
        for other in adjacent[one]:
            heapq.heappush(heap, (measure(one, other), one, other, changes[one], changes[other]))
    return _number_roots(parent)[parts]


@torch.no_grad()
def average_groups(codes: Float16[Tensor, "points feat"], groups: Int[Tensor, " points"]) -> None:
    """Draws the code of each point towards the mean of its group (:data:`GROUP_SHARE`), so that a query outlines
    whole things.

    Args:
        codes: changed in place; those of points without a group stay.
        groups: number of each point's group, -1 for none.
    """
    known = torch.nonzero(groups >= 0)[:, 0]
    if not len(known):
        return
    count = int(groups.max()) + 1
    sums = torch.zeros(count, codes.shape[1], device=codes.device)
    for part in known.split(_CHUNK):
        sums.index_add_(0, groups[part].long(), codes[part].float())
    means = sums / torch.bincount(groups[known], minlength=count).clamp_min(1)[:, None]
    for part in known.split(_CHUNK):
        codes[part] = codes[part].float().lerp(means[groups[part].long()], GROUP_SHARE).half()


def _root(parent: list[int], index: int) -> int:
    while parent[index] != index:
        parent[index] = parent[parent[index]]
        index = parent[index]
    return index


def _number_roots(parent: list[int]) -> Int64[np.ndarray, " nodes"]:
    return np.unique([_root(parent, index) for index in range(len(parent))], return_inverse=True)[1]


def _sample(rows: np.ndarray) -> np.ndarray:
    return rows[np.random.default_rng(0).permutation(len(rows))[:_SAMPLE]]


def _scale(rows: Float[np.ndarray, "points coord"], weight: float = 1.0) -> Float[np.ndarray, "points coord"]:
    """Scales rows so that the mean squared distance of two of them is the weight."""
    return rows * (weight / max(2.0 * float(rows.var(axis=0).sum()), _LEAST_SPREAD)) ** 0.5


def _unit(rows: Float[np.ndarray, "points coord"]) -> Float[np.ndarray, "points coord"]:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), MIN_NORM)
