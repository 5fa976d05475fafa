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
BLOCK = 8192
"""Points per task of the forward kernel."""
ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
"""Typed constants: a bare literal would turn the kernels' arithmetic into float64."""


@no_type_check
@numba.njit(inline="always")
def _corner_row(x, y, z, corner, resolution, size, hashed):
    vx = np.uint32(x + (corner & 1))
    vy = np.uint32(y + ((corner >> 1) & 1))
    vz = np.uint32(z + ((corner >> 2) & 1))
    if hashed:
        # Hashed levels have 2^n rows: the modulo is a mask.
        return np.int64((vx ^ (vy * PRIME_Y) ^ (vz * PRIME_Z)) & np.uint32(size - 1))
    row = np.int64(vx + resolution * (vy + resolution * vz))
    return row if row < size else row % size


@no_type_check
@numba.njit(inline="always")
def _cell(points, i, scale):
    px, py, pz = points[i, 0] * scale + HALF, points[i, 1] * scale + HALF, points[i, 2] * scale + HALF
    x, y, z = np.int32(px), np.int32(py), np.int32(pz)
    return x, y, z, px - np.float32(x), py - np.float32(y), pz - np.float32(z)


@no_type_check
@numba.njit(inline="always")
def _side(fraction, upper):
    return fraction if upper else ONE - fraction


@no_type_check
@numba.njit(parallel=True, fastmath=True, cache=True, nogil=True)
def _forward(points, table, scales, resolutions, offsets, sizes, hashed, order, out):
    n, width = points.shape[0], table.shape[1]
    blocks = (n + BLOCK - 1) // BLOCK
    for task in numba.prange(order.size * blocks):
        level = order[task // blocks]
        start = (task % blocks) * BLOCK
        scale, res, base, size = scales[level], resolutions[level], offsets[level], sizes[level]
        column = level * width
        for i in range(start, min(start + BLOCK, n)):
            x, y, z, fx, fy, fz = _cell(points, i, scale)
            for f in range(width):
                out[i, column + f] = ZERO
            for corner in range(8):
                w = _side(fx, corner & 1) * _side(fy, corner & 2) * _side(fz, corner & 4)
                row = base + _corner_row(x, y, z, corner, res, size, hashed[level])
                for f in range(width):
                    out[i, column + f] += w * table[row, f]


@no_type_check
@numba.njit(parallel=True, fastmath=True, cache=True, nogil=True)
def _backward_table(points, grad_out, scales, resolutions, offsets, sizes, hashed, order, grad_table):
    n, width = points.shape[0], grad_table.shape[1]
    for task in numba.prange(order.size):
        level = order[task]
        scale, res, base, size = scales[level], resolutions[level], offsets[level], sizes[level]
        column = level * width
        for i in range(n):
            x, y, z, fx, fy, fz = _cell(points, i, scale)
            for corner in range(8):
                w = _side(fx, corner & 1) * _side(fy, corner & 2) * _side(fz, corner & 4)
                row = base + _corner_row(x, y, z, corner, res, size, hashed[level])
                for f in range(width):
                    grad_table[row, f] += w * grad_out[i, column + f]


@no_type_check
@numba.njit(parallel=True, fastmath=True, cache=True, nogil=True)
def _backward_points(points, table, grad_out, scales, resolutions, offsets, sizes, hashed, grad_points):
    n, width, num_levels = points.shape[0], table.shape[1], scales.size
    for i in numba.prange(n):
        gx, gy, gz = ZERO, ZERO, ZERO
        for level in range(num_levels):
            scale, res, base, size = scales[level], resolutions[level], offsets[level], sizes[level]
            x, y, z, fx, fy, fz = _cell(points, i, scale)
            for corner in range(8):
                row = base + _corner_row(x, y, z, corner, res, size, hashed[level])
                dot = ZERO
                for f in range(width):
                    dot += table[row, f] * grad_out[i, level * width + f]
                wx, wy, wz = _side(fx, corner & 1), _side(fy, corner & 2), _side(fz, corner & 4)
                dot *= scale
                gx += dot * wy * wz if corner & 1 else -dot * wy * wz
                gy += dot * wx * wz if corner & 2 else -dot * wx * wz
                gz += dot * wx * wy if corner & 4 else -dot * wx * wy
        grad_points[i, 0], grad_points[i, 1], grad_points[i, 2] = gx, gy, gz


class _LevelArrays:
    """The geometry of a grid as arrays for the kernels."""

    def __init__(self, levels: tuple[GridLevel, ...]) -> None:
        self.scales = np.array([level.scale for level in levels], dtype=np.float32)
        self.resolutions = np.array([level.resolution for level in levels], dtype=np.uint32)
        self.offsets = np.array([level.offset for level in levels], dtype=np.int64)
        self.sizes = np.array([level.size for level in levels], dtype=np.int64)
        self.hashed = np.array([level.is_hashed for level in levels])
        # prange gives each thread a contiguous run of tasks, so slow (hashed, fine) levels are spread over the runs.
        indices = np.arange(len(levels))
        self.order = np.concatenate([indices[0::2], indices[1::2]])

    @property
    def geometry(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.scales, self.resolutions, self.offsets, self.sizes, self.hashed


@functools.lru_cache(maxsize=64)
def _arrays(levels: tuple[GridLevel, ...]) -> _LevelArrays:
    return _LevelArrays(levels)


class _HashGridFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, points: Tensor, table: Tensor, levels: tuple[GridLevel, ...]) -> Tensor:
        arrays = _arrays(levels)
        points = points.detach().contiguous()
        out = torch.empty(points.shape[0], len(levels) * table.shape[1])
        _forward(points.numpy(), table.detach().numpy(), *arrays.geometry, arrays.order, out.numpy())
        ctx.save_for_backward(points, table)
        ctx.arrays = arrays
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, None]:
        points, table = ctx.saved_tensors
        arrays: _LevelArrays = ctx.arrays
        grad = grad_outputs[0].contiguous().numpy()
        grad_points = grad_table = None
        if ctx.needs_input_grad[1]:
            grad_table = torch.zeros_like(table)
            _backward_table(points.numpy(), grad, *arrays.geometry, arrays.order, grad_table.numpy())
        if ctx.needs_input_grad[0]:
            grad_points = torch.empty_like(points)
            _backward_points(points.numpy(), table.detach().numpy(), grad, *arrays.geometry, grad_points.numpy())
        return grad_points, grad_table, None


def hash_grid_numba(
    points: Float[Tensor, "points 3"], table: Float[Tensor, "entries level_feat"], levels: tuple[GridLevel, ...]
) -> Float[Tensor, "points feat"]:
    """Interpolates like ``hash_grid_reference``, on the CPU in float32; differentiable once."""
    return _HashGridFunction.apply(points, table, levels)  # type: ignore[return-value]
