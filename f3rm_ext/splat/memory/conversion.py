"""Conversion of harmonics to another degree and storage, and what it loses."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.splat.gaussians import degree_from_count, resize_harmonics
from f3rm_ext.splat.memory.remainder import view_dependence


@dataclass(frozen=True)
class ConversionLoss:
    """Loss of a conversion: root mean squares over Gaussians, directions and channels of colours in 0..1."""

    dropped: float
    """Loss by dropping coefficients of higher degrees."""
    rounding: float
    """Loss by rounding the remaining coefficients."""

    def __str__(self) -> str:
        if not self.dropped and not self.rounding:
            return "nothing is lost"
        return (
            f"colours change by {math.hypot(self.dropped, self.rounding):.2g} (root mean square, of 0 to 1): "
            f"{self.dropped:.2g} by degrees that are dropped, {self.rounding:.2g} by rounding"
        )


@torch.no_grad()
def convert_harmonics(
    rest: Float[Tensor, "gaussians coeffs 3"], degree: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "gaussians new 3"], ConversionLoss]:
    """Converts the coefficients beyond the first to another degree and storage.

    Args:
        degree: 0 to 3; coefficients of new degrees are zero.
    """
    degree_from_count(rest.shape[1])  # raises if their number fits no degree
    wanted = resize_harmonics(rest, degree)
    kept = wanted.to(dtype)
    return kept, ConversionLoss(_rms(rest[:, kept.shape[1] :]), _rms(wanted.float() - kept.float()))


def _rms(rest: Tensor) -> float:
    """Returns the root mean square of the colours that coefficients produce: harmonics are orthogonal."""
    if not rest.numel():
        return 0.0
    return view_dependence(rest).double().square().mean().sqrt().item()
