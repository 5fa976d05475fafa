"""The photometric loss on CUDA: SSIM, mean difference and their gradient by two Triton kernels.

They must agree with the definition, :func:`f3rm_ext.splat.losses.photometric_loss`. A row holds its colours side by
side, so that a shift by a pixel is one by three numbers. A program goes down a strip of rows: it weighs each row along
its columns once, and adds it to all sums of the strip. Sums have a fixed order: results are the same in each run.
"""

import math
import sys
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.splat.losses import WINDOW_PX, PhotometricLoss, ssim_window
from f3rm_ext.splat.triton_kernels import launch

ROWS, COLUMNS = 16, 128
"""Rows and numbers per row of a program."""
C1, C2 = tl.constexpr(0.01**2), tl.constexpr(0.03**2)
"""Constants of SSIM for values from 0 to 1."""


@no_type_check
@triton.jit
def _weigh(window, tap, SIZE: tl.constexpr):
    """Returns the weights at places of the window, 0 outside."""
    return tl.load(window + tap, mask=(tap >= 0) & (tap < SIZE), other=0.0)[:, None]


@no_type_check
@triton.jit(do_not_specialize=["rows"])
def _slopes(
    one, two, window, slopes, parts, rows, width, factor,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes the part of 1 − SSIM in the loss of each program, and the slopes of SSIM by mean, square and product of
    each window."""
    first = tl.program_id(1).to(tl.int64) * ROWS
    q = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, ROWS)
    inner = width - 3 * (SIZE - 1)
    a = tl.zeros([ROWS, COLUMNS], tl.float32)
    b = tl.zeros([ROWS, COLUMNS], tl.float32)
    aa_bb = tl.zeros([ROWS, COLUMNS], tl.float32)
    ab = tl.zeros([ROWS, COLUMNS], tl.float32)
    for r in range(ROWS + SIZE - 1):
        # Not the conjunction of a row of booleans and one: Triton 3.9's interpreter takes the result for numbers.
        there = q < tl.where(first + r < rows + SIZE - 1, inner, 0)
        at = (first + r) * width + q
        x = tl.zeros([COLUMNS], tl.float32)
        y = tl.zeros([COLUMNS], tl.float32)
        xx_yy = tl.zeros([COLUMNS], tl.float32)
        xy = tl.zeros([COLUMNS], tl.float32)
        for k in tl.static_range(SIZE):
            share = tl.load(window + k)
            u = tl.load(one + at + 3 * k, mask=there, other=0.0)
            v = tl.load(two + at + 3 * k, mask=there, other=0.0)
            x += share * u
            y += share * v
            xx_yy += share * (u * u + v * v)
            xy += share * (u * v)
        weight = _weigh(window, r - i, SIZE)
        a += weight * x[None, :]
        b += weight * y[None, :]
        aa_bb += weight * xx_yy[None, :]
        ab += weight * xy[None, :]
    common = a * b
    powers = a * a + b * b
    squares = powers + C1
    spread = aa_bb - powers + C2
    light = (2.0 * common + C1) / squares
    structure = (2.0 * (ab - common) + C2) / spread
    product = 2.0 * light / spread
    square = -light * structure / spread
    mean = structure * 2.0 * (b - a * light) / squares - product * b - 2.0 * square * a
    row = first + i
    there = (row < rows)[:, None] & (q < inner)[None, :]
    at = row[:, None] * inner + q[None, :]
    area = rows.to(tl.int64) * inner
    tl.store(slopes + at, mean, mask=there)
    tl.store(slopes + area + at, 2.0 * square, mask=there)
    tl.store(slopes + 2 * area + at, product, mask=there)
    total = tl.sum(tl.where(there, 1.0 - light * structure, 0.0))
    tl.store(parts + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), factor * total)


@no_type_check
@triton.jit
def _gradient(
    one, two, window, slopes, gradient, parts, height, width, ssim_factor, l1_factor,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes the part of absolute differences in the loss of each program, and the gradient of the loss."""
    first = tl.program_id(1).to(tl.int64) * ROWS
    q = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, ROWS)
    by_mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    by_square = tl.zeros([ROWS, COLUMNS], tl.float32)
    by_product = tl.zeros([ROWS, COLUMNS], tl.float32)
    if SIZE > 0:
        rows = height - (SIZE - 1)
        inner = width - 3 * (SIZE - 1)
        area = rows.to(tl.int64) * inner
        for r in range(ROWS + SIZE - 1):
            row = first + r - (SIZE - 1)
            x = tl.zeros([COLUMNS], tl.float32)
            y = tl.zeros([COLUMNS], tl.float32)
            z = tl.zeros([COLUMNS], tl.float32)
            most = tl.where((row >= 0) & (row < rows), inner, 0)
            for k in tl.static_range(SIZE):
                share = tl.load(window + k)
                column = q - 3 * k
                there = (column >= 0) & (column < most)
                at = slopes + row * inner + column
                x += share * tl.load(at, mask=there, other=0.0)
                y += share * tl.load(at + area, mask=there, other=0.0)
                z += share * tl.load(at + 2 * area, mask=there, other=0.0)
            weight = _weigh(window, i - r + (SIZE - 1), SIZE)
            by_mean += weight * x[None, :]
            by_square += weight * y[None, :]
            by_product += weight * z[None, :]
    row = first + i
    there = (row < height)[:, None] & (q < width)[None, :]
    at = row[:, None] * width + q[None, :]
    u = tl.load(one + at, mask=there, other=0.0)
    v = tl.load(two + at, mask=there, other=0.0)
    difference = u - v
    # The product with 0 passes on NaN, for which neither comparison is true.
    sign = tl.where(difference > 0.0, l1_factor, tl.where(difference < 0.0, -l1_factor, difference * 0.0))
    tl.store(gradient + at, sign - ssim_factor * (by_mean + u * by_square + v * by_product), mask=there)
    total = tl.sum(tl.abs(difference))
    tl.store(parts + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), l1_factor * total)


def compare_pictures(
    predicted: Float[Tensor, "h w 3"],
    truth: Float[Tensor, "h w 3"],
    ssim_weight: float,
    has_ssim: bool,
    gradient: Float[Tensor, "h w 3"],
) -> Float[Tensor, " parts"]:
    """Returns parts of the loss, and writes its gradient by the first picture."""
    h, w, _ = predicted.shape
    size = WINDOW_PX if has_ssim else 0
    rows, inner = (h - size + 1, 3 * (w - size + 1)) if size else (0, 0)
    grids = [(triton.cdiv(across, COLUMNS), triton.cdiv(down, ROWS)) for down, across in ((rows, inner), (h, 3 * w))]
    parts = predicted.new_empty(sum(map(math.prod, grids)))
    slopes, window = predicted.new_empty(3, rows, inner), ssim_window(predicted.device, predicted.dtype)
    pictures = predicted, truth, window, slopes
    sizes = {"SIZE": size, "ROWS": ROWS, "COLUMNS": COLUMNS}
    before, after = parts.split([math.prod(grid) for grid in grids])
    factor = ssim_weight / max(1, rows * inner)
    launch(_slopes, grids[0], *pictures, before, rows, 3 * w, factor, **sizes)
    launch(_gradient, grids[1], *pictures, gradient, after, h, 3 * w, factor, (1 - ssim_weight) / (3 * h * w), **sizes)
    return parts


def try_out(device: torch.device) -> None:
    """Compiles the kernels and runs them on two pictures of one colour."""
    with torch.enable_grad():
        predicted = torch.full((12, 12, 3), 0.75, device=device, requires_grad=True)
        truth = torch.full((12, 12, 3), 0.5, device=device)
        loss = PhotometricLoss.apply(predicted, truth, 0.5, True, sys.modules[__name__])
        (gradient,) = torch.autograd.grad(loss, predicted)
    # SSIM is 2pt / (p² + t²) but for its small constant. Reading values waits for the kernels.
    if not math.isclose(float(loss.detach()), 0.5 * 0.25 + 0.5 / 13, rel_tol=1e-3):
        raise RuntimeError("the photometric loss's Triton kernels compute wrong values")
    if not math.isclose(float(gradient.sum()), 0.5 + 40 / 169, rel_tol=1e-3):
        raise RuntimeError("the photometric loss's Triton kernels compute wrong gradients")
