"""The neighbours' field on the CPU: numba kernels with analytic gradients, parallel over blocks of points.

They must agree with the definition, :func:`f3rm_ext.splat.regularization.field.field_reference`.
"""

from functools import partial
from typing import no_type_check

import numba
import numpy as np

from f3rm_ext.memory.shapes import run_kernel
from f3rm_ext.splat.regularization.table import MIN_WEIGHT

FAR = np.float32(170.0)
"""Squared distance, in standard deviations, beyond which G is taken as 0: exp(−85) = 1e-37."""
GRADIENT_BYTES = 256 << 20
"""Upper limit of the gradient tables of all threads together; there is at least one."""
FLAGS = {"contract", "reassoc", "arcp", "nsz", "afn"}
"""Fast-math flags that still honour NaN and infinity."""
ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
LEAST = np.float32(MIN_WEIGHT)


@no_type_check
@numba.njit(inline="always")
def _share(table, j, px, py, pz):
    """Returns offset, whitened offset and G of one Gaussian at one point."""
    dx, dy, dz = px - table[j, 0], py - table[j, 1], pz - table[j, 2]
    mx = table[j, 3] * dx + table[j, 4] * dy + table[j, 5] * dz
    my = table[j, 6] * dx + table[j, 7] * dy + table[j, 8] * dz
    mz = table[j, 9] * dx + table[j, 10] * dy + table[j, 11] * dz
    squared = mx * mx + my * my + mz * mz
    falloff = ZERO if squared > FAR else np.exp(-HALF * squared)
    return dx, dy, dz, mx, my, mz, falloff


@no_type_check
@numba.njit(inline="always")
def _signed_weight(table, j, g, dx, dy, dz, share):
    height = table[j, 14] * dx + table[j, 15] * dy + table[j, 16] * dz
    along = table[j, 14] * table[g, 14] + table[j, 15] * table[g, 15] + table[j, 16] * table[g, 16]
    weight = share * abs(height) / (table[j, 13] * table[j, 13])
    return weight, -weight if along < ZERO else weight


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _forward(points, owners, table, neighbours, density, beta, direction, totals):
    count = neighbours.shape[1]
    for i in numba.prange(points.shape[0]):
        g = owners[i]
        px, py, pz = points[i, 0], points[i, 1], points[i, 2]
        d, sizes, present, total = ZERO, ZERO, ZERO, ZERO
        nx, ny, nz = ZERO, ZERO, ZERO
        for k in range(count):
            j = neighbours[g, k]
            if j < 0:
                continue
            present += ONE
            sizes += table[j, 13]
            dx, dy, dz, _, _, _, falloff = _share(table, j, px, py, pz)
            share = table[j, 12] * falloff
            d += share
            weight, signed = _signed_weight(table, j, g, dx, dy, dz, share)
            total += weight
            nx += signed * table[j, 14]
            ny += signed * table[j, 15]
            nz += signed * table[j, 16]
        density[i] = d
        beta[i] = sizes / max(present, ONE)
        totals[i] = total
        if total > LEAST:
            direction[i, 0], direction[i, 1], direction[i, 2] = nx / total, ny / total, nz / total
        else:
            for a in range(3):
                direction[i, a] = table[g, 14 + a]


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _backward(
    points, owners, table, neighbours, totals, grad_density, grad_beta, grad_direction, grad_points, grad_tables
):
    blocks, n, count = grad_tables.shape[0], points.shape[0], neighbours.shape[1]
    for block in numba.prange(blocks):
        grad = grad_tables[block]
        for i in range(block * n // blocks, (block + 1) * n // blocks):
            g = owners[i]
            px, py, pz = points[i, 0], points[i, 1], points[i, 2]
            gd, total = grad_density[i], totals[i]
            hx, hy, hz = grad_direction[i, 0], grad_direction[i, 1], grad_direction[i, 2]
            sx, sy, sz = ZERO, ZERO, ZERO
            present = ZERO
            for k in range(count):
                if neighbours[g, k] >= 0:
                    present += ONE
            gb = grad_beta[i] / max(present, ONE)
            if not total > LEAST:
                grad[g, 14] += hx
                grad[g, 15] += hy
                grad[g, 16] += hz
            for k in range(count):
                j = neighbours[g, k]
                if j < 0:
                    continue
                grad[j, 13] += gb
                dx, dy, dz, mx, my, mz, falloff = _share(table, j, px, py, pz)
                if falloff == ZERO:
                    continue
                share = table[j, 12] * falloff
                grad[j, 12] += gd * falloff
                # ∂d/∂m = −α G m, then the chain rule for the whitening matrix and the offset.
                factor = -gd * share
                qx, qy, qz = factor * mx, factor * my, factor * mz
                grad[j, 3] += qx * dx
                grad[j, 4] += qx * dy
                grad[j, 5] += qx * dz
                grad[j, 6] += qy * dx
                grad[j, 7] += qy * dy
                grad[j, 8] += qy * dz
                grad[j, 9] += qz * dx
                grad[j, 10] += qz * dy
                grad[j, 11] += qz * dz
                ox = table[j, 3] * qx + table[j, 6] * qy + table[j, 9] * qz
                oy = table[j, 4] * qx + table[j, 7] * qy + table[j, 10] * qz
                oz = table[j, 5] * qx + table[j, 8] * qy + table[j, 11] * qz
                grad[j, 0] -= ox
                grad[j, 1] -= oy
                grad[j, 2] -= oz
                sx += ox
                sy += oy
                sz += oz
                if total > LEAST:
                    _, signed = _signed_weight(table, j, g, dx, dy, dz, share)
                    signed /= total
                    grad[j, 14] += signed * hx
                    grad[j, 15] += signed * hy
                    grad[j, 16] += signed * hz
            grad_points[i, 0], grad_points[i, 1], grad_points[i, 2] = sx, sy, sz


def table_count(table_bytes: int) -> int:
    """Returns how many gradient tables the backward pass has: one per thread, within :data:`GRADIENT_BYTES`."""
    return max(1, min(numba.get_num_threads(), GRADIENT_BYTES // max(1, table_bytes)))


evaluate = partial(run_kernel, _forward)
"""Writes density, thickness, direction and the sum of weights of each point."""
differentiate = partial(run_kernel, _backward)
"""Writes the gradients by points, and adds those by the table to tables of zeros."""
