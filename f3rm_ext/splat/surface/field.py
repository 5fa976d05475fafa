"""What the neighbours of a Gaussian make of the space around it: density, thickness and direction.

For a point p drawn from Gaussian g with neighbours k (SuGaR, Guédon and Lepetit 2024, §4.1):

- density d(p) = Σ α_k G_k(p), G_k(p) = exp(−½ ‖S_k⁻¹ R_kᵀ (p − μ_k)‖²),
- thickness β(p) = the neighbours' mean of the smallest standard deviation s_k,
- direction n(p) = Σ w_k ± n_k, w_k ∝ α_k G_k(p) |⟨p − μ_k, n_k⟩| / s_k², Σ w_k = 1, n_k the axis of s_k, its sign that
  of ⟨n_k, n_g⟩. This is the density's own gradient, up to length, where all Gaussians are flat. Weights and signs
  are constants to the gradient.

Two implementations: torch in chunks (any device and dtype), and numba kernels with an analytic gradient (float32 on
the CPU).
"""

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.splat.gaussians import Gaussians, quats_to_rotations, smallest_axes
from f3rm_ext.splat.surface.frames import rotate

FieldBackend = Literal["auto", "torch", "numba"]

MEAN, WHITEN, ALPHA, SIZE, NORMAL, WIDTH = 0, 3, 12, 13, 14, 17
"""Columns of a table of Gaussians: centre (3), S⁻¹ Rᵀ by rows (9), opacity, smallest deviation, its axis (3)."""
MIN_SIZE = 1e-9
"""Smallest standard deviation the maths sees, scene units: keeps 1 / s² within float32."""
MAX_SQUARED = 1e8
"""Squared distances in standard deviations are clamped here."""
MIN_WEIGHT = 1e-20
"""Below this sum of weights a point has no direction but that of its own Gaussian."""
CHUNK_POINTS = 1 << 15
"""Points at once in torch: 280 MiB of float32 at 16 neighbours, forward and backward (measured)."""
CHUNK_GAUSSIANS = 1 << 17
"""Gaussians at once where a table is made: about 75 MiB of float32, forward and backward."""


class NeighbourField(NamedTuple):
    """The field at points."""

    density: Float[Tensor, " points"]
    """d, not clamped: above 1 where Gaussians overlap."""
    beta: Float[Tensor, " points"]
    """β, scene units."""
    direction: Float[Tensor, "points 3"]
    """n, of length ≤ 1; that of the own Gaussian where all weights vanish."""
    center: Float[Tensor, "points 3"]
    """μ_g of the own Gaussian. It and the next come with the field, since looking them up in the table once more would
    make another gradient of the table's size."""
    normal: Float[Tensor, "points 3"]
    """n_g: the axis of the own Gaussian's smallest deviation."""


def gaussian_table(gaussians: Gaussians) -> Float[Tensor, "gaussians 17"]:
    """All that the field needs to know of Gaussians, one row each; differentiable.

    One row is read as a whole (68 bytes), which is what makes gathering 16 neighbours per point cheap. Only the table
    is kept for the backward pass, which makes it anew in chunks: its graph would take 400 bytes per Gaussian.
    """
    parameters = (gaussians.means, gaussians.scales, gaussians.quats, gaussians.opacities)
    return _ChunkedTable.apply(*parameters)  # type: ignore[return-value]


def make_table(
    means: Float[Tensor, "gaussians 3"],
    scales: Float[Tensor, "gaussians 3"],
    quats: Float[Tensor, "gaussians 4"],
    opacities: Float[Tensor, "gaussians 1"],
) -> Float[Tensor, "gaussians 17"]:
    """:func:`gaussian_table` of single tensors, all Gaussians at once."""
    rotations = quats_to_rotations(quats)
    sizes = scales.exp().clamp_min(MIN_SIZE)
    whiten = rotations.transpose(1, 2) / sizes[:, :, None]
    return torch.cat(
        [
            means,
            whiten.flatten(1),
            opacities.sigmoid(),
            sizes.amin(dim=1, keepdim=True),
            smallest_axes(rotations, scales),
        ],
        dim=1,
    )


class _ChunkedTable(torch.autograd.Function):
    """:func:`make_table` chunk by chunk, computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        table = parameters[0].new_empty(len(parameters[0]), WIDTH)
        for start in range(0, len(table), CHUNK_GAUSSIANS):
            part = slice(start, start + CHUNK_GAUSSIANS)
            table[part] = make_table(*(parameter[part] for parameter in parameters))
        return table

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, ...]:
        parameters = ctx.saved_tensors
        grads = tuple(torch.empty_like(parameter) for parameter in parameters)
        for start in range(0, len(grad_outputs[0]), CHUNK_GAUSSIANS):
            part = slice(start, start + CHUNK_GAUSSIANS)
            with torch.enable_grad():
                inputs = [parameter[part].detach().requires_grad_() for parameter in parameters]
                found = torch.autograd.grad(make_table(*inputs), inputs, grad_outputs[0][part])
            for grad, value in zip(grads, found, strict=True):
                grad[part] = value
        return grads


def neighbour_field(
    points: Float[Tensor, "points 3"],
    owners: Int[Tensor, " points"],
    table: Float[Tensor, "gaussians 17"],
    neighbours: Int[Tensor, "gaussians neighbours"],
    *,
    chunk: int = CHUNK_POINTS,
    backend: FieldBackend = "auto",
) -> NeighbourField:
    """The field at points; differentiable once in points and table.

    Peak memory beyond points, table and their gradients: with torch one chunk's intermediates,
    about chunk · neighbours · 550 bytes in float32, whatever the number of points, since the backward pass computes
    each chunk anew; with numba one gradient table per thread, held below 256 MiB together where one fits in that.

    Args:
        points: in the scene.
        owners: the Gaussian each point belongs to, whose neighbours count.
        table: of :func:`gaussian_table`.
        neighbours: indices into the table, -1 for none.
        chunk: points at once (torch only).
        backend: "auto" takes numba for float32 on the CPU.
    """
    if backend == "auto":
        on_cpu = points.device.type == "cpu" and points.dtype == torch.float32 == table.dtype
        backend = "numba" if on_cpu else "torch"
    if backend == "numba":
        from f3rm_ext.splat.surface.kernels import field_numba

        return NeighbourField(*field_numba(points, owners, table, neighbours))
    return NeighbourField(*_ChunkedField.apply(points, owners, table, neighbours, chunk))  # type: ignore[misc]


def field_reference(
    points: Float[Tensor, "points 3"],
    own: Float[Tensor, "points 17"],
    rows: Float[Tensor, "points neighbours 17"],
    present: Float[Tensor, "points neighbours"],
) -> NeighbourField:
    """The definition of the field in torch, all points at once.

    Args:
        points: in the scene.
        own: table rows of the points' own Gaussians.
        rows: table rows of the neighbours.
        present: 1 where there is such a neighbour, else 0.
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
    """:func:`field_reference` chunk by chunk, computed again in the backward pass into one gradient of the table."""

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
            found = field_reference(points[part], table[owners[part]], table[index], present)
            for value, piece in zip(field, found, strict=True):
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
                at = points[part].detach().requires_grad_()
                own = table[owners[part]].detach().requires_grad_()
                rows = table[index].detach().requires_grad_()
                outputs = field_reference(at, own, rows, present)
                grads = torch.autograd.grad(outputs, (at, own, rows), [grad[part] for grad in grad_outputs])
            grad_points[part] = grads[0]
            grad_table.index_add_(0, owners[part], grads[1])
            grad_table.index_add_(0, index.flatten(), grads[2].flatten(0, 1))
        return grad_points, None, grad_table, None, None


def _rows(owners: Tensor, neighbours: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    index = neighbours[owners].long()
    # A neighbour that is not there reads the point's own row with weight 0.
    return torch.where(index < 0, owners[:, None], index), (index >= 0).to(dtype)
