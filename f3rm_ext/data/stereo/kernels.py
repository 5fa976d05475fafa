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
    return (low, high) if start >= 0 else (low, np.float32(-1))


@no_type_check
@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "arcp"})
def warp_photo(photo, height, width, warp, first, out, begin, stop):
    """Samples a photo bilinearly where a homography maps the pixels of ``out``; 0 outside of its size.

    What is inside is one piece of each row, whose first pixel and the one after the last are in ``begin`` and ``stop``.
    """
    flat, stride = photo.reshape(-1), np.int32(photo.shape[1])
    right, bottom = np.float32(width - 1), np.float32(height - 1)
    a, b, c = warp[0, 0], warp[1, 0], warp[2, 0]
    for row in range(out.shape[0]):
        y = np.float32(first + row)
        u, v, w = warp[0, 1] * y + warp[0, 2], warp[1, 1] * y + warp[1, 2], warp[2, 1] * y + warp[2, 2]
        low, high = np.float32(0), np.float32(out.shape[1] - 1)
        # Limits of u / w and v / w are linear in x once multiplied by w, which is positive in front of the camera.
        low, high = _clip_range(low, high, w - np.float32(1e-6), c)
        low, high = _clip_range(low, high, u, a)
        low, high = _clip_range(low, high, right * w - u, right * c - a)
        low, high = _clip_range(low, high, v, b)
        low, high = _clip_range(low, high, bottom * w - v, bottom * c - b)
        # Limited before they are integers: where a slope is nearly 0, they lie beyond what an integer holds.
        begin[row] = int(np.ceil(min(low, np.float32(out.shape[1]))))
        stop[row] = max(int(np.floor(max(high, np.float32(-1)))) + 1, begin[row])
        out[row, : begin[row]] = 0
        out[row, stop[row] :] = 0
        for x in range(begin[row], stop[row]):
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
@numba.njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _add_row(there, mine, sign, plain, square, mixed):
    """Adds a row to the sums of columns, or takes it away."""
    for x in range(there.shape[0]):
        signed = sign * there[x]
        plain[x] += signed
        square[x] += signed * there[x]
        mixed[x] += signed * mine[x]


@no_type_check
@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "arcp"})
def _insert_scores(there, mine, begin, stop, window, level, power, floor, columns, value, top):
    """Puts the correlations of patches with one photo into the best ones so far, which stay in falling order.

    ``window`` is a tuple as long as the side of a patch, so that its length is known to the compiler. Sums over a patch
    are those of its columns, which go from row to row.
    """
    side = len(window)
    share = np.float32(1) / np.float32(side * side)
    plain, square, mixed = columns[0], columns[1], columns[2]
    columns[:] = 0
    for row in range(side - 1):
        _add_row(there[row], mine[row], np.float32(1), plain, square, mixed)
    for row in range(level.shape[0]):
        _add_row(there[row + side - 1], mine[row + side - 1], np.float32(1), plain, square, mixed)
        low, high = begin[row], stop[row]
        for below in range(1, side):
            low, high = max(low, begin[row + below]), min(high, stop[row + below])
        # Slices from zero on: an index that might be negative would keep the loops from being vectorised.
        count = max(high - (side - 1) - low, 0)
        a, b, c = plain[low : low + count + side - 1], square[low:], mixed[low:]
        own, strength = level[row, low:], power[row, low:]
        for x in range(count):
            mean, spread, fit = np.float32(0), np.float32(0), np.float32(0)
            for beside in range(len(window)):
                mean += a[x + beside]
                spread += b[x + beside]
                fit += c[x + beside]
            mean *= share
            spread = spread * share - mean * mean
            spread = spread if spread > floor else floor
            value[x] = (fit * share - mean * own[x]) / np.sqrt(strength[x] * spread)
        for rank in range(top.shape[0]):
            ranked = top[rank, row, low:]
            for x in range(count):
                kept, new = ranked[x], value[x]
                ranked[x] = kept if kept > new else new
                value[x] = new if kept > new else kept
        _add_row(there[row], mine[row], np.float32(-1), plain, square, mixed)


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def sweep_planes(own, others, sizes, still, moving, nearness, rows, window, noise, score, place):
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
        window: a tuple as long as the side of a patch, pixels, odd.
        noise: variance below which a patch counts as flat.
        score: result, (h, w) float32, −1 where there is none: the mean correlation with the better half of the photos.
        place: result, (h, w) float32: the plane, refined by a parabola through three scores.
    """
    side = len(window)
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
        ahead, behind = np.empty(size + 2 * half, np.int64), np.empty(size + 2 * half, np.int64)
        columns, value = np.empty((3, width), np.float32), np.empty(width, np.float32)
        level, power = np.empty((size, inner), np.float32), np.empty((size, inner), np.float32)
        top, total = np.empty((better, size, inner), np.float32), np.empty(inner, np.float32)
        best, last = np.full((size, inner), -one, np.float32), np.full((size, inner), -one, np.float32)
        low, high = np.full((size, inner), -one, np.float32), np.full((size, inner), -one, np.float32)
        chosen = np.full((size, inner), -1, np.int32)
        for row in range(size):
            for x in range(inner):
                mean, square = np.float32(0), np.float32(0)
                for below in range(side):
                    for beside in range(side):
                        mean += mine[row + below, x + beside]
                        square += mine[row + below, x + beside] ** 2
                level[row, x] = mean / (side * side)
                power[row, x] = max(square / (side * side) - level[row, x] * level[row, x], floor)
        for plane in range(nearness.size):
            top[:] = -one
            for other in range(count):
                warp = still[other] + nearness[plane] * moving[other]
                warp_photo(others[other], sizes[other, 0], sizes[other, 1], warp, begin - half, there, ahead, behind)
                _insert_scores(there, mine, ahead, behind, window, level, power, floor, columns, value, top)
            for row in range(size):
                total[:] = 0
                for rank in range(better):
                    for x in range(inner):
                        total[x] += top[rank, row, x]
                for x in range(inner):
                    fit = total[x] / better
                    # Scores beside the best one are all that the parabola needs: no volume is kept.
                    if chosen[row, x] == plane - 1:
                        high[row, x] = fit
                    if fit > best[row, x]:
                        best[row, x], low[row, x], chosen[row, x] = fit, last[row, x], plane
                    last[row, x] = fit
        for row in range(size):
            for x in range(inner):
                index, shift = chosen[row, x], np.float32(0)
                if 0 < index < nearness.size - 1:
                    bend = min(low[row, x] - 2 * best[row, x] + high[row, x], np.float32(-1e-9))
                    shift = min(max((low[row, x] - high[row, x]) / (2 * bend), np.float32(-0.5)), np.float32(0.5))
                score[begin + row, half + x] = best[row, x]
                place[begin + row, half + x] = index + shift
