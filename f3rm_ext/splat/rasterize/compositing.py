"""Compositing on the CPU: numba kernels for the image and its gradients, parallel over tiles, without races.

The pixels of a tile form two blocks of 16 rows with 8 pixels, one vector register per row. A Gaussian covers whole rows
of a block, so every inner loop runs over consecutive pixels without branches. Pixel indices are unsigned, which saves
the loops a test for negative indices.

In the backward pass every intersection of a tile and a Gaussian writes to its own row. The rows of a Gaussian are
summed afterwards, in the order of its tiles, so results depend neither on timing nor on the number of threads. With
the weights w, the transmittances T, d = colour · upstream gradient and s = Σ w d over the Gaussians behind,

    ∂L/∂alpha = T d − (s + T_final (background · upstream − upstream of the accumulation)) / (1 − alpha)

and all other gradients follow from the moments of ∂L/∂power over the offsets to the pixels.

Kernels that call one another are in this file, because numba's cache detects changes in one file only. After a change
of what :mod:`f3rm_ext.mesh.splat_depth` calls of it, delete the cache of that module.
"""

from typing import no_type_check

import numba
import numpy as np

from f3rm_ext.splat.rasterize.camera import MAX_ALPHA, MIN_ALPHA, MIN_TRANSMITTANCE, TILE_PX

FLAGS = {"contract", "reassoc", "arcp", "nsz"}
"""Fast-math flags: sums in any order, but infinities and NaN are honoured."""
LANES = 8
"""Pixels per row of a block."""
BLOCK = LANES * TILE_PX
"""Pixels of a block."""
BUFFER = 1 << 24
"""Numbers in the buffer of gradients per intersection (64 MiB); larger images are processed in runs of tiles."""
PIXELS = TILE_PX * TILE_PX
"""Pixels of a tile."""
_P = np.arange(PIXELS)
PIXEL_X = (_P % LANES + _P // BLOCK * LANES + 0.5).astype(np.float32)
"""Centre of each pixel from the tile's left edge, pixels."""
PIXEL_Y = (_P // LANES % TILE_PX + 0.5).astype(np.float32)
"""Centre of each pixel from the tile's upper edge, pixels."""
ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
"""Typed constants: a bare literal would turn the kernels' arithmetic into float64."""
TOP, SKIP, END = np.float32(MAX_ALPHA), np.float32(MIN_ALPHA), np.float32(MIN_TRANSMITTANCE)
FADED = np.float32(40.0)
"""Upper limit of exponents; exp(−40) is negligible."""
LOG2E = np.float32(1.4426950408889634)
E1, E2, E3, E4, E5, E6 = (
    np.float32(v) for v in (0.6931471806, 0.2402265070, 0.0555041087, 0.0096181291, 0.0013333558, 0.0001540353)
)
"""ln(2)^k / k!: coefficients of the series of 2^f, accurate to 2e-7 for |f| ≤ ½."""
MARGIN_PX, MARGIN = np.float32(1e-2), np.float32(1e-6)
"""By how much the rows of a Gaussian are widened for rounding, absolute and relative."""
PATIENCE = 8
"""Gaussians between checks whether all pixels of the tile are full."""
WIDE = 24
"""With at least this many channels, inner loops run over the channels of each covered pixel instead of over pixels."""
SHAPE_GRADS = 8
"""Gradients per intersection before those of its colours: centre x, y; conic xx, xy, yy; opacity; |x|, |y|."""


@no_type_check
@numba.njit(inline="always")
def decay(power):
    """Computes exp(−power) for power ≥ 0 (not checked), without a call, so that loops vectorise."""
    scaled = min(power, FADED) * LOG2E
    whole = np.int32(scaled + HALF)
    f = np.float32(whole) - scaled
    # 2^(f − whole): the series gives 2^f, and 2^−whole is written straight into the bits of the exponent.
    mantissa = ONE + f * (E1 + f * (E2 + f * (E3 + f * (E4 + f * (E5 + f * E6)))))
    return mantissa * np.int32((np.int32(127) - whole) << np.int32(23)).view(np.float32)


@no_type_check
@numba.njit(inline="always")
def pixels_within(x, y, geometry, rank, block):
    """Returns the first pixel of a block that a Gaussian reaches, and the one after the last; none if they are equal.

    These are the rows in which the block meets the ellipse where alpha is 1/255. At u to the right of its centre, the
    ellipse lies between slope u ± rise √(reach² − u²), below the centre where positive; its lowest point is at
    u = lean, its highest at u = −lean.
    """
    reach, slope, rise, lean = geometry[rank, 6], geometry[rank, 8], geometry[rank, 9], geometry[rank, 10]
    left = np.float32(block * LANES) + HALF - x
    right = left + np.float32(LANES - 1)
    u, v = min(max(lean, left), right), min(max(-lean, left), right)
    low = rise * np.sqrt(max(reach * reach - u * u, ZERO))
    high = rise * np.sqrt(max(reach * reach - v * v, ZERO))
    margin = MARGIN_PX + MARGIN * (abs(slope * u) + abs(slope * v) + low + high)
    first = np.int64(np.ceil(min(max(y + slope * v - high - margin - HALF, ZERO), np.float32(TILE_PX))))
    last = np.int64(np.floor(max(min(y + slope * u + low + margin - HALF, np.float32(TILE_PX - 1)), -ONE)))
    if left > reach or right < -reach or last < first:
        last = first - 1
    return np.uint64(block * BLOCK + first * LANES), np.uint64(block * BLOCK + (last + 1) * LANES)


@no_type_check
@numba.njit(inline="always")
def read_gaussian(geometry, rank, left, top):
    """Returns a row of :attr:`~f3rm_ext.splat.rasterize.tiles.Bins.geometry`, the centre from the corner of a tile."""
    x, y = geometry[rank, 0] - np.float32(left), geometry[rank, 1] - np.float32(top)
    a, b, c = geometry[rank, 2], geometry[rank, 3], geometry[rank, 4]
    return x, y, a, b, c, geometry[rank, 5]


@no_type_check
@numba.njit(inline="always")
def weigh(lo, hi, x, y, a, b, c, opacity, mark, through, final, last, weights):
    """Computes the weights of one Gaussian in pixels lo to hi; updates their transmittances (0 once full).

    Everything is stored for every pixel, by limits that change nothing where the Gaussian is not drawn: a value that is
    stored for some of them only becomes a masked store, which takes AMD's processors tens of cycles.
    """
    for p in range(lo, hi):
        dx, dy = x - PIXEL_X[p], y - PIXEL_Y[p]
        power = HALF * (a * dx * dx + c * dy * dy) + b * dx * dy
        alpha = min(TOP, opacity * decay(power))
        before = through[p]
        after = before * (ONE - alpha)
        seen = (power >= ZERO) & (alpha >= SKIP)
        # A Gaussian that would leave less than END is not drawn itself, and ends the pixel, as in gsplat.
        drawn = seen & (after > END)
        weights[p] = min(before * alpha, ONE if drawn else ZERO)
        final[p] = min(final[p], after if drawn else ONE)
        last[p] = max(last[p], mark if drawn else np.int32(-1))
        through[p] = (after if drawn else ZERO) if seen else before


@no_type_check
@numba.njit(inline="always")
def _list_covered(lo, hi, weights, covered):
    """Lists the pixels of a range with a positive weight; returns their number."""
    count = 0
    for p in range(lo, hi):
        covered[count] = p
        count += 1 if weights[p] > ZERO else 0
    return count


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True, error_model="numpy")
def forward(order, starts, ranks, geometry, payload, background, columns, colors, depth, alphas, final, last):
    """Composites every tile.

    Args:
        order: tiles, in processing order.
        starts: first intersection of each tile.
        ranks: Gaussian of each intersection, front to back in each tile.
        geometry: see :class:`~f3rm_ext.splat.rasterize.tiles.Bins`.
        payload: colours and, last, depth of each rank, (ranks, channels + 1).
        background: of each colour and of depth, (channels + 1,).
        columns: tiles per row of tiles.
        colors: result, (h, w, channels).
        depth: result, (h, w).
        alphas: result, (h, w).
        final: result, transmittance behind the last Gaussian, (tiles, 256), in the order of the tile's pixels.
        last: result, last composited intersection, counted from the tile's first; −1 for none; (tiles, 256).
    """
    height, width = depth.shape
    channels = payload.shape[1]
    for task in numba.prange(order.size):
        tile = order[task]
        left, top = (tile % columns) * TILE_PX, (tile // columns) * TILE_PX
        through, weights = np.empty(PIXELS, np.float32), np.empty(PIXELS, np.float32)
        wide = channels >= WIDE
        sums = np.zeros((PIXELS, channels) if wide else (channels, PIXELS), np.float32)
        covered = np.empty(BLOCK + 1, np.uint64)
        t_final, t_last = final[tile], last[tile]
        for p in range(PIXELS):
            inside = (left + PIXEL_X[p] < width) & (top + PIXEL_Y[p] < height)
            through[p] = ONE if inside else ZERO
            t_final[p] = ONE
            t_last[p] = -1
        start = starts[tile]
        for k in range(starts[tile + 1] - start):
            rank = ranks[start + k]
            x, y, a, b, c, opacity = read_gaussian(geometry, rank, left, top)
            for block in range(2):
                lo, hi = pixels_within(x, y, geometry, rank, block)
                if lo == hi:
                    continue
                weigh(lo, hi, x, y, a, b, c, opacity, np.int32(k), through, t_final, t_last, weights)
                if wide:
                    values = payload[rank]
                    for place in range(_list_covered(lo, hi, weights, covered)):
                        total, weight = sums[covered[place]], weights[covered[place]]
                        for channel in range(channels):
                            total[channel] += weight * values[channel]
                else:
                    for channel in range(channels):
                        value, total = payload[rank, channel], sums[channel]
                        for p in range(lo, hi):
                            total[p] += weights[p] * value
            # Summing the whole tile is not worth it after every Gaussian.
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
                    total = sums[p, channel] if wide else sums[channel, p]
                    colors[row, column, channel] = total + t_final[p] * background[channel]
                depth[row, column] = sums[p, channels - 1] if wide else sums[channels - 1, p]
                alphas[row, column] = ONE - t_final[p]


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True, error_model="numpy")
def measure(order, starts, ranks, geometry, payload, picture, truth, share, columns, rows, median):
    """Measures how much of every pixel each Gaussian makes up, what it is worth, and where the rays end.

    Without a Gaussian, those behind it show more. With the colours C of the pixel, S of the Gaussians up to it, c of
    its own, its weight w and the transmittance T behind it, the pixel changes by (C − S) w / T − w c.

    Args:
        payload: colours and, last, depth of each rank, (ranks, 4).
        picture: the composited picture, (h, w, 3).
        truth: the photo, (h, w, 3).
        share: weights of the pixels' errors, (h, w).
        rows: result, sum and largest of the weights of each intersection, and by how much the squared error grows
            without it, (intersections, 3); 0 at the beginning.
        median: result, depth of the Gaussian at which the accumulation reaches ½; 0 where it does not; (h, w).
    """
    height, width = median.shape
    for task in numba.prange(order.size):
        tile = order[task]
        left, top = (tile % columns) * TILE_PX, (tile // columns) * TILE_PX
        through, weights = np.empty(PIXELS, np.float32), np.empty(PIXELS, np.float32)
        final, last = np.ones(PIXELS, np.float32), np.empty(PIXELS, np.int32)
        middle = np.zeros(PIXELS, np.float32)
        # What each pixel still gets from behind, and its error; both of three colours.
        behind, error, counts = (
            np.empty((3, PIXELS), np.float32),
            np.empty((3, PIXELS), np.float32),
            np.empty(PIXELS, np.float32),
        )
        for p in range(PIXELS):
            row, column = top + np.int64(PIXEL_Y[p]), left + np.int64(PIXEL_X[p])
            inside = (row < height) & (column < width)
            through[p] = ONE if inside else ZERO
            counts[p] = share[row, column] if inside else ZERO
            for i in range(3):
                behind[i, p] = picture[row, column, i] if inside else ZERO
                error[i, p] = picture[row, column, i] - truth[row, column, i] if inside else ZERO
        start = starts[tile]
        for k in range(starts[tile + 1] - start):
            rank = ranks[start + k]
            x, y, a, b, c, opacity = read_gaussian(geometry, rank, left, top)
            for block in range(2):
                lo, hi = pixels_within(x, y, geometry, rank, block)
                if lo == hi:
                    continue
                weigh(lo, hi, x, y, a, b, c, opacity, np.int32(k), through, final, last, weights)
                total, largest, grown = ZERO, ZERO, ZERO
                for i in range(3):
                    color = payload[rank, i]
                    for p in range(lo, hi):
                        weight = weights[p]
                        behind[i, p] -= weight * color
                        change = behind[i, p] * weight / through[p] - weight * color if weight > ZERO else ZERO
                        grown += counts[p] * change * (change + error[i, p] + error[i, p])
                for p in range(lo, hi):
                    weight = weights[p]
                    total += weight
                    largest = max(largest, weight)
                    middle[p] = payload[rank, 3] if (middle[p] == ZERO) & (final[p] <= HALF) else middle[p]
                rows[start + k, 0] += total
                rows[start + k, 1] = max(rows[start + k, 1], largest)
                rows[start + k, 2] += grown
        for p in range(PIXELS):
            row, column = top + np.int64(PIXEL_Y[p]), left + np.int64(PIXEL_X[p])
            if row < height and column < width:
                median[row, column] = middle[p]


@no_type_check
@numba.njit(inline="always")
def _gather(tile, columns, height, width, upstream, result):
    """Copies the upstream gradients of a tile, channel by channel; 0 outside the image."""
    left, top = (tile % columns) * TILE_PX, (tile // columns) * TILE_PX
    for p in range(PIXELS):
        row, column = top + np.int64(PIXEL_Y[p]), left + np.int64(PIXEL_X[p])
        inside = row < height and column < width
        for channel in range(upstream.shape[2]):
            result[channel, p] = upstream[row, column, channel] if inside else ZERO


@no_type_check
@numba.njit(inline="always")
def _moments(lo, hi, x, y, a, b, c, opacity, mark, last, through, behind, dots, weights):
    """Computes the weights of one Gaussian and the sums of ∂L/∂power times 1, dx, dy, dx², dx dy, dy², |x|, |y|."""
    m, mx, my, mxx, mxy, myy, abs_x, abs_y = ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO
    for p in range(lo, hi):
        dx, dy = x - PIXEL_X[p], y - PIXEL_Y[p]
        power = HALF * (a * dx * dx + c * dy * dy) + b * dx * dy
        raw = opacity * decay(power)
        alpha = min(TOP, raw)
        drawn = (mark <= last[p]) & (power >= ZERO) & (alpha >= SKIP)
        alpha = alpha if drawn else ZERO
        # Back to front, the transmittance before a Gaussian is that behind it over 1 − alpha; alpha is at most TOP.
        left_over = ONE / (ONE - alpha)
        before = through[p] * left_over
        through[p] = before
        weight = alpha * before
        weights[p] = weight
        g_alpha = dots[p] * before - behind[p] * left_over
        behind[p] += weight * dots[p]
        # A capped alpha depends neither on the opacity nor on the place of the Gaussian.
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
    """Computes the gradients of every intersection of some tiles.

    Args:
        starts: first intersection of each tile.
        upstream: gradients of colours and of depth, (h, w, channels + 1).
        g_alphas: gradients of the accumulation, (h, w).
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
            # By the final transmittance: the background shows through it, and the accumulation is 1 minus it.
            total = -g_alphas[row, column] if row < height and column < width else ZERO
            for channel in range(channels):
                total += background[channel] * grads[channel, p]
            behind[p] = total * through[p]
        deepest = -1
        for p in range(PIXELS):
            deepest = max(deepest, t_last[p])
        for k in range(deepest, -1, -1):
            rank = ranks[start + k]
            x, y, a, b, c, opacity = read_gaussian(geometry, rank, left, top)
            result = rows[start + k - first]
            for block in range(2):
                lo, hi = pixels_within(x, y, geometry, rank, block)
                if lo == hi:
                    continue
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
@numba.njit(inline="always")
def _add_weighted(count, covered, weights, grads, result):
    """Adds the weighted gradients of some pixels, four pixels at a time."""
    fours = count - count % 4
    for place in range(0, fours, 4):
        p, q, r, s = covered[place], covered[place + 1], covered[place + 2], covered[place + 3]
        w_p, w_q, w_r, w_s = weights[p], weights[q], weights[r], weights[s]
        g_p, g_q, g_r, g_s = grads[p], grads[q], grads[r], grads[s]
        for channel in range(result.size):
            result[channel] += (w_p * g_p[channel] + w_q * g_q[channel]) + (w_r * g_r[channel] + w_s * g_s[channel])
    for place in range(fours, count):
        weight, grad = weights[covered[place]], grads[covered[place]]
        for channel in range(result.size):
            result[channel] += weight * grad[channel]


@no_type_check
@numba.njit(inline="always")
def _sum_values(tile, starts, ranks, geometry, left, top, through, values, first, rows):
    """Adds up the values of a tile's pixels, (256, numbers), with the weights of each Gaussian, front to back.

    Args:
        through: 1 for pixels in the image, else 0; changed.
        first: intersection of row 0 of the result.
        rows: result, (intersections, numbers).
    """
    weights, covered = np.empty(PIXELS, np.float32), np.empty(BLOCK + 1, np.uint64)
    final, last = np.ones(PIXELS, np.float32), np.empty(PIXELS, np.int32)
    start = starts[tile]
    for k in range(starts[tile + 1] - start):
        rank = ranks[start + k]
        x, y, a, b, c, opacity = read_gaussian(geometry, rank, left, top)
        result = rows[start + k - first]
        for block in range(2):
            lo, hi = pixels_within(x, y, geometry, rank, block)
            if lo == hi:
                continue
            weigh(lo, hi, x, y, a, b, c, opacity, np.int32(k), through, final, last, weights)
            _add_weighted(_list_covered(lo, hi, weights, covered), covered, weights, values, result)
        if k % PATIENCE == PATIENCE - 1 and through.sum() == ZERO:
            break


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True, error_model="numpy")
def backward_colors(order, starts, ranks, geometry, columns, upstream, first, rows):
    """Computes the gradients of colours alone: sums of ``upstream`` with each Gaussian's weights.

    Arguments are those of :func:`backward`; the result is (intersections, channels).
    """
    height, width, channels = upstream.shape
    for task in numba.prange(order.size):
        tile = order[task]
        left, top = (tile % columns) * TILE_PX, (tile // columns) * TILE_PX
        grads, through = np.zeros((PIXELS, channels), np.float32), np.zeros(PIXELS, np.float32)
        for p in range(PIXELS):
            row, column = top + np.int64(PIXEL_Y[p]), left + np.int64(PIXEL_X[p])
            if row < height and column < width:
                through[p] = ONE
                for channel in range(channels):
                    grads[p, channel] = upstream[row, column, channel]
        _sum_values(tile, starts, ranks, geometry, left, top, through, grads, first, rows)


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True, error_model="numpy")
def spread(order, starts, ranks, geometry, columns, down, across, share, first, rows):
    """Adds up, with the weights of each Gaussian in a tile, by how much the patches of a grid are in its pixels.

    Args:
        down: weights of the rows of patches that a tile lies in at the rows of pixels, (h, patch rows).
        across: those of their columns at the columns of pixels, (w, patch columns).
        share: weights of the pixels, (h, w).
        first: intersection of row 0 of the result.
        rows: result, (intersections, patch rows · patch columns).
    """
    height, width = share.shape
    for task in numba.prange(order.size):
        tile = order[task]
        left, top = (tile % columns) * TILE_PX, (tile // columns) * TILE_PX
        parts, through = np.zeros((PIXELS, rows.shape[1]), np.float32), np.zeros(PIXELS, np.float32)
        for p in range(PIXELS):
            row, column = top + np.int64(PIXEL_Y[p]), left + np.int64(PIXEL_X[p])
            if row < height and column < width:
                through[p] = ONE
                for i in range(down.shape[1]):
                    weight = share[row, column] * down[row, i]
                    for j in range(across.shape[1]):
                        parts[p, i * across.shape[1] + j] = weight * across[column, j]
        _sum_values(tile, starts, ranks, geometry, left, top, through, parts, first, rows)


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True)
def add_rows(rows, first, slots, slot_starts, order, result):
    """Adds the rows of intersections, starting at ``first``, to those of their Gaussians, in the order of the tiles."""
    stop = first + rows.shape[0]
    for rank in numba.prange(order.size):
        total = result[order[rank]]
        for slot in range(slot_starts[rank], slot_starts[rank + 1]):
            place = slots[slot]
            if first <= place < stop:
                for i in range(rows.shape[1]):
                    total[i] += rows[place - first, i]
