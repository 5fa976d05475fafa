"""Gradients of the compositing on the CPU, back to front: numba kernels, parallel over tiles, without races.

Every (tile, Gaussian) intersection has a row of its own to write to; the rows of a Gaussian are added afterwards, in
the order of its tiles, so that results depend neither on timing nor on the number of threads.

With w the weights, T the transmittances, d = colour · upstream gradient and s = Σ w d over what lies behind,

    ∂L/∂alpha = T d − (s + T_final (background · upstream − upstream of the accumulation)) / (1 − alpha)

and everything else follows from the moments of ∂L/∂power over the offsets to the pixels.
"""

from typing import no_type_check

import numba
import numpy as np

from f3rm_ext.splat.rasterize.camera import TILE_PX
from f3rm_ext.splat.rasterize.pixels import (
    BLOCK,
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

SHAPE_GRADS = 8
"""Numbers of an intersection before those of its colours: centre x, y; conic xx, xy, yy; opacity; |x|, |y|."""


@no_type_check
@numba.njit(inline="always")
def _gather(tile, columns, height, width, upstream, result):
    """Upstream gradients of a tile, channel by channel; 0 outside the picture."""
    left, top = (tile % columns) * TILE_PX, (tile // columns) * TILE_PX
    for p in range(PIXELS):
        row, column = top + np.int64(PIXEL_Y[p]), left + np.int64(PIXEL_X[p])
        inside = row < height and column < width
        for channel in range(upstream.shape[2]):
            result[channel, p] = upstream[row, column, channel] if inside else ZERO


@no_type_check
@numba.njit(inline="always")
def _moments(lo, hi, x, y, a, b, c, opacity, mark, last, through, behind, dots, weights):
    """Weights of one Gaussian and sums over pixels of ∂L/∂power times 1, dx, dy, dx², dx dy, dy², |x|, |y|."""
    m, mx, my, mxx, mxy, myy, abs_x, abs_y = ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO
    for p in range(lo, hi):
        dx, dy = x - PIXEL_X[p], y - PIXEL_Y[p]
        power = HALF * (a * dx * dx + c * dy * dy) + b * dx * dy
        raw = opacity * decay(power)
        alpha = min(TOP, raw)
        drawn = (mark <= last[p]) & (power >= ZERO) & (alpha >= SKIP)
        alpha = alpha if drawn else ZERO
        left_over = ONE / (ONE - alpha)
        before = through[p] * left_over
        through[p] = before
        weight = alpha * before
        weights[p] = weight
        g_alpha = dots[p] * before - behind[p] * left_over
        behind[p] += weight * dots[p]
        g = -raw * g_alpha if drawn & (raw <= TOP) else ZERO
        m += g
        mx += g * dx
        my += g * dy
        mxx += g * dx * dx
        mxy += g * dx * dy
        myy += g * dy * dy
        abs_x += abs(g * (a * dx + b * dy))
        abs_y += abs(g * (b * dx + c * dy))
    return m, mx, my, mxx, mxy, myy, abs_x, abs_y


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True, error_model="numpy")
def backward(
    order, starts, ranks, geometry, payload, background, columns, upstream, g_alphas, final, last, first, rows
):
    """Gradients of every intersection of some tiles.

    Args:
        order: the tiles.
        starts: first intersection of each tile.
        ranks: Gaussian of each intersection.
        geometry: as in the forward pass.
        payload: as in the forward pass.
        background: as in the forward pass.
        columns: as in the forward pass.
        upstream: gradients of colours and of depth, (h, w, channels + 1).
        g_alphas: gradients of the accumulation, (h, w).
        final: from the forward pass.
        last: from the forward pass.
        first: intersection of row 0 of the result.
        rows: result, (intersections, 8 + channels + 1).
    """
    height, width = g_alphas.shape
    channels = payload.shape[1]
    for task in numba.prange(order.size):
        tile = order[task]
        left, top = (tile % columns) * TILE_PX, (tile // columns) * TILE_PX
        start, t_last = starts[tile], last[tile]
        grads, through = np.empty((channels, PIXELS), np.float32), final[tile].copy()
        behind, dots, weights = np.empty(PIXELS, np.float32), np.empty(PIXELS, np.float32), np.empty(PIXELS, np.float32)
        _gather(tile, columns, height, width, upstream, grads)
        for p in range(PIXELS):
            row, column = top + np.int64(PIXEL_Y[p]), left + np.int64(PIXEL_X[p])
            total = -g_alphas[row, column] if row < height and column < width else ZERO
            for channel in range(channels):
                total += background[channel] * grads[channel, p]
            behind[p] = total * through[p]
        deepest = -1
        for p in range(PIXELS):
            deepest = max(deepest, t_last[p])
        for k in range(deepest, -1, -1):
            rank = ranks[start + k]
            x, y = geometry[rank, 0] - np.float32(left), geometry[rank, 1] - np.float32(top)
            a, b, c = geometry[rank, 2], geometry[rank, 3], geometry[rank, 4]
            opacity, reach_x, reach_y = geometry[rank, 5], geometry[rank, 6], geometry[rank, 7]
            row0, row1 = rows_within(y, reach_y)
            result = rows[start + k - first]
            for block in range(2):
                if row0 >= row1 or not block_within(x, reach_x, block):
                    continue
                lo, hi = block * BLOCK + row0 * LANES, block * BLOCK + row1 * LANES
                for p in range(lo, hi):
                    dots[p] = payload[rank, 0] * grads[0, p]
                for channel in range(1, channels):
                    value, grad = payload[rank, channel], grads[channel]
                    for p in range(lo, hi):
                        dots[p] += value * grad[p]
                m, mx, my, mxx, mxy, myy, abs_x, abs_y = _moments(
                    lo, hi, x, y, a, b, c, opacity, np.int32(k), t_last, through, behind, dots, weights
                )
                result[0] += a * mx + b * my
                result[1] += b * mx + c * my
                result[2] += HALF * mxx
                result[3] += mxy
                result[4] += HALF * myy
                result[5] -= m / opacity
                result[6] += abs_x
                result[7] += abs_y
                for channel in range(channels):
                    grad, total = grads[channel], ZERO
                    for p in range(lo, hi):
                        total += weights[p] * grad[p]
                    result[SHAPE_GRADS + channel] += total


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True, error_model="numpy")
def backward_colors(order, starts, ranks, geometry, columns, upstream, last, first, rows):
    """Gradients of colours alone, front to back with the very weights of the forward pass; arguments as there.

    The result, (intersections, channels), is the picture ``upstream`` added up with each Gaussian's weights.
    """
    height, width, channels = upstream.shape
    for task in numba.prange(order.size):
        tile = order[task]
        left, top = (tile % columns) * TILE_PX, (tile // columns) * TILE_PX
        start, t_last = starts[tile], last[tile]
        grads, through = np.empty((channels, PIXELS), np.float32), np.ones(PIXELS, np.float32)
        weights = np.empty(PIXELS, np.float32)
        _gather(tile, columns, height, width, upstream, grads)
        deepest = -1
        for p in range(PIXELS):
            deepest = max(deepest, t_last[p])
        for k in range(deepest + 1):
            rank = ranks[start + k]
            x, y = geometry[rank, 0] - np.float32(left), geometry[rank, 1] - np.float32(top)
            a, b, c = geometry[rank, 2], geometry[rank, 3], geometry[rank, 4]
            opacity, reach_x, reach_y = geometry[rank, 5], geometry[rank, 6], geometry[rank, 7]
            row0, row1 = rows_within(y, reach_y)
            result = rows[start + k - first]
            for block in range(2):
                if row0 >= row1 or not block_within(x, reach_x, block):
                    continue
                lo, hi = block * BLOCK + row0 * LANES, block * BLOCK + row1 * LANES
                for p in range(lo, hi):
                    dx, dy = x - PIXEL_X[p], y - PIXEL_Y[p]
                    power = HALF * (a * dx * dx + c * dy * dy) + b * dx * dy
                    alpha = min(TOP, opacity * decay(power))
                    drawn = (k <= t_last[p]) & (power >= ZERO) & (alpha >= SKIP)
                    alpha = alpha if drawn else ZERO
                    weights[p] = alpha * through[p]
                    through[p] *= ONE - alpha
                for channel in range(channels):
                    grad, total = grads[channel], ZERO
                    for p in range(lo, hi):
                        total += weights[p] * grad[p]
                    result[channel] += total


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True)
def add_rows(rows, first, slots, slot_starts, order, result):
    """Adds the rows of intersections from ``first`` on to those of their Gaussians, in the order of the tiles."""
    stop = first + rows.shape[0]
    for rank in numba.prange(order.size):
        total = result[order[rank]]
        for slot in range(slot_starts[rank], slot_starts[rank + 1]):
            place = slots[slot]
            if first <= place < stop:
                for i in range(rows.shape[1]):
                    total[i] += rows[place - first, i]
