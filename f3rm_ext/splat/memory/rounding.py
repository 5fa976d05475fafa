"""Rounding to fewer bits so that the mean over many steps is right: what makes small updates count."""

import torch
from jaxtyping import BFloat16, Float16, Float32, Int8, UInt8
from torch import Tensor

HALF_MAX = 65504.0
"""Largest finite float16."""
_HALF_FRACTION_BITS, _HALF_MIN_EXPONENT = 10, -14


def to_half(values: Float32[Tensor, "*shape"], generator: torch.Generator | None = None) -> Float16[Tensor, "*shape"]:
    """float16 next below or above, each with a probability such that the expected value is the given one.

    Args:
        values: beyond ±65504 they become that.
        generator: of the values' device; torch's own by default.
    """
    exponent = torch.frexp(values).exponent - 1  # of 2^e ≤ |x| < 2^(e+1)
    step = torch.ldexp(torch.ones_like(values), exponent.clamp_(min=_HALF_MIN_EXPONENT).sub_(_HALF_FRACTION_BITS))
    rounded = (values / step).add_(_uniform(values, generator)).floor_().mul_(step)
    return rounded.clamp_(-HALF_MAX, HALF_MAX).half()


def to_bfloat16(
    values: Float32[Tensor, "*shape"], generator: torch.Generator | None = None
) -> BFloat16[Tensor, "*shape"]:
    """bfloat16 next below or above, unbiased: random bits are added to the 16 that are cut off.

    Args:
        values: finite.
        generator: of the values' device; torch's own by default.
    """
    noise = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    noise.random_(0, 1 << 16, generator=generator)
    bits = (values.contiguous().view(torch.int32) + noise).bitwise_and_(-(1 << 16))
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
    codes = values.add(_uniform(values, generator)).floor_()
    return codes.clamp_(-largest, largest).to(torch.int8 if largest == 127 else torch.uint8)


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(like.shape, generator=generator, device=like.device)
