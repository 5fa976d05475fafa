"""The neighbours' field on CUDA: Triton kernels with analytic gradients, one launch each way.

They must agree with the definition, :func:`f3rm_ext.splat.regularization.field.field_reference`.
"""

import math
import sys
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from f3rm_ext.splat.regularization.field import KernelField
from f3rm_ext.splat.regularization.table import ALPHA, MIN_WEIGHT, WIDTH
from f3rm_ext.splat.regularization.triton_pixels import load3, store3
from f3rm_ext.splat.triton_kernels import launch

BLOCK = 128
"""Points per program."""
FAR = tl.constexpr(170.0)
"""Squared distance, in standard deviations, beyond which G is taken as 0: exp(−85) = 1e-37."""
LEAST = tl.constexpr(MIN_WEIGHT)
ROW = tl.constexpr(WIDTH)


@no_type_check
@triton.jit
def _load_point(points, owners, i, there):
    """Returns the owners and the coordinates of points."""
    px, py, pz = load3(points, i, there)
    return tl.load(owners + i, mask=there, other=0), px, py, pz


@no_type_check
@triton.jit
def _load_whiten(row, there):
    """Returns S⁻¹ Rᵀ by rows."""
    a, b, c = load3(row, 1, there)
    d, e, f = load3(row, 2, there)
    g, h, i = load3(row, 3, there)
    return a, b, c, d, e, f, g, h, i


@no_type_check
@triton.jit
def _falloff(mx, my, mz):
    """Returns G at whitened offsets."""
    squared = mx * mx + my * my + mz * mz
    return tl.where(squared > FAR, 0.0, tl.exp(-0.5 * squared))


@no_type_check
@triton.jit
def _signed_weight(nx, ny, nz, ox, oy, oz, dx, dy, dz, size, share):
    """Returns w before its division by the sum, without and with its sign."""
    height = tl.abs(nx * dx + ny * dy + nz * dz)
    weight = share * height / (size * size)
    return weight, tl.where(nx * ox + ny * oy + nz * oz < 0.0, -weight, weight)


@no_type_check
@triton.jit
def _forward(
    points, owners, table, neighbours, density, beta, direction, totals, count, K: tl.constexpr, SIZE: tl.constexpr
):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = i < count
    g, px, py, pz = _load_point(points, owners, i, there)
    ox, oy, oz = load3(table + g * ROW + 14, 0, there)
    d = tl.zeros([SIZE], tl.float32)
    sizes = tl.zeros([SIZE], tl.float32)
    present = tl.zeros([SIZE], tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    sx = tl.zeros([SIZE], tl.float32)
    sy = tl.zeros([SIZE], tl.float32)
    sz = tl.zeros([SIZE], tl.float32)
    for k in range(K):
        j = tl.load(neighbours + g * K + k, mask=there, other=-1).to(tl.int64)
        known = j >= 0
        row = table + j * ROW
        mean_x, mean_y, mean_z = load3(row, 0, known)
        dx, dy, dz = px - mean_x, py - mean_y, pz - mean_z
        w0, w1, w2, w3, w4, w5, w6, w7, w8 = _load_whiten(row, known)
        alpha = tl.load(row + 12, mask=known, other=0.0)
        size = tl.load(row + 13, mask=known, other=1.0)
        nx, ny, nz = load3(row + 14, 0, known)
        g_ = _falloff(w0 * dx + w1 * dy + w2 * dz, w3 * dx + w4 * dy + w5 * dz, w6 * dx + w7 * dy + w8 * dz)
        share = alpha * g_
        weight, signed = _signed_weight(nx, ny, nz, ox, oy, oz, dx, dy, dz, size, share)
        d += share
        sizes += tl.where(known, size, 0.0)
        present += tl.where(known, 1.0, 0.0)
        total += weight
        sx += signed * nx
        sy += signed * ny
        sz += signed * nz
    tl.store(density + i, d, mask=there)
    tl.store(beta + i, sizes / tl.maximum(present, 1.0), mask=there)
    tl.store(totals + i, total, mask=there)
    weighed = total > LEAST
    divisor = tl.where(weighed, total, 1.0)
    sx, sy, sz = sx / divisor, sy / divisor, sz / divisor
    store3(direction, i, tl.where(weighed, sx, ox), tl.where(weighed, sy, oy), tl.where(weighed, sz, oz), there)


@no_type_check
@triton.jit
def _add3(target, x, y, z, there):
    """Adds vectors to rows that other threads may be adding to."""
    tl.atomic_add(target, x, mask=there, sem="relaxed")
    tl.atomic_add(target + 1, y, mask=there, sem="relaxed")
    tl.atomic_add(target + 2, z, mask=there, sem="relaxed")


@no_type_check
@triton.jit
def _backward(
    points, owners, table, neighbours, totals, grad_density, grad_beta, grad_direction, grad_points, grad_table, count,
    K: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = i < count
    g, px, py, pz = _load_point(points, owners, i, there)
    ox, oy, oz = load3(table + g * ROW + 14, 0, there)
    gd = tl.load(grad_density + i, mask=there, other=0.0)
    gb = tl.load(grad_beta + i, mask=there, other=0.0)
    hx, hy, hz = load3(grad_direction, i, there)
    total = tl.load(totals + i, mask=there, other=0.0)
    weighed = total > LEAST
    divisor = tl.where(weighed, total, 1.0)
    _add3(grad_table + g * ROW + 14, hx, hy, hz, there & (total <= LEAST))
    present = tl.zeros([SIZE], tl.float32)
    for k in range(K):
        j = tl.load(neighbours + g * K + k, mask=there, other=-1)
        present += tl.where(j >= 0, 1.0, 0.0)
    gb = gb / tl.maximum(present, 1.0)
    sx = tl.zeros([SIZE], tl.float32)
    sy = tl.zeros([SIZE], tl.float32)
    sz = tl.zeros([SIZE], tl.float32)
    for k in range(K):
        j = tl.load(neighbours + g * K + k, mask=there, other=-1).to(tl.int64)
        known = j >= 0
        row, grad = table + j * ROW, grad_table + j * ROW
        tl.atomic_add(grad + 13, gb, mask=known, sem="relaxed")
        mean_x, mean_y, mean_z = load3(row, 0, known)
        dx, dy, dz = px - mean_x, py - mean_y, pz - mean_z
        w0, w1, w2, w3, w4, w5, w6, w7, w8 = _load_whiten(row, known)
        mx = w0 * dx + w1 * dy + w2 * dz
        my = w3 * dx + w4 * dy + w5 * dz
        mz = w6 * dx + w7 * dy + w8 * dz
        falloff = _falloff(mx, my, mz)
        # Most neighbours are too far from the point to matter: they cost no additions.
        near = known & (falloff != 0.0)
        alpha = tl.load(row + 12, mask=near, other=0.0)
        size = tl.load(row + 13, mask=near, other=1.0)
        nx, ny, nz = load3(row + 14, 0, near)
        share = alpha * falloff
        tl.atomic_add(grad + 12, gd * falloff, mask=near, sem="relaxed")
        # ∂d/∂m = −α G m, then the chain rule for the whitening matrix and the offset.
        factor = -gd * share
        qx, qy, qz = factor * mx, factor * my, factor * mz
        _add3(grad + 3, qx * dx, qx * dy, qx * dz, near)
        _add3(grad + 6, qy * dx, qy * dy, qy * dz, near)
        _add3(grad + 9, qz * dx, qz * dy, qz * dz, near)
        bx = w0 * qx + w3 * qy + w6 * qz
        by = w1 * qx + w4 * qy + w7 * qz
        bz = w2 * qx + w5 * qy + w8 * qz
        _add3(grad, -bx, -by, -bz, near)
        sx += tl.where(near, bx, 0.0)
        sy += tl.where(near, by, 0.0)
        sz += tl.where(near, bz, 0.0)
        _, signed = _signed_weight(nx, ny, nz, ox, oy, oz, dx, dy, dz, size, share)
        signed = signed / divisor
        _add3(grad + 14, signed * hx, signed * hy, signed * hz, near & weighed)
    store3(grad_points, i, sx, sy, sz, there)


def table_count(table_bytes: int) -> int:
    """Returns how many gradient tables the backward pass has."""
    return 1


def evaluate(
    points: Tensor, owners: Tensor, table: Tensor, neighbours: Tensor,
    density: Tensor, beta: Tensor, direction: Tensor, totals: Tensor,
) -> None:  # fmt: skip
    """Writes density, thickness, direction and the sum of weights of each point."""
    given = points, owners, table, neighbours, density, beta, direction, totals
    settings = {"K": neighbours.shape[1], "SIZE": BLOCK, "enable_fp_fusion": True}
    launch(_forward, (triton.cdiv(len(points), BLOCK),), *given, len(points), **settings)


def differentiate(
    points: Tensor, owners: Tensor, table: Tensor, neighbours: Tensor, totals: Tensor,
    grad_density: Tensor, grad_beta: Tensor, grad_direction: Tensor, grad_points: Tensor, grad_tables: Tensor,
) -> None:  # fmt: skip
    """Writes the gradients by points, and adds those by the table to a table of zeros."""
    given = points, owners, table, neighbours, totals, grad_density, grad_beta, grad_direction
    settings = {"K": neighbours.shape[1], "SIZE": BLOCK, "enable_fp_fusion": True}
    launch(_backward, (triton.cdiv(len(points), BLOCK),), *given, grad_points, grad_tables, len(points), **settings)


def try_out(device: torch.device) -> None:
    """Compiles the kernels and runs them on a few points."""
    with torch.enable_grad():
        points = torch.zeros(4, 3, device=device, requires_grad=True)
        table = torch.ones(2, WIDTH, device=device, requires_grad=True)
        neighbours = torch.zeros(2, 1, dtype=torch.int32, device=device)
        owners = torch.zeros(4, dtype=torch.int64, device=device)
        field = KernelField.apply(points, owners, table, neighbours, sys.modules[__name__])
        (by_table,) = torch.autograd.grad(field[0].sum(), table)
    # Offsets of −1 in each axis, whitened to −3: G = exp(−27 / 2). Reading values waits for the kernels.
    falloff = math.exp(-13.5)
    if not math.isclose(float(field[0].detach().mean()), falloff, rel_tol=1e-3):
        raise RuntimeError("the field's Triton kernel computes wrong values")
    if not math.isclose(float(by_table[0, ALPHA]), 4 * falloff, rel_tol=1e-3):
        raise RuntimeError("the field's Triton kernel computes wrong gradients")
