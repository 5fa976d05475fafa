"""Harmonics of one degree and storage as another, and what is lost by it."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.splat.gaussians import rest_of_degree, sh_degree_of
from f3rm_ext.splat.memory.remainder import view_dependence


@dataclass(frozen=True)
class Loss:
    """What a conversion loses, as root mean squares over Gaussians, directions and channels of colours in 0..1."""

    dropped: float
    """By coefficients of higher degrees that are left out."""
    rounding: float
    """By rounding of those that stay."""

    def __str__(self) -> str:
        if not self.dropped and not self.rounding:
            return "nothing is lost"
        return (
            f"colours change by {math.hypot(self.dropped, self.rounding):.2g} (root mean square, of 0 to 1): "
            f"{self.dropped:.2g} by degrees that are dropped, {self.rounding:.2g} by rounding"
        )


@torch.no_grad()
def converted(
    rest: Float[Tensor, "gaussians coeffs 3"], degree: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "gaussians new 3"], Loss]:
    """Coefficients beyond the first in another degree and storage.

    Args:
        rest: of degrees 1 and up, in any dtype.
        degree: 0 to 3; coefficients of new degrees are zero.
        dtype: torch.float32 or torch.float16.

    Returns:
        The coefficients, and what was lost.
    """
    sh_degree_of(rest.shape[1])  # raises where there are too many or too few
    wanted = rest_of_degree(rest, degree)
    kept = wanted.to(dtype)
    return kept, Loss(_rms(rest[:, kept.shape[1] :]), _rms(wanted.float() - kept.float()))


def _rms(rest: Tensor) -> float:
    """Root mean square of the colours that coefficients make: harmonics are orthogonal."""
    if not rest.numel():
        return 0.0
    return view_dependence(rest).double().square().mean().sqrt().item()
