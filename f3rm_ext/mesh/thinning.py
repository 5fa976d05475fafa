"""Removes points that are too close to others, as DTU's evaluation does."""

from typing import no_type_check

import numpy as np
from jaxtyping import Bool, Int
from numba import njit
from scipy.spatial import KDTree

from f3rm_ext.mesh.mesh_files import SurfacePoints

_SLAB = 1 << 20


def thinned(points: SurfacePoints, spacing: float, seed: int = 0) -> SurfacePoints:
    """Removes points until none is nearer than the spacing to another: in random order, each keeps its neighbours out.

    Works on slabs along the longest axis, so that memory holds the pairs of one slab only.
    """
    order = np.random.default_rng(seed).permutation(len(points))
    axis = int(np.ptp(points.positions, axis=0).argmax()) if len(points) else 0
    slabs = max(1, len(points) // _SLAB)
    slab_of = np.argsort(np.argsort(points.positions[order, axis], kind="stable")) * slabs // max(1, len(points))
    kept: list[np.ndarray] = []
    for slab in range(slabs):
        mine = order[slab_of == slab]
        places = points.positions[mine]
        if kept:
            before = KDTree(points.positions[kept[-1]])
            mine = mine[before.query(places, distance_upper_bound=spacing)[0] > spacing]
            places = points.positions[mine]
        pairs = KDTree(places).query_pairs(spacing, output_type="ndarray") if len(places) else np.zeros((0, 2), int)
        kept.append(mine[_independent(len(mine), pairs)])
    return points.take(np.sort(np.concatenate(kept)))


def _independent(count: int, pairs: Int[np.ndarray, "pairs 2"]) -> Bool[np.ndarray, " count"]:
    """Returns which places stay when each, in order, keeps out those it is paired with."""
    later = np.sort(pairs, axis=1)
    later = later[np.argsort(later[:, 0], kind="stable")]
    return _keep(np.searchsorted(later[:, 0], np.arange(count + 1)), later[:, 1].copy())


@no_type_check
@njit(cache=True)
def _keep(starts, ends):
    keep = np.ones(len(starts) - 1, np.bool_)
    for place in range(len(keep)):
        if keep[place]:
            for index in range(starts[place], starts[place + 1]):
                keep[ends[index]] = False
    return keep
