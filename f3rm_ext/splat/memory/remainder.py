"""Extra precision for some rows of a float16 parameter: the rounding remainders of strongly view-dependent colours.

Each Gaussian has a row number (int32; 0 for none) that leads to a second float16 per coefficient, with value =
stored + remainder, 21 bits together. Rendering reads the stored part. The optimiser adds the remainder, so these rows
need no stochastic rounding. This costs 4 bytes per Gaussian, and for each reflective one the size of its coefficients
again. In measurements it gains nothing over stochastic rounding; see docs/benchmarks.md.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from f3rm_ext.memory.shapes import lacks_values
from f3rm_ext.splat.memory.rounding import to_half

SLOT, REMAINDER = "slot", "remainder"
STRETCH = 4096.0
"""Factor on stored remainders, which keeps them out of the subnormal range of float16."""
REFRESH_EVERY = 500
"""Steps between updates of the set of reflective Gaussians."""
REFLECTIVE_SHARE = 0.2
"""Share of Gaussians that plans take for reflective; the share of benchmarks/splat_memory.py."""
_CHUNK = 1 << 18


def view_dependence(rest: Float[Tensor, "gaussians coeffs 3"]) -> Float[Tensor, " gaussians"]:
    """Returns the RMS of the view-dependent part of colours over directions and channels: √(Σ f² / 4π / 3)."""
    parts = [part.float().square().sum(dim=(1, 2)) for part in rest.split(_CHUNK)]
    return (torch.cat(parts) / (4 * math.pi * 3)).sqrt() if parts else rest.new_zeros(0, dtype=torch.float32)


def choose(state: dict[str, Any], reflective: Bool[Tensor, " gaussians"], like: Tensor) -> None:
    """Updates which Gaussians have remainders; Gaussians that remain reflective keep theirs.

    Args:
        state: optimiser state of the parameter, changed in place.
        reflective: True for Gaussians that get a remainder.
    """
    rows = reflective.nonzero().squeeze(-1)
    if lacks_values(rows):
        rows = rows[: round(REFLECTIVE_SHARE * len(rows))]
    # The leading axis of 1 marks it as not per-Gaussian; row 0 stands for no remainder.
    remainder = torch.zeros(1, len(rows) + 1, *like.shape[1:], dtype=torch.float16, device=like.device)
    if SLOT in state:
        remainder[0, 1:] = state[REMAINDER][0, state[SLOT][rows].long()]
    slot = torch.zeros(len(like), dtype=torch.int32, device=like.device)
    slot[rows] = torch.arange(1, len(rows) + 1, dtype=torch.int32, device=like.device)
    state[SLOT], state[REMAINDER] = slot, remainder


def read(state: dict[str, Any], rows: Int[Tensor, " rows"] | slice) -> Float[Tensor, "rows *rest"]:
    """Returns the remainders of some rows, to add to the stored values."""
    return state[REMAINDER][0, state[SLOT][rows].long()].float() / STRETCH


def write(
    state: dict[str, Any],
    rows: Int[Tensor, " rows"] | slice,
    values: Float[Tensor, "rows *rest"],
    generator: torch.Generator,
) -> Float[Tensor, "rows *rest"]:
    """Stores the remainders of some rows.

    Returns:
        Values to store, float16: rounded to nearest for rows with a remainder, stochastically for the others.
    """
    slots = state[SLOT][rows].long()
    held = slots > 0
    nearest = values[held].half()
    state[REMAINDER][0, slots[held]] = ((values[held] - nearest.float()) * STRETCH).half()
    stored = to_half(values, generator)
    stored[held] = nearest
    return stored
