"""Storage of Adam's two moments in 8, 4 or about 2 bytes per number."""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from f3rm_ext.splat.memory.rounding import to_bfloat16, to_codes

MomentStorage = Literal["float32", "bfloat16", "int8"]
FIRST, SECOND = "exp_avg", "exp_avg_sq"
SCALE = "_scale"
SIGNED_MAX, UNSIGNED_MAX = 127, 255


class Moments:
    """Storage of moments in float32: tensors with one row per row of the parameter; all-zero tensors mean zero."""

    dtype = torch.float32

    def zeros(self, like: Tensor) -> dict[str, Tensor]:
        """Creates the state of zero moments of a parameter, (rows, ...)."""
        return {name: torch.zeros(like.shape, dtype=self.dtype, device=like.device) for name in (FIRST, SECOND)}

    def encode(self, first: Tensor, second: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Returns what is stored of some rows, by name."""
        return {FIRST: first, SECOND: second}

    def decode(self, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the first and second moments of some rows, float32; may change its argument."""
        return stored[FIRST].float(), stored[SECOND].float()

    def read(
        self, state: dict[str, Any], rows: Int[Tensor, " rows"] | slice
    ) -> tuple[Float[Tensor, "rows *rest"], Float[Tensor, "rows *rest"]]:
        """Returns copies of the first and second moments of some rows, float32."""
        stored = {name: value[rows] for name, value in state.items() if name.startswith(FIRST)}
        if isinstance(rows, slice):  # still views
            stored = {name: value.clone() for name, value in stored.items()}
        return self.decode(stored)

    def write(
        self,
        state: dict[str, Any],
        rows: Int[Tensor, " rows"] | slice,
        first: Float[Tensor, "rows *rest"],
        second: Float[Tensor, "rows *rest"],
        generator: torch.Generator,
    ) -> None:
        """Stores first and second moments of some rows."""
        for name, value in self.encode(first, second, generator).items():
            state[name][rows] = value


class HalfMoments(Moments):
    """Moments in bfloat16, rounded stochastically: it cannot resolve changes of second moments by 1/1000 per step."""

    dtype = torch.bfloat16

    def encode(self, first: Tensor, second: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {FIRST: to_bfloat16(first, generator), SECOND: to_bfloat16(second, generator)}


class ByteMoments(Moments):
    """Moments in 8 bits with one scale per row: first moments, and square roots of second moments.

    Both are rounded stochastically. The root of a positive second moment is stored as at least 1/255 of the largest of
    its row, never as zero, so no step is divided by zero.
    """

    def zeros(self, like: Tensor) -> dict[str, Tensor]:
        scale = torch.zeros(len(like), device=like.device)
        return {
            FIRST: torch.zeros(like.shape, dtype=torch.int8, device=like.device),
            FIRST + SCALE: scale,
            SECOND: torch.zeros(like.shape, dtype=torch.uint8, device=like.device),
            SECOND + SCALE: scale.clone(),
        }

    def encode(self, first: Tensor, second: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        if not first.numel():
            return {}  # Colours of degree 0 have no further harmonics.
        stored = {}
        for name, values, largest in ((FIRST, first, SIGNED_MAX), (SECOND, second.sqrt(), UNSIGNED_MAX)):
            scale = values.abs().flatten(1).amax(dim=1) / largest
            unit = values / _broadcast(torch.where(scale > 0, scale, 1), values)
            if name == SECOND:
                unit = torch.where(unit > 0, unit.clamp(min=1), 0)
            stored |= {name: to_codes(unit, largest, generator), name + SCALE: scale}
        return stored

    def decode(self, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        first, root = (
            stored[name].float().mul_(_broadcast(stored[name + SCALE], stored[name])) for name in (FIRST, SECOND)
        )
        return first, root.square_()


def _broadcast(scale: Tensor, values: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (values.dim() - 1))


MOMENTS: dict[str, Moments] = {"float32": Moments(), "bfloat16": HalfMoments(), "int8": ByteMoments()}


def detect_storage(state: dict[str, Any]) -> str:
    """Returns the storage of the moments in a state, from their dtype."""
    kinds = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}
    return kinds[state[FIRST].dtype]


def resize_moments(state: dict[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """Converts a state of harmonics to the SH degree of a parameter: drops coefficients, or appends zeros for new ones.

    Args:
        state: tensors by name, with any storage of moments; tensors of other shapes than the moments stay.

    Returns:
        The converted state; the same state if it has another number of Gaussians or is not of harmonics.
    """
    shape = state[FIRST].shape
    if len(shape) != 3 or like.dim() != 3 or (shape[0], shape[2]) != (len(like), like.shape[2]):
        return state
    count, have = like.shape[1], shape[1]
    if count == have:
        return state
    # Negative padding cuts.
    return {
        name: functional.pad(value, (0, 0, 0, count - have)) if value.dim() >= 3 and value.shape[-2] == have else value
        for name, value in state.items()
    }
