"""Sums of the features of patches over the pixels that each Gaussian covers; on the CPU, not differentiable.

With features that are interpolated between patches, Σ_p wᵢ(p) f(p) = Σ_q (Σ_p wᵢ(p) b_q(p)) f_q with the share b_q(p)
of a patch q in a pixel p. A Gaussian covers parts of few patches, so the sum over pixels is one of a few numbers,
whatever the dimension of the features.
"""

from typing import no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.features.base import PatchGrid
from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize.camera import TILE_PX, Camera
from f3rm_ext.splat.rasterize.compositing import FLAGS, add_rows, spread
from f3rm_ext.splat.rasterize.cpu import split_tiles
from f3rm_ext.splat.rasterize.projection import project
from f3rm_ext.splat.rasterize.tiles import as_array, bin_gaussians


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _add_patches(rows, first, slots, slot_starts, order, corners, wide, patches, result):
    """Adds the features of patches to those of Gaussians, with what :func:`spread` adds up.

    Args:
        corners: of each intersection, starting at ``first``: the row and column of the first patch of its tile.
        wide: columns of patches of a tile.
        patches: features, (patch rows, patch columns, feat).
        result: (gaussians, feat).
    """
    for rank in numba.prange(order.size):
        total = result[order[rank]]
        for slot in range(slot_starts[rank], slot_starts[rank + 1]):
            place = slots[slot] - first
            if not 0 <= place < rows.shape[0]:
                continue
            for q in range(rows.shape[1]):
                weight = rows[place, q]
                if weight != 0:
                    values = patches[corners[place, 0] + q // wide, corners[place, 1] + q % wide]
                    for i in range(total.size):
                        total[i] += weight * values[i]


def _interpolation(size: int, patches: int, origin_px: float, stride_px: float) -> tuple[np.ndarray, np.ndarray]:
    """The first patch of each tile along an axis, and the weights at each pixel of the patches from there on."""
    position = ((np.arange(size) + 0.5 - origin_px) / stride_px).clip(0, patches - 1)
    patch = position.astype(np.int64)
    corner = patch[::TILE_PX]
    own = patch - corner.repeat(TILE_PX)[:size]
    weights = np.zeros((size, own.max() + 2), np.float32)
    weights[np.arange(size), own] = 1 - (position - patch)
    weights[np.arange(size), own + 1] = position - patch
    return corner, weights


@torch.no_grad()
def accumulate_patches(
    shapes: Ellipsoids,
    camera: Camera,
    features: Float[Tensor, "rows cols feat"],
    grid: PatchGrid,
    share: Float[Tensor, "h w"] | None,
    sums: Float[Tensor, "gaussians feat"],
) -> Float[Tensor, " gaussians"]:
    """Adds Σ wᵢ(p) f(p) over the pixels of a view, bilinear between patches, to the sum of each Gaussian.

    Args:
        shapes: float32, on the CPU, as is all else.
        share: weights of the pixels, 0 to 1; None for 1 everywhere.
        sums: changed in place.

    Returns:
        Σ wᵢ(p).
    """
    (width, height), weights = camera.size, torch.zeros(len(sums), 1)
    bins = bin_gaussians(project(shapes, camera), camera.size)
    down, across = (
        _interpolation(size, patches, origin, stride)
        for size, patches, origin, stride in zip(
            (height, width), (grid.rows, grid.cols), grid.origin_px, grid.stride_px, strict=True
        )
    )
    # Patches beyond the last have no weight, but are read.
    beyond = [(0, weights.shape[1]) for _, weights in (down, across)]
    patches = np.pad(features.float().numpy(), [*beyond, (0, 0)])
    shares = as_array(torch.ones(height, width) if share is None else share.float())
    columns = down[1].shape[1] * across[1].shape[1]
    for tile, stop in split_tiles(bins.starts, columns):
        first, counts = bins.starts[tile], np.diff(bins.starts[tile : stop + 1])
        rows = np.zeros((counts.sum(), columns), np.float32)
        intersections = bins.tile_order(tile, stop), bins.starts, bins.ranks, bins.geometry
        spread(*intersections, bins.columns, down[1], across[1], shares, first, rows)
        tiles = np.arange(tile, stop)
        corners = np.stack([down[0][tiles // bins.columns], across[0][tiles % bins.columns]], axis=1)
        lists = first, bins.slots, bins.slot_starts, bins.order
        _add_patches(rows, *lists, corners.repeat(counts, axis=0), across[1].shape[1], patches, sums.numpy())
        add_rows(rows.sum(axis=1, keepdims=True), *lists, weights.numpy())
    return weights[:, 0]
