"""Memory that Gaussians take in training, in bytes, with and without the options that save some.

Counts everything that grows with the number of Gaussians, and the surface regularisation. Images and other buffers of
a fixed size are not included.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from f3rm_ext.splat.gaussians import sh_rest_count
from f3rm_ext.splat.memory.moments import MOMENTS, MomentStorage
from f3rm_ext.splat.memory.options import MemoryOptions, Storage
from f3rm_ext.splat.memory.packed import packed_gradient

OTHER_NUMBERS = 3 + 3 + 4 + 1 + 3
"""Numbers per Gaussian that are always float32: mean, scales, quaternion, opacity, colour."""
FLOAT, HALF, INT32, INT64 = 4, 2, 4, 8
PACKED_BYTES = INT64 + 6 * FLOAT
"""Packed gradient with respect to the harmonics of a visible Gaussian: index, direction, gradient of the colour."""
NAIVE_COPIES = 3
"""Temporary copies of float32 harmonics under plain autograd: all coefficients in one tensor, its gradient, and the
part of that which becomes the gradient of features_rest."""
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
"""Numbers per Gaussian that rendering needs with any storage; an estimate, since backends differ."""

PLANES: dict[str, int] = {
    "rotations and gradient": 18,
    "normals, in the scene, in the camera and facing it, and gradients": 18,
    "centres in the camera and gradient": 6,
    "distances of planes, and colours with all of it, with gradients": 16,
}
"""Numbers per Gaussian that rendering needs for normals and the depth of planes; an estimate. The nearby view of
``planar`` keeps none for the backward pass, and its own are gone before the picture is at its peak."""
TABLE_BYTES = (17 + 11 + 11) * FLOAT
"""Regularisation, bytes per Gaussian at its peak, when the table itself is already freed: the gradient of the table,
and two gradients of means, scales, quaternions and opacities, one through the points and one through the table."""
POINT_BYTES = 224
"""Regularisation, bytes per point: position, owner, field and the tensors saved for the backward pass (measured by
benchmarks/splat_regularization.py)."""
CHUNKS_BYTES = 355 << 20
"""Regularisation: one chunk of points and one of Gaussians in torch (measured on the CPU). On a GPU, chunks take up
to a quarter of the memory that is free; Triton needs none for points."""

Group = Literal["kept", "gradient", "in flight", "rendering", "regularization"]


class Item(NamedTuple):
    """One entry of the account."""

    name: str
    group: Group
    bytes: int


@dataclass(frozen=True)
class Layout:
    """Storage of Gaussians during training."""

    gaussians: int
    """Number of Gaussians."""
    sh_degree: int = 3
    """SH degree of the colours."""
    storage: Storage = "float32"
    """Storage of the harmonics beyond the first."""
    moments: MomentStorage = "float32"
    """Storage of Adam's moments of these harmonics."""
    packed: bool = True
    """Whether gradients of these harmonics are packed, for visible Gaussians only, instead of dense."""
    visible: float = 1.0
    """Fraction of Gaussians visible in an image; 1 is the worst case."""
    reflective: float = 0.0
    """Fraction of Gaussians with a remainder, for selective storage."""
    neighbours: int = 16
    """Neighbours per Gaussian in the table of the regulariser; 0 without regularisation."""
    index_bytes: int = INT32
    """Bytes of an entry in the table of neighbours."""
    statistics: int = 2
    """Numbers per Gaussian that densification keeps: 2, or 3 with image radii, or 0 once growth has ended."""
    filter_3d: bool = True
    """Whether there is a 3D filter."""
    points: int = 0
    """Points per step of the regularisation; 0 without regularisation and for planar."""
    planes: bool = False
    """Whether normals and the depth of planes are rendered, as for planar; it has no neighbours."""

    @classmethod
    def of(cls, options: MemoryOptions, gaussians: int, sh_degree: int = 3, points: int = 0) -> "Layout":
        """Creates the layout that options lead to."""
        return cls(gaussians, sh_degree, options.storage, options.moments, points=points)

    @classmethod
    def naive(cls, gaussians: int, sh_degree: int = 3, points: int = 0) -> "Layout":
        """Creates a layout without any savings: float32, dense gradients and int64 indices.

        The regularisation, if there are points, still works in chunks.
        """
        return cls(gaussians, sh_degree, packed=False, index_bytes=INT64, points=points)


def account(layout: Layout) -> list[Item]:
    """Lists everything that grows with the number of Gaussians, in bytes; :func:`peak` returns their maximum at once.

    "kept" persists between steps. "gradient" lives from the backward pass to the optimiser's step. "in flight" are
    temporary copies of harmonics, "rendering" the other intermediates of an image (an estimate), and "regularization"
    everything the surface losses need.
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
        Item("normals and depth of planes", "rendering", count * sum(PLANES.values()) * FLOAT * layout.planes),
        Item("table of Gaussians and gradients", "regularization", count * TABLE_BYTES * bool(layout.points)),
        Item("points on surfaces", "regularization", layout.points * POINT_BYTES + CHUNKS_BYTES * bool(layout.points)),
    ]
    if layout.storage == "selective":
        rows = round(count * layout.reflective) + 1
        items.insert(2, Item("remainders", "kept", count * INT32 + rows * coefficients * HALF))
    return items


def total(items: Iterable[Item], *groups: Group) -> int:
    """Sums the bytes of some groups; of all by default."""
    return sum(item.bytes for item in items if not groups or item.group in groups)


def peak(items: Iterable[Item]) -> int:
    """Returns the bytes at the peak of a step.

    The backward pass reaches the regularisation first, when the image has values but no gradients yet. It reaches the
    image when only the parameters' gradients remain of the regularisation.
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
    """Measures the bytes that tensors hold; counts shared storage once.

    Args:
        params: of the Gaussians.
        optimizers: of these parameters.
        others: other per-Gaussian tensors: statistics, neighbours, filters.

    Returns:
        Bytes of "parameters", "moments" (all tensors in the optimisers' states), "gradients" and "others".
    """
    gradients: list[Tensor] = []
    for parameter in params.values():
        packed = packed_gradient(parameter)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
        for picture in packed.pictures if packed else ():
            gradients += picture.tensors()
    states = [
        value for optimizer in optimizers.values() for state in optimizer.state.values() for value in state.values()
    ]
    moments = [value for value in states if isinstance(value, Tensor) and value.dim() > 0]
    groups = {"parameters": params.values(), "moments": moments, "gradients": gradients, "others": others}
    return {name: _bytes(tensors) for name, tensors in groups.items()}


def _bytes(tensors: Iterable[Tensor]) -> int:
    pieces = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(pieces.values())
