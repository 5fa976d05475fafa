"""More bits for some rows of a float16 parameter: what rounding took from the Gaussians whose colour changes with view.

A row number per Gaussian (int32; 0 for none) leads to a second float16 per coefficient, value = stored + remainder, 21
bits together. Rendering reads what is stored; the optimiser adds the remainder, so nothing is rounded at random there.
Costs 4 bytes for each Gaussian and as many again as its coefficients for each reflective one. Measured, it gains
nothing over random rounding: see docs/benchmarks.md.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from f3rm_ext.splat.memory.rounding import to_half

SLOT, REMAINDER = "slot", "remainder"
STRETCH = 4096.0
"""Remainders are stored this much larger, out of float16's subnormal numbers."""
REFRESH_EVERY = 500
"""Steps from one look at who is reflective to the next."""
_CHUNK = 1 << 18


def view_dependence(rest: Float[Tensor, "gaussians coeffs 3"]) -> Float[Tensor, " gaussians"]:
    """Root mean square of the view-dependent part of colours, over directions and channels: √(Σ f² / 4π / 3)."""
    parts = [part.float().square().sum(dim=(1, 2)) for part in rest.split(_CHUNK)]
    return (torch.cat(parts) / (4 * math.pi * 3)).sqrt() if parts else rest.new_zeros(0, dtype=torch.float32)


def choose(state: dict[str, Any], reflective: Bool[Tensor, " gaussians"], like: Tensor) -> None:
    """Gives remainders to the reflective Gaussians and takes them from the others; those that stay keep theirs.

    Args:
        state: of the optimiser for this parameter, changed in place.
        reflective: who gets one.
        like: the parameter.
    """
    rows = reflective.nonzero().squeeze(-1)
    # A leading axis of 1 keeps it from being taken for something with a row per Gaussian; row 0 belongs to nobody.
    remainder = torch.zeros(1, len(rows) + 1, *like.shape[1:], dtype=torch.float16, device=like.device)
    if SLOT in state:
        remainder[0, 1:] = state[REMAINDER][0, state[SLOT][rows].long()]
    slot = torch.zeros(len(like), dtype=torch.int32, device=like.device)
    slot[rows] = torch.arange(1, len(rows) + 1, dtype=torch.int32, device=like.device)
    state[SLOT], state[REMAINDER] = slot, remainder


def read(state: dict[str, Any], rows: Int[Tensor, " rows"] | slice) -> Float[Tensor, "rows *rest"]:
    """What has to be added to the stored values of some rows."""
    return state[REMAINDER][0, state[SLOT][rows].long()].float() / STRETCH


def write(
    state: dict[str, Any],
    rows: Int[Tensor, " rows"] | slice,
    values: Float[Tensor, "rows *rest"],
    generator: torch.Generator,
) -> Float[Tensor, "rows *rest"]:
    """Keeps the remainders of some rows.

    Returns:
        What is to be stored, float16: the nearest where there is a remainder, rounded at random elsewhere.
    """
    slots = state[SLOT][rows].long()
    held = slots > 0
    nearest = values[held].half()
    state[REMAINDER][0, slots[held]] = ((values[held] - nearest.float()) * STRETCH).half()
    stored = to_half(values, generator)
    stored[held] = nearest
    return stored
