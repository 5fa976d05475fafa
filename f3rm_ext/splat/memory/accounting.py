"""What Gaussians take in memory, to the byte: before and after the options that save some.

Counts what grows with the number of Gaussians, and what the regularisation of surfaces takes. Images, and other
buffers of a fixed size, are not in it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from f3rm_ext.splat.gaussians import sh_rest_count
from f3rm_ext.splat.memory.moments import MOMENTS, MomentStorage
from f3rm_ext.splat.memory.options import MemoryOptions, Storage
from f3rm_ext.splat.memory.packed import packed_gradient

OTHER_NUMBERS = 3 + 3 + 4 + 1 + 3
"""Means, scales, quaternions, opacity, colour: what is never stored in less than float32."""
FLOAT, HALF, INT32, INT64 = 4, 2, 4, 8
PACKED_BYTES = INT64 + 6 * FLOAT
"""Gradient by a visible Gaussian's harmonics: its number, a direction, and the gradient by its colour."""
NAIVE_COPIES = 3
"""Copies of the harmonics in flight where colours are made of float32 coefficients by autograd: all coefficients in
one tensor, the gradient by that, and the part of it that becomes the gradient of features_rest."""
RENDERING: dict[str, int] = {
    "sizes and gradient": 6,
    "opacities and gradient": 2,
    "unit quaternions and gradient": 8,
    "directions, their lengths, unit directions and gradient": 10,
    "colours and gradient": 6,
    "screen positions and gradient": 4,
    "screen covariances, inverses and gradient": 9,
    "depths and gradient": 2,
    "radii and tile counts": 2,
}
"""Numbers per Gaussian that a picture needs whatever is stored: an estimate, backends differ."""

TABLE_BYTES = (17 + 11 + 11) * FLOAT
"""Regularisation, by Gaussian, where the table itself is no longer needed (which is worse than when it is): its
gradient, and twice the gradients of means, scales, quaternions and opacities, by the points and by the table."""
POINT_BYTES = 224
"""Regularisation, by point: its place, its owner, the field there, and what the backward pass needs of them (measured:
benchmarks/splat_regularization.py)."""
CHUNKS_BYTES = 355 << 20
"""One chunk of points and one of Gaussians, where torch works (measured)."""

Group = Literal["kept", "gradient", "in flight", "rendering", "regularization"]


class Item(NamedTuple):
    """Something in memory."""

    name: str
    group: Group
    bytes: int


@dataclass(frozen=True)
class Layout:
    """How Gaussians are stored while they are trained."""

    gaussians: int
    """How many."""
    sh_degree: int = 3
    """Of the colours."""
    storage: Storage = "float32"
    """Of the harmonics beyond the first."""
    moments: MomentStorage = "float32"
    """Of Adam, for these harmonics."""
    packed: bool = True
    """Gradients of these harmonics for visible Gaussians only, as directions and colours; else dense by autograd."""
    visible: float = 1.0
    """Fraction of Gaussians that one picture shows; 1 is the worst case."""
    reflective: float = 0.0
    """Fraction with a remainder, where storage is selective."""
    neighbours: int = 16
    """Of the regularizer's neighbour table; 0 without."""
    index_bytes: int = INT32
    """Of an entry of the neighbour table."""
    statistics: int = 2
    """Numbers that the growth strategy keeps per Gaussian: 2, 3 with sizes in the picture, 0 once growth is over."""
    filter_3d: bool = True
    """Whether there is a smoothing filter."""
    points: int = 0
    """At which surfaces are regularised in a step; 0 without."""

    @classmethod
    def of(cls, options: MemoryOptions, gaussians: int, sh_degree: int = 3, points: int = 0) -> "Layout":
        """What options come to."""
        return cls(gaussians, sh_degree, options.storage, options.moments, points=points)

    @classmethod
    def naive(cls, gaussians: int, sh_degree: int = 3, points: int = 0) -> "Layout":
        """All in float32 with dense gradients, int64 indices: what one gets without thinking about it.

        Its regularisation, where there are points, is ours: in chunks, not naive.
        """
        return cls(gaussians, sh_degree, packed=False, index_bytes=INT64, points=points)

    def with_visible(self, fraction: float) -> "Layout":
        """The same where a picture shows fewer Gaussians."""
        return replace(self, visible=fraction)


def account(layout: Layout) -> list[Item]:
    """Everything that grows with the number of Gaussians, in bytes; :func:`peak` says what of it is there at once.

    "kept" stays from step to step. "gradient" is there from the backward pass to the optimiser's step. "in flight"
    are copies of harmonics within a step, "rendering" the rest of a picture's intermediates (an estimate),
    "regularization" all that losses at surfaces need.
    """
    count = layout.gaussians
    coefficients = 3 * sh_rest_count(layout.sh_degree)
    stored = FLOAT if layout.storage == "float32" else HALF
    visible = round(count * layout.visible)
    items = [
        Item("parameters but harmonics", "kept", count * OTHER_NUMBERS * FLOAT),
        Item("harmonics", "kept", count * coefficients * stored),
        Item("moments but of harmonics", "kept", 2 * count * OTHER_NUMBERS * FLOAT),
        Item("moments of harmonics", "kept", count * MOMENTS[layout.moments].bytes_per_row(coefficients)),
        Item("last steps of moments", "kept", count * INT32 * layout.packed),
        Item("statistics of growth", "kept", count * layout.statistics * FLOAT),
        Item("neighbours", "kept", count * layout.neighbours * layout.index_bytes),
        Item("3D filter", "kept", count * FLOAT * layout.filter_3d),
        Item("gradients but of harmonics", "gradient", count * OTHER_NUMBERS * FLOAT),
        Item(
            "gradients of harmonics",
            "gradient",
            visible * PACKED_BYTES * bool(coefficients) if layout.packed else count * coefficients * FLOAT,
        ),
        Item("copies of harmonics", "in flight", 0 if layout.packed else NAIVE_COPIES * count * coefficients * FLOAT),
        Item("a picture's intermediates", "rendering", count * sum(RENDERING.values()) * FLOAT),
        Item("table of Gaussians and gradients", "regularization", count * TABLE_BYTES * bool(layout.points)),
        Item("points on surfaces", "regularization", layout.points * POINT_BYTES + CHUNKS_BYTES * bool(layout.points)),
    ]
    if layout.storage == "selective":
        rows = round(count * layout.reflective) + 1
        items.insert(2, Item("remainders", "kept", count * INT32 + rows * coefficients * HALF))
    return items


def total(items: Iterable[Item], *groups: Group) -> int:
    """Bytes of some groups; of all by default."""
    return sum(item.bytes for item in items if not groups or item.group in groups)


def peak(items: Iterable[Item]) -> int:
    """Bytes at the worst moment of a step.

    A step's backward pass comes to the regularisation first, when the picture has its values and no gradients yet,
    and to the picture when all of the regularisation but parameters' gradients is gone.
    """
    items = list(items)
    regularizing = total(items, "rendering") // 2 + total(items, "regularization")
    drawing = total(items, "gradient", "in flight", "rendering")
    return total(items, "kept") + max(regularizing, drawing)


def held_bytes(
    params: Mapping[str, Tensor] | torch.nn.ParameterDict,
    optimizers: Mapping[str, torch.optim.Optimizer],
    *others: Tensor,
) -> dict[str, int]:
    """What tensors really hold, in bytes, each piece of memory counted once.

    Args:
        params: of the Gaussians.
        optimizers: of these.
        others: whatever else is kept per Gaussian: statistics, neighbours, filters.

    Returns:
        Bytes of "parameters", "moments" (all tensors in the optimisers' states), "gradients" and "others".
    """
    gradients: list[Tensor] = []
    for parameter in params.values():
        packed = packed_gradient(parameter)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
        for picture in packed.pictures if packed else ():
            gradients += [picture.rows, picture.directions, picture.colors]
    states = [
        value for optimizer in optimizers.values() for state in optimizer.state.values() for value in state.values()
    ]
    moments = [value for value in states if isinstance(value, Tensor) and value.dim() > 0]
    groups = {"parameters": params.values(), "moments": moments, "gradients": gradients, "others": others}
    return {name: _bytes(tensors) for name, tensors in groups.items()}


def _bytes(tensors: Iterable[Tensor]) -> int:
    pieces = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(pieces.values())
