"""A step of :class:`~f3rm_ext.splat.memory.adam.PackedAdam` on CUDA: one Triton kernel, without temporary memory.

The definition is ``PackedAdam`` in torch; this computes the same in the same order, up to the rounding of powers of the
decay rates. Random numbers for rounding depend only on the seed, the step and the place of a number in the parameter.
"""

import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.splat.gaussians import sh_rest_count
from f3rm_ext.splat.memory.adam import SEEN
from f3rm_ext.splat.memory.moments import FIRST, MOMENTS, SCALE, SECOND, SIGNED_MAX, UNSIGNED_MAX
from f3rm_ext.splat.memory.rounding import HALF_MAX
from f3rm_ext.splat.rasterize import spherical_harmonics as harmonics

ROWS = 16
"""Gaussians per program."""
C1, C2_XY, C2_ZZ, C2_XX = (tl.constexpr(getattr(harmonics, name)) for name in ("C1", "C2_XY", "C2_ZZ", "C2_XX"))
C3_3, C3_2, C3_1, C3_0 = (tl.constexpr(getattr(harmonics, name)) for name in ("C3_3", "C3_2", "C3_1", "C3_0"))
LARGEST_HALF = tl.constexpr(HALF_MAX)
SMALLEST_NORMAL = tl.constexpr(2.0**-14)
NOISE_OF_TINY = tl.constexpr(2.0**-40)
"""Resolution of float16 below its smallest normal number, per unit of 16 random bits."""
SIGNED, UNSIGNED = tl.constexpr(float(SIGNED_MAX)), tl.constexpr(float(UNSIGNED_MAX))
STORAGES = tuple(MOMENTS)


@no_type_check
@triton.jit
def _chosen(k, index, value, otherwise):
    return tl.where((k == index)[None, :], value[:, None], otherwise)


@no_type_check
@triton.jit
def _bases(x, y, z, k, zero, DEGREE: tl.constexpr):
    """Returns harmonic k of degrees 1 to DEGREE in each direction, (rows, columns)."""
    # Constants stand on the right: the interpreter does not multiply them by tensors from the left.
    basis = _chosen(k, 0, -y * C1, zero)
    basis = _chosen(k, 1, z * C1, basis)
    basis = _chosen(k, 2, -x * C1, basis)
    if DEGREE >= 2:
        xx, yy, zz = x * x, y * y, z * z
        basis = _chosen(k, 3, x * C2_XY * y, basis)
        basis = _chosen(k, 4, -y * C2_XY * z, basis)
        basis = _chosen(k, 5, (3.0 * zz - 1.0) * C2_ZZ, basis)
        basis = _chosen(k, 6, -x * C2_XY * z, basis)
        basis = _chosen(k, 7, (xx - yy) * C2_XX, basis)
        if DEGREE >= 3:
            basis = _chosen(k, 8, -y * C3_3 * (3.0 * xx - yy), basis)
            basis = _chosen(k, 9, x * C3_2 * y * z, basis)
            basis = _chosen(k, 10, -y * C3_1 * (5.0 * zz - 1.0), basis)
            basis = _chosen(k, 11, z * C3_0 * (5.0 * zz - 3.0), basis)
            basis = _chosen(k, 12, -x * C3_1 * (5.0 * zz - 1.0), basis)
            basis = _chosen(k, 13, z * (0.5 * C3_2) * (xx - yy), basis)
            basis = _chosen(k, 14, -x * C3_3 * (xx - 3.0 * yy), basis)
    return basis


@no_type_check
@triton.jit
def _signed_noise(bits):
    """Returns the low 16 of random bits as numbers from −32768 to 32767."""
    return (bits & 0xFFFF).to(tl.int32) - 32768


@no_type_check
@triton.jit
def _to_half(values, bits):
    # Float16 keeps 10 of 23 bits of the mantissa: noise in the 13 below, then cutting them off, rounds up as often as
    # the remainder says. Below the smallest normal number the steps are 2^−24, which are those of float32 near 0.75.
    noise = _signed_noise(bits)
    raised = (values.to(tl.int32, bitcast=True) + (noise & 0x1FFF)) & ~0x1FFF
    normal = raised.to(tl.float32, bitcast=True)
    normal = tl.where(normal > LARGEST_HALF, LARGEST_HALF, normal)
    normal = tl.where(normal < -LARGEST_HALF, -LARGEST_HALF, normal)
    tiny = values + noise.to(tl.float32) * NOISE_OF_TINY + 0.75 - 0.75
    return tl.where(tl.abs(values) < SMALLEST_NORMAL, tiny, normal).to(tl.float16)


@no_type_check
@triton.jit
def _to_bfloat16(values, bits):
    raised = (values.to(tl.int32, bitcast=True) + (bits & 0xFFFF).to(tl.int32)) & ~0xFFFF
    return raised.to(tl.float32, bitcast=True).to(tl.bfloat16)


@no_type_check
@triton.jit
def _to_codes(values, bits):
    """Rounds to the next integer below or above, unbiased."""
    return tl.floor(_signed_noise(bits).to(tl.float32) * (1.0 / 65536.0) + 0.5 + values)


@no_type_check
@triton.jit
def _row_scale(values, largest):
    """Returns the scale of each row, and the values divided by it."""
    scale = tl.max(tl.abs(values), axis=1) / largest
    return scale, values / tl.where(scale > 0.0, scale, 1.0)[:, None]


@no_type_check
@triton.jit
def _direction(first, second, rate, root_correction, eps):
    return first / (tl.sqrt(second) / root_correction + eps) * rate


@no_type_check
@triton.jit(do_not_specialize=["step", "seed"])
def _step(
    value, first, second, first_scale, second_scale, seen, directions, colors,
    count, step, seed, rate, root_correction, eps, keep1, add1, keep2, add2, log1, log2, log_ratio, series,
    PICTURES: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, DEGREE: tl.constexpr,
    STORAGE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = i < count
    gradient = tl.zeros([ROWS, WIDTH], tl.float32)
    active = tl.zeros([ROWS], tl.int32)
    for picture in range(PICTURES):
        at = 3 * (i + picture * count)
        red = tl.load(colors + at, mask=inside, other=0.0)
        green = tl.load(colors + at + 1, mask=inside, other=0.0)
        blue = tl.load(colors + at + 2, mask=inside, other=0.0)
        shown = (red != 0.0) | (green != 0.0) | (blue != 0.0)
        active = active | shown.to(tl.int32)
        x = tl.load(directions + at, mask=shown, other=0.0)
        y = tl.load(directions + at + 1, mask=shown, other=0.0)
        z = tl.load(directions + at + 2, mask=shown, other=0.0)
        color = _chosen(column % 3, 0, red, _chosen(column % 3, 1, green, blue[:, None]))
        gradient += _bases(x, y, z, column // 3, tl.zeros([ROWS, WIDTH], tl.float32), DEGREE) * color
    rows = active != 0
    there = rows[:, None] & (column < COLUMNS)[None, :]
    place = i[:, None] * COLUMNS + column[None, :]
    gradient = tl.where(there, gradient, 0.0)

    m = tl.load(first + place, mask=there, other=0.0).to(tl.float32)
    v = tl.load(second + place, mask=there, other=0.0).to(tl.float32)
    if STORAGE == 2:
        m = m * tl.load(first_scale + i, mask=rows, other=0.0)[:, None]
        v = v * tl.load(second_scale + i, mask=rows, other=0.0)[:, None]
        v = v * v
    missed = (step - 1 - tl.load(seen + i, mask=rows, other=0)).to(tl.float32)[:, None]
    change = _direction(m, v, rate, root_correction, eps)
    change = change * ((1.0 - tl.exp2(log_ratio * missed)) * series)
    m = m * tl.exp2(log1 * missed)
    v = v * tl.exp2(log2 * missed)
    m = m + add1 * (gradient - m)
    v = v * keep2 + add2 * gradient * gradient
    change = change + _direction(m, v, rate, root_correction, eps)
    new = change + tl.load(value + place, mask=there, other=0.0).to(tl.float32)

    tl.store(seen + i, tl.zeros([ROWS], tl.int32) + step, mask=rows)
    if HALF or STORAGE != 0:
        random_value, random_first, random_second, _ = tl.randint4x(seed, place.to(tl.uint32))
    if HALF:
        tl.store(value + place, _to_half(new, random_value), mask=there)
    else:
        tl.store(value + place, new, mask=there)
    if STORAGE == 0:
        tl.store(first + place, m, mask=there)
        tl.store(second + place, v, mask=there)
    elif STORAGE == 1:
        tl.store(first + place, _to_bfloat16(m, random_first), mask=there)
        tl.store(second + place, _to_bfloat16(v, random_second), mask=there)
    else:
        scale, unit = _row_scale(tl.where(there, m, 0.0), SIGNED)
        code = tl.minimum(tl.maximum(_to_codes(unit, random_first), -SIGNED), SIGNED)
        tl.store(first + place, code.to(tl.int32).to(tl.int8), mask=there)
        tl.store(first_scale + i, scale, mask=rows)
        scale, unit = _row_scale(tl.where(there, tl.sqrt(v), 0.0), UNSIGNED)
        # Never zero where the moment is positive, so that no step is divided by zero.
        unit = tl.where(unit > 0.0, tl.maximum(unit, 1.0), 0.0)
        code = tl.minimum(tl.maximum(_to_codes(unit, random_second), 0.0), UNSIGNED)
        tl.store(second + place, code.to(tl.int32).to(tl.uint8), mask=there)
        tl.store(second_scale + i, scale, mask=rows)


@torch.no_grad()
def step_packed(
    parameter: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    seed: int,
    directions: Float[Tensor, "images gaussians 3"],
    colors: Float[Tensor, "images gaussians 3"],
    degree: int,
) -> None:
    """Updates the Gaussians whose colours have a gradient, and their moments.

    Args:
        parameter: coefficients of the harmonics, (gaussians, coeffs, 3), contiguous, float32 or float16.
        state: moments with the count of this step, changed in place.
        directions: from the cameras to the Gaussians, length 1.
        colors: gradients with respect to the colours, 0 where a Gaussian is not visible.
    """
    columns = parameter[0].numel() if len(parameter) else 0
    if not columns:
        return
    assert sh_rest_count(degree) * 3 <= columns
    beta1, beta2 = group["betas"]
    step, ratio = state["step"], beta1 / beta2**0.5
    with torch.cuda.device_of(parameter):
        _step[(triton.cdiv(len(parameter), ROWS),)](
            parameter.data, state[FIRST], state[SECOND],
            state.get(FIRST + SCALE, state[SEEN]), state.get(SECOND + SCALE, state[SEEN]), state[SEEN],
            directions.contiguous(), colors.contiguous(), len(parameter), step, seed,
            -group["lr"] / (1 - beta1**step), (1 - beta2**step) ** 0.5, group["eps"], beta1, 1 - beta1, beta2,
            1 - beta2, math.log2(beta1), math.log2(beta2), math.log2(ratio), ratio / (1 - ratio),
            PICTURES=len(colors), COLUMNS=columns, WIDTH=triton.next_power_of_2(columns), ROWS=ROWS, DEGREE=degree,
            STORAGE=STORAGES.index(group["moments"]), HALF=parameter.dtype == torch.float16,
            enable_fp_fusion=False,  # pyright: ignore[reportCallIssue]  # an option of the compiler
        )  # fmt: skip


def try_out(device: torch.device) -> None:
    """Compiles the kernel and runs it on a few Gaussians, with every storage."""
    group = {"lr": 0.25, "betas": (0.9, 0.999), "eps": 1e-15}
    seen = torch.zeros(4, dtype=torch.int32, device=device)
    pictures = torch.ones(1, 4, 3, device=device)
    for name, moments in MOMENTS.items():
        parameter = torch.zeros(4, 3, 3, device=device, dtype=torch.float16 if name == "bfloat16" else torch.float32)
        state = {"step": 1, SEEN: seen.clone(), **moments.zeros(parameter)}
        step_packed(parameter, state, {**group, "moments": name}, 0, pictures, pictures, 1)
        # The first step is the learning rate, against the sign of −y, z and −x. Reading it waits for the kernel.
        if abs(float(parameter[3, 0, 0]) - 0.25) > 0.01 or abs(float(parameter[3, 1, 2]) + 0.25) > 0.01:
            raise RuntimeError("the optimiser's Triton kernel computes wrong values")
