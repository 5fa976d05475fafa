"""The plane sweep on the CPU: warped patches are compared row by row, and no volume of scores is kept."""

from typing import no_type_check

import numba
import numpy as np

STRIP_ROWS = 24
"""Rows that a thread works on at a time; what they need stays in its cache."""


@no_type_check
@numba.njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _clip_range(low, high, start, slope):
    """The part of the range from ``low`` to ``high`` where ``start + slope · x`` is not negative."""
    if slope > 0:
        return max(low, -start / slope), high
    if slope < 0:
        return low, min(high, -start / slope)
    return (low, high) if start >= 0 else (low, low - 1)


@no_type_check
@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "arcp"})
def _warp(photo, height, width, warp, first, out):
    """Samples a photo bilinearly where a homography maps the pixels of ``out``; NaN outside of its size."""
    flat, stride = photo.reshape(-1), np.int32(photo.shape[1])
    right, bottom = np.float32(width - 1), np.float32(height - 1)
    a, b, c = warp[0, 0], warp[1, 0], warp[2, 0]
    for row in range(out.shape[0]):
        y = np.float32(first + row)
        u, v, w = warp[0, 1] * y + warp[0, 2], warp[1, 1] * y + warp[1, 2], warp[2, 1] * y + warp[2, 2]
        # What is inside is one piece of the row, so that the loop over it needs no branches.
        low, high = np.float32(0), np.float32(out.shape[1] - 1)
        low, high = _clip_range(low, high, w - np.float32(1e-6), c)
        low, high = _clip_range(low, high, u, a)
        low, high = _clip_range(low, high, right * w - u, right * c - a)
        low, high = _clip_range(low, high, v, b)
        low, high = _clip_range(low, high, bottom * w - v, bottom * c - b)
        begin, stop = int(np.ceil(low)), int(np.floor(high)) + 1
        out[row, : max(begin, 0)] = np.nan
        out[row, max(begin, stop, 0) :] = np.nan
        for x in range(begin, stop):
            column = np.float32(x)
            scale = np.float32(1) / (w + c * column)
            px = min(max((u + a * column) * scale, np.float32(0)), right)
            py = min(max((v + b * column) * scale, np.float32(0)), bottom)
            left, top = min(np.int32(px), np.int32(width - 2)), min(np.int32(py), np.int32(height - 2))
            share_x, share_y = px - np.float32(left), py - np.float32(top)
            place = top * stride + left
            upper = flat[place] + share_x * (flat[place + 1] - flat[place])
            below = place + stride
            lower = flat[below] + share_x * (flat[below + 1] - flat[below])
            out[row, x] = upper + share_y * (lower - upper)


@no_type_check
@numba.njit(cache=True, nogil=True, error_model="numpy")
def _box(values, side, columns, out):
    """Means over squares of pixels: ``out[row, x]`` is that of the square whose first pixel is ``values[row, x]``."""
    share = np.float32(1 / (side * side))
    width = values.shape[1] - side + 1
    for row in range(out.shape[0]):
        columns[:] = values[row]
        # Sums of columns come first, so that a mean takes 2 · side additions instead of side².
        for below in range(1, side):
            for x in range(values.shape[1]):
                columns[x] += values[row + below, x]
        for x in range(width):
            out[row, x] = columns[x]
        for beside in range(1, side):
            for x in range(width):
                out[row, x] += columns[x + beside]
        for x in range(width):
            out[row, x] *= share


@no_type_check
@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "arcp"})
def _insert_scores(mixed, mean, square, level, power, floor, top):
    """Puts the correlations of patches with one photo into the best ones so far, which stay in falling order."""
    worst = np.float32(-1)
    for row in range(mean.shape[0]):
        value = np.empty(mean.shape[1], np.float32)
        for x in range(mean.shape[1]):
            spread = square[row, x] - mean[row, x] * mean[row, x]
            spread = spread if spread > floor else floor
            fit = (mixed[row, x] - mean[row, x] * level[row, x]) / np.sqrt(power[row, x] * spread)
            value[x] = fit if fit > worst else worst  # NaN, too, where the patch leaves the photo
        for rank in range(top.shape[0]):
            for x in range(mean.shape[1]):
                kept, new = top[rank, row, x], value[x]
                top[rank, row, x] = kept if kept > new else new
                value[x] = new if kept > new else kept


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def sweep_planes(own, others, sizes, still, moving, nearness, rows, side, noise, score, place):
    """Finds the plane on which the patches of a photo fit those of others best; see
    :func:`f3rm_ext.data.stereo.sweep.best_plane`.

    Args:
        own: grey levels, (h, w) float32.
        others: those of the other photos, (photos, H, W) float32, filled up where smaller.
        sizes: rows and columns of the other photos, (photos, 2).
        still: homographies to the other photos of the plane at infinity, (photos, 3, 3) float32.
        moving: what is added to them per nearness, (photos, 3, 3) float32.
        nearness: 1 / distance of the planes.
        rows: first row, and the one after the last, that see the planes.
        side: of a patch, pixels, odd.
        noise: variance below which a patch counts as flat.
        score: result, (h, w) float32, −1 where there is none: the mean correlation with the better half of the photos.
        place: result, (h, w) float32: the plane, refined by a parabola through three scores.
    """
    width, half = own.shape[1], side // 2
    inner = width - side + 1
    first, stop = max(rows[0], half), min(rows[1], own.shape[0] - half)
    count, better = others.shape[0], (others.shape[0] + 1) // 2
    one, floor = np.float32(1), np.float32(noise)
    for strip in numba.prange((stop - first + STRIP_ROWS - 1) // STRIP_ROWS):
        begin = first + strip * STRIP_ROWS
        size = min(STRIP_ROWS, stop - begin)
        mine = own[begin - half : begin + size + half]
        there = np.empty((size + 2 * half, width), np.float32)
        product = np.empty((size + 2 * half, width), np.float32)
        columns = np.empty(width, np.float32)
        level, power = np.empty((size, inner), np.float32), np.empty((size, inner), np.float32)
        mean, square = np.empty((size, inner), np.float32), np.empty((size, inner), np.float32)
        mixed = np.empty((size, inner), np.float32)
        top, total = np.empty((better, size, inner), np.float32), np.empty(inner, np.float32)
        best, last = np.full((size, inner), -one, np.float32), np.full((size, inner), -one, np.float32)
        low, high = np.full((size, inner), -one, np.float32), np.full((size, inner), -one, np.float32)
        chosen = np.full((size, inner), -1, np.int32)
        _box(mine, side, columns, level)
        for row in range(size + 2 * half):
            for x in range(width):
                product[row, x] = mine[row, x] * mine[row, x]
        _box(product, side, columns, power)
        for row in range(size):
            for x in range(inner):
                power[row, x] = max(power[row, x] - level[row, x] * level[row, x], floor)
        for plane in range(nearness.size):
            top[:] = -one
            for other in range(count):
                warp = still[other] + nearness[plane] * moving[other]
                _warp(others[other], sizes[other, 0], sizes[other, 1], warp, begin - half, there)
                _box(there, side, columns, mean)
                for row in range(size + 2 * half):
                    for x in range(width):
                        product[row, x] = there[row, x] * mine[row, x]
                _box(product, side, columns, mixed)
                for row in range(size + 2 * half):
                    for x in range(width):
                        product[row, x] = there[row, x] * there[row, x]
                _box(product, side, columns, square)
                _insert_scores(mixed, mean, square, level, power, floor, top)
            for row in range(size):
                total[:] = 0
                for rank in range(better):
                    for x in range(inner):
                        total[x] += top[rank, row, x]
                for x in range(inner):
                    fit = total[x] / better
                    if chosen[row, x] == plane - 1:
                        high[row, x] = fit
                    if fit > best[row, x]:
                        best[row, x], low[row, x], chosen[row, x] = fit, last[row, x], plane
                    last[row, x] = fit
        for row in range(size):
            for x in range(inner):
                at, shift = chosen[row, x], np.float32(0)
                if 0 < at < nearness.size - 1:
                    bend = min(low[row, x] - 2 * best[row, x] + high[row, x], np.float32(-1e-9))
                    shift = min(max((low[row, x] - high[row, x]) / (2 * bend), np.float32(-0.5)), np.float32(0.5))
                score[begin + row, half + x] = best[row, x]
                place[begin + row, half + x] = at + shift
