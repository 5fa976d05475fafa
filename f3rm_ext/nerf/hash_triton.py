"""The hash grid on a GPU without tiny-cuda-nn: Triton kernels for values and gradients, one launch each.

They compute the function of ``f3rm_ext.nerf.hash_grid.hash_grid_reference``, in float32 whatever the type of the
result. Only this module imports triton, which comes with PyTorch on Linux.

Why they are shaped like this. A step of ``f3rm-ext`` interpolates some 11 M points and levels (4096 rays × 48 samples
× 16 levels, and the grids of proposals and features), each from 8 rows at random places: memory decides, not
arithmetic. A program handles a block of points on one level, and programs of one level run one after the other, so that
the L2 cache serves the table of a level (4 MiB at 2^19 × 2). One instruction reads up to 16 bytes of a row, and on
compute capability 9.0 and above one adds as many. The table stays float32: a half copy would be made anew in every
step. The backward pass adds with atomics to one gradient; on the coarsest level some 380 points of a step meet in each
of 4096 rows, too few for a sum per block to pay.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.nerf.hash_levels import LevelTensors

BLOCK = 256
"""Points of a program."""
OPTIONS: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 4, "enable_fp_fusion": False}
"""Of every launch: two points per thread; products rounded before they are added, so that cells are the reference's."""


@no_type_check
@triton.jit
def _cell(points, index, valid, scale, axis: tl.constexpr):
    """Lower vertex and position within the cell along an axis."""
    position = tl.load(points + index * 3 + axis, mask=valid, other=0.0).to(tl.float32) * scale + 0.5
    lower = tl.floor(position)
    return lower.to(tl.int32).to(tl.uint32), position - lower


@no_type_check
@triton.jit
def _side(fraction, upper: tl.constexpr):
    """Weight of the lower or the upper vertex along an axis."""
    if upper:
        return fraction
    else:
        return 1.0 - fraction


@no_type_check
@triton.jit
def _numbers(rows, level):
    """Factors of x, y and z, first row, number of rows and whether it is hashed, of a level."""
    at = rows + level * 6
    factors = tl.load(at).to(tl.uint32), tl.load(at + 1).to(tl.uint32), tl.load(at + 2).to(tl.uint32)
    # 64 bits, because rows times features may exceed 31.
    return factors[0], factors[1], factors[2], tl.load(at + 3).to(tl.int64), tl.load(at + 4), tl.load(at + 5) != 0


@no_type_check
@triton.jit
def _row(x, y, z, mx, my, mz, first, size, hashed, corner: tl.constexpr):
    """Row of the table at corner 4 z + 2 y + x of a cell."""
    # Unsigned products wrap around at 32 bits, as the hash of Instant NGP demands; in dense levels they never do.
    x = (x + (corner & 1)) * mx
    y = (y + ((corner >> 1) & 1)) * my
    z = (z + (corner >> 2)) * mz
    return first + (tl.where(hashed, x ^ y ^ z, x + y + z) % size.to(tl.uint32)).to(tl.int64)


@no_type_check
@triton.jit(do_not_specialize=["count"])
def _forward(points, table, scales, rows, out, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    level = tl.program_id(1)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = index < count
    scale = tl.load(scales + level)
    mx, my, mz, first, size, hashed = _numbers(rows, level)
    x, fx = _cell(points, index, valid, scale, 0)
    y, fy = _cell(points, index, valid, scale, 1)
    z, fz = _cell(points, index, valid, scale, 2)
    column = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    for corner in tl.static_range(8):
        weight = _side(fx, corner & 1) * _side(fy, corner & 2) * _side(fz, corner & 4)
        at = _row(x, y, z, mx, my, mz, first, size, hashed, corner)[:, None] * WIDTH + column
        total += weight[:, None] * tl.load(table + at, mask=valid[:, None], other=0.0)
    at = index[:, None] * (tl.num_programs(1) * WIDTH) + level * WIDTH + column
    tl.store(out + at, total.to(out.dtype.element_ty), mask=valid[:, None])


@no_type_check
@triton.jit(do_not_specialize=["count"])
def _backward(
    points,
    table,
    scales,
    rows,
    by_out,
    by_points,
    by_table,
    count,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FOR_POINTS: tl.constexpr,
    FOR_TABLE: tl.constexpr,
):
    level = tl.program_id(1)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = index < count
    scale = tl.load(scales + level)
    mx, my, mz, first, size, hashed = _numbers(rows, level)
    x, fx = _cell(points, index, valid, scale, 0)
    y, fy = _cell(points, index, valid, scale, 1)
    z, fz = _cell(points, index, valid, scale, 2)
    column = tl.arange(0, WIDTH)[None, :]
    at = index[:, None] * (tl.num_programs(1) * WIDTH) + level * WIDTH + column
    upstream = tl.load(by_out + at, mask=valid[:, None], other=0.0).to(tl.float32)
    gx = tl.zeros((BLOCK,), dtype=tl.float32)
    gy = tl.zeros((BLOCK,), dtype=tl.float32)
    gz = tl.zeros((BLOCK,), dtype=tl.float32)
    for corner in tl.static_range(8):
        wx, wy, wz = _side(fx, corner & 1), _side(fy, corner & 2), _side(fz, corner & 4)
        at = _row(x, y, z, mx, my, mz, first, size, hashed, corner)[:, None] * WIDTH + column
        if FOR_TABLE:
            tl.atomic_add(by_table + at, (wx * wy * wz)[:, None] * upstream, mask=valid[:, None], sem="relaxed")
        if FOR_POINTS:
            # A trilinear weight changes along an axis by the product of the other two factors, up at the upper vertex
            # and down at the lower one.
            by_weight = tl.sum(tl.load(table + at, mask=valid[:, None], other=0.0) * upstream, axis=1)
            gx += by_weight * wy * wz * (2.0 * (corner & 1) - 1.0)
            gy += by_weight * wx * wz * (2.0 * ((corner >> 1) & 1) - 1.0)
            gz += by_weight * wx * wy * (2.0 * (corner >> 2) - 1.0)
    if FOR_POINTS:
        # Every level is a program of its own and adds to the same points.
        tl.atomic_add(by_points + index * 3, gx * scale, mask=valid, sem="relaxed")
        tl.atomic_add(by_points + index * 3 + 1, gy * scale, mask=valid, sem="relaxed")
        tl.atomic_add(by_points + index * 3 + 2, gz * scale, mask=valid, sem="relaxed")


class _HashGridFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, points: Tensor, table: Tensor, levels: LevelTensors, dtype: torch.dtype) -> Tensor:
        points, table = points.detach().contiguous(), table.detach().contiguous()
        out = torch.empty(len(points), len(levels.levels) * table.shape[1], dtype=dtype, device=points.device)
        ctx.save_for_backward(points, table)
        ctx.levels = levels
        if len(points):
            grid = triton.cdiv(len(points), BLOCK), len(levels.levels)
            with torch.cuda.device_of(points):
                _forward[grid](
                    *(points, table, levels.scales, levels.rows, out, len(points)),
                    WIDTH=table.shape[1],
                    **OPTIONS,
                )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        points, table = ctx.saved_tensors
        levels: LevelTensors = ctx.levels
        by_out = grad_outputs[0].contiguous()
        by_points = torch.zeros_like(points) if ctx.needs_input_grad[0] else None
        by_table = torch.zeros_like(table) if ctx.needs_input_grad[1] else None
        if len(points):
            grid = triton.cdiv(len(points), BLOCK), len(levels.levels)
            with torch.cuda.device_of(points):
                _backward[grid](
                    *(points, table, levels.scales, levels.rows, by_out),
                    # What is not wanted is not touched.
                    points if by_points is None else by_points,
                    table if by_table is None else by_table,
                    len(points),
                    WIDTH=table.shape[1],
                    FOR_POINTS=by_points is not None,
                    FOR_TABLE=by_table is not None,
                    **OPTIONS,
                )
        return by_points, by_table, None, None


def hash_grid_triton(
    points: Float[Tensor, "points 3"],
    table: Float[Tensor, "entries level_feat"],
    levels: LevelTensors,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "points feat"]:
    """Interpolates like ``hash_grid_reference``, in float32; differentiable once.

    Args:
        points: positions in [0, 1]³, float32.
        table: rows of all levels, float32, on the device of the points; 1, 2, 4 or 8 features.
    """
    return _HashGridFunction.apply(points, table, levels, dtype)  # type: ignore[return-value]
