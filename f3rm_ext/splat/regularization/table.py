"""The table of Gaussians that the neighbours' field reads: one row of 17 numbers per Gaussian.

One row is read as a whole (68 bytes), which makes gathering 16 neighbours per point cheap.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.memory.shapes import chunks
from f3rm_ext.splat.gaussians import Gaussians, quats_to_rotations, smallest_axes
from f3rm_ext.splat.memory.allocator import count_fitting_rows

MEAN, WHITEN, ALPHA, SIZE, NORMAL, WIDTH = 0, 3, 12, 13, 14, 17
"""Columns: centre (3), S⁻¹ Rᵀ by rows (9), opacity, smallest standard deviation, the axis of that deviation (3)."""
MIN_SIZE = 1e-9
"""Smaller standard deviations are raised to this, scene units, to keep 1 / s² within float32."""
MAX_SQUARED = 1e8
"""Upper bound on squared distances, in standard deviations."""
MIN_WEIGHT = 1e-20
"""Below this sum of weights, a point takes the direction of its own Gaussian."""
CHUNK_GAUSSIANS, MOST_GAUSSIANS = 1 << 17, 1 << 20
"""Fewest and most Gaussians per chunk when the table is built. The fewest take about 75 MiB of float32, forward and
backward."""
_GAUSSIAN_BYTES = 600


def gaussian_table(gaussians: Gaussians) -> Float[Tensor, "gaussians 17"]:
    """Builds the table from Gaussians; differentiable.

    The backward pass recomputes the table in chunks instead of keeping its graph, which would take 400 bytes per
    Gaussian.
    """
    parameters = (gaussians.means, gaussians.scales, gaussians.quats, gaussians.opacities)
    return _ChunkedTable.apply(*parameters)  # type: ignore[return-value]


def make_table(
    means: Float[Tensor, "gaussians 3"],
    scales: Float[Tensor, "gaussians 3"],
    quats: Float[Tensor, "gaussians 4"],
    opacities: Float[Tensor, "gaussians 1"],
) -> Float[Tensor, "gaussians 17"]:
    """Builds the table from separate tensors, all Gaussians at once; see :func:`gaussian_table`."""
    rotations = quats_to_rotations(quats)
    sizes = scales.exp().clamp_min(MIN_SIZE)
    whiten = rotations.transpose(1, 2) / sizes[:, :, None]
    smallest = sizes.amin(dim=1, keepdim=True), smallest_axes(rotations, scales)
    return torch.cat([means, whiten.flatten(1), opacities.sigmoid(), *smallest], dim=1)


class _ChunkedTable(torch.autograd.Function):
    """Runs :func:`make_table` chunk by chunk and recomputes it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        table = parameters[0].new_empty(len(parameters[0]), WIDTH)
        for part in _parts(table):
            table[part] = make_table(*(parameter[part] for parameter in parameters))
        return table

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, ...]:
        parameters = ctx.saved_tensors
        grads = tuple(torch.empty_like(parameter) for parameter in parameters)
        for part in _parts(parameters[0]):
            with torch.enable_grad():
                inputs = [parameter[part].detach().requires_grad_() for parameter in parameters]
                gradients = torch.autograd.grad(make_table(*inputs), inputs, grad_outputs[0][part])
            for grad, value in zip(grads, gradients, strict=True):
                grad[part] = value
        return grads


def _parts(rows: Tensor) -> list[slice]:
    return chunks(rows, count_fitting_rows(rows.device, _GAUSSIAN_BYTES, CHUNK_GAUSSIANS, MOST_GAUSSIANS))
