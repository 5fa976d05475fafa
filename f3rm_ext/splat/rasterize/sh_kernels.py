"""View-dependent colours on the CPU: numba kernels for their values and for steps of coefficients, one pass each.

The definition is :func:`f3rm_ext.splat.rasterize.spherical_harmonics.sh_bases`.
"""

from typing import no_type_check

import numba
import numpy as np

from f3rm_ext.splat.rasterize.spherical_harmonics import C1, C2_XX, C2_XY, C2_ZZ, C3_0, C3_1, C3_2, C3_3

CHUNK = 2048
"""Gaussians per task."""


@no_type_check
@numba.njit(error_model="numpy")
def _fill_bases(degree, x, y, z, bases):
    """Evaluates harmonics of degrees 1 to 3 in a direction of length 1."""
    bases[0], bases[1], bases[2] = -C1 * y, C1 * z, -C1 * x
    if degree >= 2:
        xx, yy, zz = x * x, y * y, z * z
        bases[3], bases[4], bases[5] = C2_XY * x * y, -C2_XY * y * z, C2_ZZ * (3.0 * zz - 1.0)
        bases[6], bases[7] = -C2_XY * x * z, C2_XX * (xx - yy)
        if degree >= 3:
            bases[8], bases[9] = -C3_3 * y * (3.0 * xx - yy), C3_2 * x * y * z
            bases[10], bases[11] = -C3_1 * y * (5.0 * zz - 1.0), C3_0 * z * (5.0 * zz - 3.0)
            bases[12], bases[13] = -C3_1 * x * (5.0 * zz - 1.0), 0.5 * C3_2 * z * (xx - yy)
            bases[14] = -C3_3 * x * (xx - 3.0 * yy)


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def evaluate(degree, count, directions, rest, colors):
    """Writes the harmonics up to a degree in directions of length 1; `rest` has `count` coefficients of each colour."""
    total = directions.shape[0]
    for task in numba.prange((total + CHUNK - 1) // CHUNK):
        bases = np.empty(15, np.float64)
        for i in range(task * CHUNK, min((task + 1) * CHUNK, total)):
            x, y, z = np.float64(directions[i, 0]), np.float64(directions[i, 1]), np.float64(directions[i, 2])
            _fill_bases(degree, x, y, z, bases)
            red, green, blue = 0.0, 0.0, 0.0
            for k in range(count):
                red += bases[k] * rest[i, k, 0]
                green += bases[k] * rest[i, k, 1]
                blue += bases[k] * rest[i, k, 2]
            colors[i, 0], colors[i, 1], colors[i, 2] = red, green, blue


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def update(value, first, second, seen, directions, colors, degree, count, step, rate, root, eps, beta1, beta2):
    """Takes a step of :class:`~f3rm_ext.splat.memory.adam.PackedAdam`, whose gradients it unpacks on the way.

    Args:
        value: coefficients, (gaussians, width), changed in place like their moments, first and second, and seen.
        directions: from the cameras to the Gaussians, length 1, (images, gaussians, 3).
        colors: gradients with respect to the colours; all 0 where a Gaussian is not visible.
        count: coefficients of each colour that the degree has.
        step: of the optimiser, from 1.
        rate: minus the learning rate, over the correction of first moments.
        root: root of the correction of second moments.
    """
    total, width = value.shape
    ratio = beta1 / np.sqrt(beta2)
    add1, keep2, add2 = np.float32(1 - beta1), np.float32(beta2), np.float32(1 - beta2)
    rate, root, eps = np.float32(rate), np.float32(root), np.float32(eps)
    for task in numba.prange((total + CHUNK - 1) // CHUNK):
        bases, gradient = np.empty(15, np.float64), np.empty(width, np.float32)
        for i in range(task * CHUNK, min((task + 1) * CHUNK, total)):
            shown = False
            gradient[:] = np.float32(0)
            for picture in range(colors.shape[0]):
                red, green, blue = colors[picture, i, 0], colors[picture, i, 1], colors[picture, i, 2]
                if red != 0 or green != 0 or blue != 0:
                    shown = True
                    x, y, z = directions[picture, i, 0], directions[picture, i, 1], directions[picture, i, 2]
                    _fill_bases(degree, x, y, z, bases)
                    for k in range(count):
                        basis = np.float32(bases[k])
                        gradient[3 * k] += basis * red
                        gradient[3 * k + 1] += basis * green
                        gradient[3 * k + 2] += basis * blue
            # A row that no picture shows waits: its decay and momentum are caught up when it is shown again.
            if not shown:
                continue
            missed = step - 1 - seen[i]
            seen[i] = step
            decay1, decay2 = np.float32(beta1**missed), np.float32(beta2**missed)
            series = np.float32((1 - ratio**missed) * (ratio / (1 - ratio)))
            for j in range(width):
                m, v, g = first[i, j], second[i, j], gradient[j]
                # The momentum of the steps that the row has missed: a geometric series of β₁ / √β₂.
                change = series * (m / (np.sqrt(v) / root + eps) * rate)
                m, v = decay1 * m, decay2 * v
                m, v = m + add1 * (g - m), keep2 * v + add2 * g * g
                first[i, j], second[i, j] = m, v
                value[i, j] += change + m / (np.sqrt(v) / root + eps) * rate
