"""Places of flat Gaussians on a triangle (SuGaR, Guédon & Lepetit 2024, refinement)."""

from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

PerTriangle = Literal[1, 3, 4, 6]
_CENTRE = (1 / 3, 1 / 3, 1 / 3)
INITIAL_SIZES = {1: 1 / (2 * 3**0.5), 3: 1 / (2 * (3**0.5 + 1)), 4: 1 / (4 * 3**0.5), 6: 1 / (4 + 2 * 3**0.5)}
"""First standard deviation of each Gaussian by their number on a triangle, in units of its shortest edge: the radii of
circles at these places in an equilateral triangle."""


def _cyclic_points(own: float, other: float) -> tuple[tuple[float, float, float], ...]:
    return (own, other, other), (other, own, other), (other, other, own)


_WEIGHTS = {
    1: (_CENTRE,),
    3: _cyclic_points(1 / 2, 1 / 4),
    4: (_CENTRE, *_cyclic_points(2 / 3, 1 / 6)),
    6: (*_cyclic_points(2 / 3, 1 / 6), *_cyclic_points(1 / 6, 5 / 12)),
}


@lru_cache(maxsize=8)
def barycentric_weights(
    count: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Float[Tensor, "count 3"]:
    """Returns the weights of a triangle's corners at the centres of its Gaussians, the same tensor every time.

    Made anew for each step, it would have to be copied to a GPU every time.

    Args:
        count: Gaussians per triangle: 1, 3, 4 or 6.

    >>> barycentric_weights(3)[0].tolist()
    [0.5, 0.25, 0.25]
    """
    with torch.inference_mode(False):
        return torch.tensor(_WEIGHTS[count], device=device, dtype=dtype)
