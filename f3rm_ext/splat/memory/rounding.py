"""Stochastic rounding to fewer bits: unbiased, so that small updates count on average."""

import torch
from jaxtyping import BFloat16, Float16, Float32, Int8, Int16, UInt8
from torch import Tensor

HALF_MAX = 65504.0
"""Largest finite float16."""
_CUT_BITS = 13
"""Fraction bits of float32 beyond those of float16."""
_SMALLEST_NORMAL, _SMALLEST = 2.0**-14, 2.0**-24
"""Smallest normal float16, and the fixed resolution of float16 below it."""
_ANCHOR = 0.75
"""Adding this rounds to that resolution, which float32 has between ½ and 1."""


def to_half(values: Float32[Tensor, "*shape"], generator: torch.Generator | None = None) -> Float16[Tensor, "*shape"]:
    """Rounds to the next float16 below or above, with probabilities that preserve the expected value.

    Adds random bits to the bits that are cut off; below 2^-14, adds a random part of the resolution.

    Args:
        values: limited to ±65504.
    """
    noise = _noise(values, generator)
    cut = (1 << _CUT_BITS) - 1
    bits = (values.contiguous().view(torch.int32) + noise.bitwise_and(cut)).bitwise_and_(~cut)
    normal = bits.view(torch.float32).clamp_(-HALF_MAX, HALF_MAX)
    tiny = (values + noise * (_SMALLEST / (1 << 16))).add_(_ANCHOR).sub_(_ANCHOR)
    return torch.where(values.abs() < _SMALLEST_NORMAL, tiny, normal).half()


def to_bfloat16(
    values: Float32[Tensor, "*shape"], generator: torch.Generator | None = None
) -> BFloat16[Tensor, "*shape"]:
    """Rounds to the next bfloat16 below or above, unbiased: adds random bits to the 16 bits that are cut off.

    Args:
        values: finite.
    """
    cut = (1 << 16) - 1
    noise = _noise(values, generator).int().bitwise_and_(cut)
    bits = noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(~cut)
    return bits.view(torch.float32).bfloat16()


def to_codes(
    values: Float32[Tensor, "*shape"], largest: int, generator: torch.Generator | None = None
) -> Int8[Tensor, "*shape"] | UInt8[Tensor, "*shape"]:
    """Rounds to the next integer below or above, unbiased.

    Args:
        values: within ±127 for int8, from 0 to 255 for uint8.
    """
    codes = (_noise(values, generator) * 2.0**-16).add_(0.5).add_(values).floor_()
    return codes.clamp_(-largest, largest).to(torch.int8 if largest == 127 else torch.uint8)


def _noise(like: Tensor, generator: torch.Generator | None) -> Int16[Tensor, "*shape"]:
    """Returns 16 random bits per value, four values from each random number: drawing dominates the time of rounding."""
    numbers = torch.empty((like.numel() + 3) // 4, dtype=torch.int64, device=like.device)
    numbers.random_(-(1 << 63), None, generator=generator)
    return numbers.view(torch.int16)[: like.numel()].view(like.shape)
