"""Compositing on the CPU, front to back: numba kernel, parallel over tiles."""

from typing import no_type_check

import numba
import numpy as np

from f3rm_ext.splat.rasterize.camera import TILE_PX
from f3rm_ext.splat.rasterize.pixels import (
    BLOCK,
    END,
    FLAGS,
    HALF,
    LANES,
    ONE,
    PIXEL_X,
    PIXEL_Y,
    PIXELS,
    SKIP,
    TOP,
    ZERO,
    block_within,
    decay,
    rows_within,
)

PATIENCE = 8
"""Gaussians between two looks at whether every pixel of the tile is full."""


@no_type_check
@numba.njit(inline="always")
def _weigh(lo, hi, x, y, a, b, c, opacity, mark, through, final, last, weights):
    """Weights of one Gaussian in pixels lo to hi; moves on their transmittances (0 once a pixel is full)."""
    for p in range(lo, hi):
        dx, dy = x - PIXEL_X[p], y - PIXEL_Y[p]
        power = HALF * (a * dx * dx + c * dy * dy) + b * dx * dy
        alpha = min(TOP, opacity * decay(power))
        before = through[p]
        after = before * (ONE - alpha)
        seen = (power >= ZERO) & (alpha >= SKIP)
        drawn = seen & (after > END)
        weights[p] = before * alpha if drawn else ZERO
        final[p] = after if drawn else final[p]
        last[p] = mark if drawn else last[p]
        through[p] = (after if drawn else ZERO) if seen else before


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True, error_model="numpy")
def forward(order, starts, ranks, geometry, payload, background, columns, colors, depth, alphas, final, last):
    """Composites every tile.

    Args:
        order: tiles, in the order of their treatment.
        starts: first intersection of each tile.
        ranks: Gaussian of each intersection, front to back in each tile.
        geometry: see :class:`~f3rm_ext.splat.rasterize.tiles.Bins`.
        payload: colours and, last, depth of each rank, (ranks, channels + 1).
        background: of each colour and of depth, (channels + 1,).
        columns: tiles per row of tiles.
        colors: result, (h, w, channels).
        depth: result, (h, w).
        alphas: result, (h, w).
        final: result: transmittance behind the last Gaussian, (tiles, 256), in the order of the tile's pixels.
        last: result: intersection, counted from the tile's first, that came last; −1 for none; (tiles, 256).
    """
    height, width = depth.shape
    channels = payload.shape[1]
    for task in numba.prange(order.size):
        tile = order[task]
        left, top = (tile % columns) * TILE_PX, (tile // columns) * TILE_PX
        through, weights = np.empty(PIXELS, np.float32), np.empty(PIXELS, np.float32)
        sums = np.zeros((channels, PIXELS), np.float32)
        t_final, t_last = final[tile], last[tile]
        for p in range(PIXELS):
            inside = (left + PIXEL_X[p] < width) & (top + PIXEL_Y[p] < height)
            through[p] = ONE if inside else ZERO
            t_final[p] = ONE
            t_last[p] = -1
        start = starts[tile]
        for k in range(starts[tile + 1] - start):
            rank = ranks[start + k]
            x, y = geometry[rank, 0] - np.float32(left), geometry[rank, 1] - np.float32(top)
            a, b, c = geometry[rank, 2], geometry[rank, 3], geometry[rank, 4]
            opacity, reach_x, reach_y = geometry[rank, 5], geometry[rank, 6], geometry[rank, 7]
            row0, row1 = rows_within(y, reach_y)
            for block in range(2):
                if row0 >= row1 or not block_within(x, reach_x, block):
                    continue
                lo, hi = block * BLOCK + row0 * LANES, block * BLOCK + row1 * LANES
                _weigh(lo, hi, x, y, a, b, c, opacity, np.int32(k), through, t_final, t_last, weights)
                for channel in range(channels):
                    value, total = payload[rank, channel], sums[channel]
                    for p in range(lo, hi):
                        total[p] += weights[p] * value
            if k % PATIENCE == PATIENCE - 1:
                left_over = ZERO
                for p in range(PIXELS):
                    left_over += through[p]
                if left_over == ZERO:
                    break
        for p in range(PIXELS):
            row, column = top + np.int64(PIXEL_Y[p]), left + np.int64(PIXEL_X[p])
            if row < height and column < width:
                for channel in range(channels - 1):
                    colors[row, column, channel] = sums[channel, p] + t_final[p] * background[channel]
                depth[row, column] = sums[channels - 1, p]
                alphas[row, column] = ONE - t_final[p]
