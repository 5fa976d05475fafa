"""Rounding to fewer bits so that the mean over many steps is right: what makes small updates count."""

import torch
from jaxtyping import BFloat16, Float16, Float32, Int8, Int16, UInt8
from torch import Tensor

HALF_MAX = 65504.0
"""Largest finite float16."""
_CUT_BITS = 13
"""Bits by which the fraction of float32 is longer than that of float16."""
_SMALLEST_NORMAL, _SMALLEST = 2.0**-14, 2.0**-24
"""Of float16: below the first it has a fixed resolution, the second."""
_ANCHOR = 0.75
"""float32 has that resolution between ½ and 1."""


def to_half(values: Float32[Tensor, "*shape"], generator: torch.Generator | None = None) -> Float16[Tensor, "*shape"]:
    """float16 next below or above, each with a probability such that the expected value is the given one.

    Random bits are added to those that are cut off; below 2^-14, a random part of the resolution is added.

    Args:
        values: beyond ±65504 they become that.
        generator: of the values' device; torch's own by default.
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
    """bfloat16 next below or above, unbiased: random bits are added to the 16 that are cut off.

    Args:
        values: finite.
        generator: of the values' device; torch's own by default.
    """
    cut = (1 << 16) - 1
    noise = _noise(values, generator).int().bitwise_and_(cut)
    bits = noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(~cut)
    return bits.view(torch.float32).bfloat16()


def to_codes(
    values: Float32[Tensor, "*shape"], largest: int, generator: torch.Generator | None = None
) -> Int8[Tensor, "*shape"] | UInt8[Tensor, "*shape"]:
    """Whole numbers next below or above, unbiased.

    Args:
        values: within ±`largest` where that is 127, else from 0 to `largest`.
        largest: code that is not passed; 127 gives int8, 255 uint8.
        generator: of the values' device; torch's own by default.
    """
    codes = (_noise(values, generator) * 2.0**-16).add_(0.5).add_(values).floor_()
    return codes.clamp_(-largest, largest).to(torch.int8 if largest == 127 else torch.uint8)


def _noise(like: Tensor, generator: torch.Generator | None) -> Int16[Tensor, "*shape"]:
    """16 random bits for each value, four values to a random number: drawing is what rounding takes longest for."""
    numbers = torch.empty((like.numel() + 3) // 4, dtype=torch.int64, device=like.device)
    numbers.random_(-(1 << 63), None, generator=generator)
    return numbers.view(torch.int16)[: like.numel()].view(like.shape)
