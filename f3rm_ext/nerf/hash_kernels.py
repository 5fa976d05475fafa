"""The hash grid on the CPU: numba kernels for values and gradients, parallel over levels and blocks of points.

Each level's table (about 1 MiB at 2^17 × 2) stays in a core's cache while all points of a block read it. A single
thread writes each level's gradient, so the scatter needs no atomics. The kernels compute the same function as
``f3rm_ext.nerf.hash_grid.hash_grid_reference``.
"""

import functools
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.nerf.hash_levels import PRIMES, GridLevel

PRIME_Y, PRIME_Z = np.uint32(PRIMES[1]), np.uint32(PRIMES[2])
BLOCK = 2048
"""Points per task of the kernels over points."""
GROUP = 64
"""Points whose corners are found together, in loops that the compiler turns into vector instructions."""
ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
"""Typed constants: a bare literal would turn the kernels' arithmetic into float64."""
ONE_MORE = np.uint32(1)
_Geometry = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@no_type_check
@numba.njit(inline="always")
def _cell(points, i, scale):
    px, py, pz = points[i, 0] * scale + HALF, points[i, 1] * scale + HALF, points[i, 2] * scale + HALF
    x, y, z = np.int32(px), np.int32(py), np.int32(pz)
    return x, y, z, px - np.float32(x), py - np.float32(y), pz - np.float32(z)


@no_type_check
@numba.njit(inline="always")
def _find_corners(points, start, count, scale, resolution, base, size, hashed, rows, weights):
    """Writes table rows and weights of the eight corners of the cells of a group of points, (8, GROUP)."""
    if hashed:
        # Hashed levels have 2^n rows: the modulo is a mask.
        last = size - ONE_MORE
        for i in range(count):
            ix, iy, iz, fx, fy, fz = _cell(points, start + i, scale)
            x0, y0, z0 = np.uint32(ix), np.uint32(iy) * PRIME_Y, np.uint32(iz) * PRIME_Z
            x1, y1, z1 = np.uint32(x0 + ONE_MORE), np.uint32(y0 + PRIME_Y), np.uint32(z0 + PRIME_Z)
            a, b, c, d = y0 ^ z0, y1 ^ z0, y0 ^ z1, y1 ^ z1
            rows[0, i], rows[1, i] = base + ((x0 ^ a) & last), base + ((x1 ^ a) & last)
            rows[2, i], rows[3, i] = base + ((x0 ^ b) & last), base + ((x1 ^ b) & last)
            rows[4, i], rows[5, i] = base + ((x0 ^ c) & last), base + ((x1 ^ c) & last)
            rows[6, i], rows[7, i] = base + ((x0 ^ d) & last), base + ((x1 ^ d) & last)
            _write_weights(fx, fy, fz, i, weights)
    else:
        plane = np.uint32(resolution * resolution)
        for i in range(count):
            ix, iy, iz, fx, fy, fz = _cell(points, start + i, scale)
            first = np.uint32(np.uint32(ix) + resolution * np.uint32(iy) + plane * np.uint32(iz))
            for corner in range(8):
                row = np.uint32(first + np.uint32(corner & 1))
                row = np.uint32(row + resolution * np.uint32((corner >> 1) & 1) + plane * np.uint32(corner >> 2))
                # Beyond the upper faces, rows begin again; points that are not a number stay within the table.
                row = np.uint32(row - size) if row >= size else row
                rows[corner, i] = base + min(row, np.uint32(size - ONE_MORE))
            _write_weights(fx, fy, fz, i, weights)


@no_type_check
@numba.njit(inline="always")
def _write_weights(fx, fy, fz, i, weights):
    gx, gy, gz = ONE - fx, ONE - fy, ONE - fz
    a, b, c, d = gy * gz, fy * gz, gy * fz, fy * fz
    weights[0, i], weights[1, i], weights[2, i], weights[3, i] = gx * a, fx * a, gx * b, fx * b
    weights[4, i], weights[5, i], weights[6, i], weights[7, i] = gx * c, fx * c, gx * d, fx * d


@no_type_check
@numba.njit(parallel=True, fastmath=True, cache=True, nogil=True)
def _forward(points, table, scales, resolutions, offsets, sizes, hashed, order, out):
    n, width = points.shape[0], table.shape[1]
    blocks = (n + BLOCK - 1) // BLOCK
    for task in numba.prange(order.size * blocks):
        level, first = order[task // blocks], (task % blocks) * BLOCK
        scale, resolution, base, size = scales[level], resolutions[level], offsets[level], sizes[level]
        rows, weights = np.empty((8, GROUP), np.uint32), np.empty((8, GROUP), np.float32)
        for start in range(first, min(first + BLOCK, n), GROUP):
            count = min(GROUP, n - start)
            _find_corners(points, start, count, scale, resolution, base, size, hashed[level], rows, weights)
            # Sums of four and two values stay in registers.
            for i in range(count):
                f, q = level * width, 0
                while width - q >= 4:
                    a = b = c = d = ZERO
                    for corner in range(8):
                        w, row = weights[corner, i], rows[corner, i]
                        a, b = a + w * table[row, q], b + w * table[row, q + 1]
                        c, d = c + w * table[row, q + 2], d + w * table[row, q + 3]
                    out[start + i, f + q], out[start + i, f + q + 1] = a, b
                    out[start + i, f + q + 2], out[start + i, f + q + 3] = c, d
                    q += 4
                if width - q >= 2:
                    a = b = ZERO
                    for corner in range(8):
                        w, row = weights[corner, i], rows[corner, i]
                        a, b = a + w * table[row, q], b + w * table[row, q + 1]
                    out[start + i, f + q], out[start + i, f + q + 1] = a, b
                    q += 2
                if width > q:
                    a = ZERO
                    for corner in range(8):
                        a += weights[corner, i] * table[rows[corner, i], q]
                    out[start + i, f + q] = a


@no_type_check
@numba.njit(parallel=True, fastmath=True, cache=True, nogil=True)
def _backward_table(points, grad_out, scales, resolutions, offsets, sizes, hashed, order, grad_table):
    n, width = points.shape[0], grad_table.shape[1]
    for task in numba.prange(order.size):
        level = order[task]
        scale, resolution, base, size = scales[level], resolutions[level], offsets[level], sizes[level]
        rows, weights = np.empty((8, GROUP), np.uint32), np.empty((8, GROUP), np.float32)
        for start in range(0, n, GROUP):
            count = min(GROUP, n - start)
            _find_corners(points, start, count, scale, resolution, base, size, hashed[level], rows, weights)
            for i in range(count):
                f, q = level * width, 0
                while width - q >= 4:
                    a, b = grad_out[start + i, f + q], grad_out[start + i, f + q + 1]
                    c, d = grad_out[start + i, f + q + 2], grad_out[start + i, f + q + 3]
                    for corner in range(8):
                        w, row = weights[corner, i], rows[corner, i]
                        grad_table[row, q] += w * a
                        grad_table[row, q + 1] += w * b
                        grad_table[row, q + 2] += w * c
                        grad_table[row, q + 3] += w * d
                    q += 4
                while q < width:
                    a = grad_out[start + i, f + q]
                    for corner in range(8):
                        grad_table[rows[corner, i], q] += weights[corner, i] * a
                    q += 1


@no_type_check
@numba.njit(parallel=True, fastmath=True, cache=True, nogil=True)
def _backward_points(points, table, grad_out, scales, resolutions, offsets, sizes, hashed, grad_points):
    n, width, num_levels = points.shape[0], table.shape[1], scales.size
    for group in numba.prange((n + GROUP - 1) // GROUP):
        start = group * GROUP
        count = min(GROUP, n - start)
        rows, weights = np.empty((8, GROUP), np.uint32), np.empty((8, GROUP), np.float32)
        dots = np.empty(8, np.float32)
        for i in range(start, start + count):
            grad_points[i, 0] = grad_points[i, 1] = grad_points[i, 2] = ZERO
        for level in range(num_levels):
            scale, resolution, base, size = scales[level], resolutions[level], offsets[level], sizes[level]
            _find_corners(points, start, count, scale, resolution, base, size, hashed[level], rows, weights)
            for i in range(count):
                for corner in range(8):
                    dot, row = ZERO, rows[corner, i]
                    for f in range(width):
                        dot += table[row, f] * grad_out[start + i, level * width + f]
                    dots[corner] = dot * scale
                _, _, _, x, y, z = _cell(points, start + i, scale)
                # Differences along the edges of the cell, interpolated over its other two axes.
                gx = (dots[1] - dots[0]) * (ONE - y) * (ONE - z) + (dots[3] - dots[2]) * y * (ONE - z)
                gx += (dots[5] - dots[4]) * (ONE - y) * z + (dots[7] - dots[6]) * y * z
                gy = (dots[2] - dots[0]) * (ONE - x) * (ONE - z) + (dots[3] - dots[1]) * x * (ONE - z)
                gy += (dots[6] - dots[4]) * (ONE - x) * z + (dots[7] - dots[5]) * x * z
                gz = (dots[4] - dots[0]) * (ONE - x) * (ONE - y) + (dots[5] - dots[1]) * x * (ONE - y)
                gz += (dots[6] - dots[2]) * (ONE - x) * y + (dots[7] - dots[3]) * x * y
                grad_points[start + i, 0] += gx
                grad_points[start + i, 1] += gy
                grad_points[start + i, 2] += gz


@functools.lru_cache(maxsize=64)
def _arrays(levels: tuple[GridLevel, ...]) -> tuple[_Geometry, np.ndarray]:
    """The geometry of a grid as arrays for the kernels, and the order in which tasks take its levels."""
    geometry = (
        np.array([level.scale for level in levels], dtype=np.float32),
        np.array([level.resolution for level in levels], dtype=np.uint32),
        np.array([level.offset for level in levels], dtype=np.uint32),
        np.array([level.size for level in levels], dtype=np.uint32),
        np.array([level.is_hashed for level in levels]),
    )
    # prange gives each thread a contiguous run of tasks, so slow (hashed, fine) levels are spread over the runs.
    indices = np.arange(len(levels))
    return geometry, np.concatenate([indices[0::2], indices[1::2]])


class _HashGridFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, points: Tensor, table: Tensor, levels: tuple[GridLevel, ...]) -> Tensor:
        geometry, order = _arrays(levels)
        points = points.detach().contiguous()
        out = torch.empty(points.shape[0], len(levels) * table.shape[1])
        _forward(points.numpy(), table.detach().numpy(), *geometry, order, out.numpy())
        ctx.save_for_backward(points, table)
        ctx.levels = levels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, None]:
        points, table = ctx.saved_tensors
        geometry, order = _arrays(ctx.levels)
        grad = grad_outputs[0].contiguous().numpy()
        grad_points = grad_table = None
        if ctx.needs_input_grad[1]:
            grad_table = torch.zeros_like(table)
            _backward_table(points.numpy(), grad, *geometry, order, grad_table.numpy())
        if ctx.needs_input_grad[0]:
            grad_points = torch.empty_like(points)
            _backward_points(points.numpy(), table.detach().numpy(), grad, *geometry, grad_points.numpy())
        return grad_points, grad_table, None


def hash_grid_numba(
    points: Float[Tensor, "points 3"], table: Float[Tensor, "entries level_feat"], levels: tuple[GridLevel, ...]
) -> Float[Tensor, "points feat"]:
    """Interpolates like ``hash_grid_reference``, on the CPU in float32; differentiable once."""
    return _HashGridFunction.apply(points, table, levels)  # type: ignore[return-value]
