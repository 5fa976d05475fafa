"""View-dependent colours on the CPU: numba kernels for values, gradients and steps of coefficients, one pass each.

The definition is :func:`f3rm_ext.splat.rasterize.sh_bases.sh_bases`.
"""

import math
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.splat.gaussians import SH_C0, sh_rest_count
from f3rm_ext.splat.rasterize.sh_bases import C1, C2_XX, C2_XY, C2_ZZ, C3_0, C3_1, C3_2, C3_3

CHUNK = 2048
"""Gaussians per task."""
TINY = 1e-12
"""Lower limit of a direction's length in divisions, as in torch's normalize."""


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
@numba.njit(error_model="numpy")
def _slope(degree, x, y, z, g):
    """Returns the gradient of Σ_k g_k Y_k with respect to the direction."""
    gx, gy, gz = -C1 * g[2], -C1 * g[0], C1 * g[1]
    if degree >= 2:
        gx += C2_XY * (y * g[3] - z * g[6]) + 2.0 * C2_XX * x * g[7]
        gy += C2_XY * (x * g[3] - z * g[4]) - 2.0 * C2_XX * y * g[7]
        gz += 6.0 * C2_ZZ * z * g[5] - C2_XY * (y * g[4] + x * g[6])
        if degree >= 3:
            xx, yy, zz = x * x, y * y, z * z
            gx += C3_2 * (y * z * g[9] + x * z * g[13]) - C3_1 * (5.0 * zz - 1.0) * g[12]
            gx -= C3_3 * (6.0 * x * y * g[8] + 3.0 * (xx - yy) * g[14])
            gy += C3_2 * (x * z * g[9] - y * z * g[13]) - C3_1 * (5.0 * zz - 1.0) * g[10]
            gy -= C3_3 * (3.0 * (xx - yy) * g[8] - 6.0 * x * y * g[14])
            gz += C3_2 * (x * y * g[9] + 0.5 * (xx - yy) * g[13]) - 10.0 * C3_1 * z * (y * g[10] + x * g[12])
            gz += C3_0 * (15.0 * zz - 3.0) * g[11]
    return gx, gy, gz


@no_type_check
@numba.njit(error_model="numpy")
def _unit(directions, i):
    x, y, z = np.float64(directions[i, 0]), np.float64(directions[i, 1]), np.float64(directions[i, 2])
    length = max(math.sqrt(x * x + y * y + z * z), TINY)
    return x / length, y / length, z / length, length


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def evaluate(degree, count, directions, dc, rest, offset, colors):
    """Writes an offset plus the harmonics up to a degree, of which `count` are in `rest`."""
    total = directions.shape[0]
    for task in numba.prange((total + CHUNK - 1) // CHUNK):
        bases = np.empty(15, np.float64)
        for i in range(task * CHUNK, min((task + 1) * CHUNK, total)):
            x, y, z, _ = _unit(directions, i)
            _fill_bases(degree, x, y, z, bases)
            red, green, blue = (SH_C0 * dc[i, 0] + offset, SH_C0 * dc[i, 1] + offset, SH_C0 * dc[i, 2] + offset)
            for k in range(count):
                red += bases[k] * rest[i, k, 0]
                green += bases[k] * rest[i, k, 1]
                blue += bases[k] * rest[i, k, 2]
            colors[i, 0], colors[i, 1], colors[i, 2] = red, green, blue


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _backward(degree, count, directions, rest, upstream, g_directions, g_rest):
    total = directions.shape[0]
    for task in numba.prange((total + CHUNK - 1) // CHUNK):
        bases, by_basis = np.empty(15, np.float64), np.empty(15, np.float64)
        for i in range(task * CHUNK, min((task + 1) * CHUNK, total)):
            x, y, z, length = _unit(directions, i)
            _fill_bases(degree, x, y, z, bases)
            red, green, blue = upstream[i, 0], upstream[i, 1], upstream[i, 2]
            for k in range(count):
                g_rest[i, k, 0], g_rest[i, k, 1], g_rest[i, k, 2] = bases[k] * red, bases[k] * green, bases[k] * blue
                by_basis[k] = rest[i, k, 0] * red + rest[i, k, 1] * green + rest[i, k, 2] * blue
            gx, gy, gz = _slope(degree, x, y, z, by_basis)
            along = gx * x + gy * y + gz * z
            g_directions[i, 0] = (gx - x * along) / length
            g_directions[i, 1] = (gy - y * along) / length
            g_directions[i, 2] = (gz - z * along) / length


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
            if not shown:
                continue
            missed = step - 1 - seen[i]
            seen[i] = step
            decay1, decay2 = np.float32(beta1**missed), np.float32(beta2**missed)
            series = np.float32((1 - ratio**missed) * (ratio / (1 - ratio)))
            for j in range(width):
                m, v, g = first[i, j], second[i, j], gradient[j]
                # The momentum of the steps that the row has missed.
                change = series * (m / (np.sqrt(v) / root + eps) * rate)
                m, v = decay1 * m, decay2 * v
                m, v = m + add1 * (g - m), keep2 * v + add2 * g * g
                first[i, j], second[i, j] = m, v
                value[i, j] += change + m / (np.sqrt(v) / root + eps) * rate


class NumbaHarmonics(torch.autograd.Function):
    """Colours, ½ + harmonics, up to a degree from 1 to 3; not clamped; float32, on the CPU."""

    @staticmethod
    def forward(ctx: Any, degree: int, directions: Tensor, dc: Tensor, rest: Tensor) -> Tensor:
        directions, dc, rest = (value.detach().contiguous() for value in (directions, dc, rest))
        colors = torch.empty(len(dc), 3)
        evaluate(degree, sh_rest_count(degree), directions.numpy(), dc.numpy(), rest.numpy(), 0.5, colors.numpy())
        ctx.save_for_backward(directions, rest)
        ctx.degree = degree
        return colors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor | None, Tensor, Tensor | None]:
        directions, rest = ctx.saved_tensors
        upstream, count = grads[0].contiguous(), sh_rest_count(ctx.degree)
        g_directions, g_rest = torch.empty_like(directions), torch.empty_like(rest)
        g_rest[:, count:] = 0.0
        _backward(
            ctx.degree, count, directions.numpy(), rest.numpy(), upstream.numpy(), g_directions.numpy(), g_rest.numpy()
        )  # fmt: skip
        _, by_direction, _, by_rest = ctx.needs_input_grad
        return None, g_directions if by_direction else None, SH_C0 * upstream, g_rest if by_rest else None
