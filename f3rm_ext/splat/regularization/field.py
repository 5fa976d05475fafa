"""The field of a Gaussian's neighbours: density, thickness and direction at points around it.

For a point p drawn from Gaussian g with neighbours k (SuGaR, Guédon and Lepetit 2024, §4.1):

- density d(p) = Σ α_k G_k(p), G_k(p) = exp(−½ ‖S_k⁻¹ R_kᵀ (p − μ_k)‖²),
- thickness β(p) = the neighbours' mean of the smallest standard deviation s_k,
- direction n(p) = Σ w_k ± n_k, w_k ∝ α_k G_k(p) |⟨p − μ_k, n_k⟩| / s_k², Σ w_k = 1, n_k the axis of s_k, its sign that
  of ⟨n_k, n_g⟩. Where all Gaussians are flat, this is the gradient of the density up to its length. Weights and signs
  are detached.

There are three implementations: torch in chunks (any device and dtype), and kernels with an analytic gradient for
float32, numba's on the CPU and Triton's on CUDA.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.memory.shapes import kernel_device
from f3rm_ext.splat.memory.allocator import count_fitting_rows
from f3rm_ext.splat.regularization.frames import rotate
from f3rm_ext.splat.regularization.table import ALPHA, MAX_SQUARED, MEAN, MIN_WEIGHT, NORMAL, SIZE, WHITEN
from f3rm_ext.splat.triton_kernels import choose_kernels

TRITON_KERNELS = "f3rm_ext.splat.regularization.triton_field"
KERNELS = "f3rm_ext.splat.regularization.kernels", TRITON_KERNELS
"""Modules for :class:`KernelField`."""
CHUNK_POINTS, MOST_POINTS = 1 << 15, 1 << 19
"""Fewest and most points per chunk in torch. The fewest take 280 MiB of float32 at 16 neighbours, forward and backward
(measured)."""
NEIGHBOUR_BYTES = 550
"""Memory of a chunk in torch, per point and neighbour, float32."""


class NeighbourField(NamedTuple):
    """The field at points."""

    density: Float[Tensor, " points"]
    """d, not clamped: above 1 where Gaussians overlap."""
    beta: Float[Tensor, " points"]
    """β, scene units."""
    direction: Float[Tensor, "points 3"]
    """n, of length ≤ 1; the point's own n_g where all weights vanish."""
    center: Float[Tensor, "points 3"]
    """μ_g, the centre of the point's own Gaussian. Reading it from the table separately would cost a second gradient
    of the table's size; the same holds for ``normal``."""
    normal: Float[Tensor, "points 3"]
    """n_g, the axis of the smallest deviation of the point's own Gaussian."""


def neighbour_field(
    points: Float[Tensor, "points 3"],
    owners: Int[Tensor, " points"],
    table: Float[Tensor, "gaussians 17"],
    neighbours: Int[Tensor, "gaussians neighbours"],
    *,
    chunk: int = 0,
) -> NeighbourField:
    """Computes the field at points; differentiable once in points and table.

    For float32 by numba on the CPU and by Triton on CUDA if it works there; else by torch.

    Peak memory beyond points, table and their gradients: torch holds the intermediates of one chunk, about
    chunk · neighbours · 550 bytes in float32 for any number of points, since the backward pass recomputes each chunk.
    numba holds one gradient table per thread, together at most 256 MiB unless a single table is larger. Triton holds
    nothing more.

    Args:
        owners: index of the Gaussian each point belongs to; the neighbours of that Gaussian contribute.
        neighbours: indices into the table, -1 for none.
        chunk: points per chunk (torch only); 0 for 32,768 on the CPU and for as many as fit in a quarter of the free
            memory of a GPU.
    """
    given = points, owners, table, neighbours
    kernels = choose_kernels(KERNELS, points, table)
    if kernels is not None:
        return NeighbourField(*KernelField.apply(*given, kernels))  # type: ignore[misc]
    row_bytes = NEIGHBOUR_BYTES * neighbours.shape[1]
    chunk = chunk or count_fitting_rows(points.device, row_bytes, CHUNK_POINTS, MOST_POINTS)
    return NeighbourField(*_ChunkedField.apply(*given, chunk))  # type: ignore[misc]


def field_reference(
    points: Float[Tensor, "points 3"],
    own: Float[Tensor, "points 17"],
    rows: Float[Tensor, "points neighbours 17"],
    present: Float[Tensor, "points neighbours"],
) -> NeighbourField:
    """Defines the field in plain torch, all points at once.

    Args:
        own: table rows of the points' own Gaussians.
        rows: table rows of the neighbours.
        present: 1 where that neighbour exists, else 0.
    """
    offsets = points[:, None] - rows[..., MEAN:WHITEN]
    whiten = rows[..., WHITEN:ALPHA].unflatten(-1, (3, 3))
    squared = rotate(offsets, whiten).square().sum(-1).clamp(max=MAX_SQUARED)
    shares = rows[..., ALPHA] * (-0.5 * squared).exp() * present
    beta = (rows[..., SIZE] * present).sum(1) / present.sum(1).clamp_min(1)
    normals = rows[..., NORMAL:]
    with torch.no_grad():
        signs = torch.where((normals * own[:, None, NORMAL:]).sum(-1) < 0, -1.0, 1.0)
        heights = (normals * offsets).sum(-1).abs()
        weights = shares * heights / rows[..., SIZE].square()
        total = weights.sum(1, keepdim=True)
        signed = torch.where(total > MIN_WEIGHT, weights * signs / total.clamp_min(MIN_WEIGHT), 0)
        alone = total <= MIN_WEIGHT
    direction = (signed[..., None] * normals).sum(1)
    own_center, own_normal = own[:, MEAN:WHITEN], own[:, NORMAL:]
    return NeighbourField(shares.sum(1), beta, torch.where(alone, own_normal, direction), own_center, own_normal)


class _ChunkedField(torch.autograd.Function):
    """Runs :func:`field_reference` chunk by chunk; the backward pass recomputes each and adds to one table gradient."""

    @staticmethod
    def forward(
        ctx: Any, points: Tensor, owners: Tensor, table: Tensor, neighbours: Tensor, chunk: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(points, owners, table, neighbours)
        ctx.chunk = chunk
        density, beta = points.new_empty(len(points)), points.new_empty(len(points))
        field = (density, beta, *(torch.empty_like(points) for _ in range(3)))
        for start in range(0, len(points), chunk):
            part = slice(start, start + chunk)
            index, present = _rows(owners[part], neighbours, points.dtype)
            values = field_reference(points[part], table[owners[part]], table[index], present)
            for value, piece in zip(field, values, strict=True):
                value[part] = piece
        return field

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        points, owners, table, neighbours = ctx.saved_tensors
        grad_points, grad_table = torch.zeros_like(points), torch.zeros_like(table)
        for start in range(0, len(points), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            index, present = _rows(owners[part], neighbours, points.dtype)
            with torch.enable_grad():
                places = points[part].detach().requires_grad_()
                own = table[owners[part]].detach().requires_grad_()
                rows = table[index].detach().requires_grad_()
                outputs = field_reference(places, own, rows, present)
                grads = torch.autograd.grad(outputs, (places, own, rows), [grad[part] for grad in grad_outputs])
            grad_points[part] = grads[0]
            grad_table.index_add_(0, owners[part], grads[1])
            grad_table.index_add_(0, index.flatten(), grads[2].flatten(0, 1))
        return grad_points, None, grad_table, None, None


class KernelField(torch.autograd.Function):
    """The field in float32 by kernels: numba's on the CPU, Triton's on CUDA. Without values they only allocate.

    Triton's add gradients of the table in any order, so their last bits differ from run to run.
    """

    @staticmethod
    def forward(
        ctx: Any, points: Tensor, owners: Tensor, table: Tensor, neighbours: Tensor, kernels: Any
    ) -> tuple[Tensor, ...]:
        given = tuple(value.detach().contiguous() for value in (points, owners, table, neighbours))
        points, owners, table, _ = given
        density, beta, totals = (points.new_empty(len(points)) for _ in range(3))
        direction = torch.empty_like(points)
        kernels.evaluate(*given, density, beta, direction, totals)
        ctx.kernels = kernels
        ctx.save_for_backward(*given, totals)
        center, normal = (columns.index_select(0, owners) for columns in (table[:, MEAN:WHITEN], table[:, NORMAL:]))
        return density, beta, direction, center, normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        points, owners, table = ctx.saved_tensors[:3]
        upstream = [grad.contiguous() for grad in grad_outputs[:3]]
        grad_points = torch.empty_like(points)
        # Without values the kernels are numba's on every device, but only on the CPU does each thread have a table.
        tables = ctx.kernels.table_count(table.nbytes) if kernel_device(table) == "cpu" else 1
        grad_tables = table.new_zeros(tables, *table.shape)
        ctx.kernels.differentiate(*ctx.saved_tensors, *upstream, grad_points, grad_tables)
        del upstream
        grad_table = grad_tables[0] if tables == 1 else grad_tables.sum(0)
        grad_table[:, MEAN:WHITEN].index_add_(0, owners, grad_outputs[3])
        grad_table[:, NORMAL:].index_add_(0, owners, grad_outputs[4])
        return grad_points, None, grad_table, None, None


def _rows(owners: Tensor, neighbours: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    index = neighbours[owners].long()
    # A missing neighbour reads the row of the point's own Gaussian, with weight 0.
    return torch.where(index < 0, owners[:, None], index), (index >= 0).to(dtype)
