"""The hash grid in plain torch: any device, all levels at once, and little kept for the backward pass.

``f3rm_ext.nerf.hash_grid.hash_grid_reference`` defines the function. Autograd would keep the rows and weights of all
corners of all levels, and add one gradient as large as the table for each level. Here the backward pass computes rows
and weights again, and all levels add to one gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.data.placement import free_memory
from f3rm_ext.nerf.hash_levels import LevelTensors

CHUNK_VALUES, CHUNK_VALUES_CPU = 2**24, 2**20
"""Table values read at a time: 64 MiB in float32, so that a GPU does more than start kernels; 4 MiB on the CPU, which
stay in its cache."""
TEMPORARIES = 6
"""About how many temporaries of this size there are at once."""
CHUNK_VALUES_MOST = 2**30
"""At most, where nothing is kept for a backward pass and a quarter of a GPU's free memory holds the temporaries."""


@dataclass(frozen=True)
class _Corners:
    """The eight vertices around each point on some levels; corner 4 z + 2 y + x."""

    rows: Int32[Tensor, "8 levels points"]
    sides: Float[Tensor, "3 2 levels points"]
    """Weights of the lower and the upper vertex along each axis."""

    @staticmethod
    def find(points: Tensor, levels: LevelTensors, run: slice, hashed: bool) -> "_Corners":
        """Finds the vertices around points (points, 3)."""
        numbers = levels.rows[run].T[:, :, None]  # 6, levels, 1
        position = points.T[:, None, :] * levels.scales[run, None] + 0.5  # 3, levels, points
        cell = position.floor()
        upper = position - cell
        vertex = cell.int()
        x, y, z = torch.stack([vertex, vertex + 1], dim=1) * numbers[:3, None]
        y, z = y[:, None], z[:, None, None]
        if hashed:  # The number of rows is a power of two.
            rows = (z ^ y ^ x).bitwise_and_(numbers[4] - 1)
        else:
            rows = (z + y + x).remainder_(numbers[4])
        return _Corners(rows.add_(numbers[3]).flatten(0, 2), torch.stack([1.0 - upper, upper], dim=1))

    def weights(self) -> Float[Tensor, "8 levels points"]:
        x, y, z = self.sides
        return (z[:, None, None] * y[:, None] * x).flatten(0, 2)

    def read(self, table: Float[Tensor, "entries level_feat"]) -> Float[Tensor, "8 levels points level_feat"]:
        return table.index_select(0, self.rows.flatten()).view(*self.rows.shape, -1)

    def position_gradient(self, by_weight: Float[Tensor, "8 levels points"]) -> Float[Tensor, "3 levels points"]:
        """Returns the gradient of Σ weight · by_weight by the position within the cell."""
        x, y, z = self.sides
        corners = by_weight.unflatten(0, (2, 2, 2))
        return torch.stack(
            [
                ((corners[:, :, 1] - corners[:, :, 0]) * (z[:, None] * y)).sum(dim=(0, 1)),
                ((corners[:, 1] - corners[:, 0]) * (z[:, None] * x)).sum(dim=(0, 1)),
                ((corners[1] - corners[0]) * (y[:, None] * x)).sum(dim=(0, 1)),
            ]
        )


def _chunk_values(device: torch.device, training: bool) -> int:
    if device.type == "cpu":
        return CHUNK_VALUES_CPU
    if training or device.type != "cuda":
        return CHUNK_VALUES
    return min(max(CHUNK_VALUES, free_memory(device) // 4 // (TEMPORARIES * 4)), CHUNK_VALUES_MOST)


def _pieces(
    points: Tensor, table: Tensor, levels: LevelTensors, training: bool = True
) -> Iterator[tuple[slice, slice, _Corners]]:
    """Yields points and levels of which a bounded number of table values is read, with their vertices."""
    values = _chunk_values(points.device, training)
    for run, hashed in levels.runs:
        size = max(1, values // (8 * (run.stop - run.start) * table.shape[1]))
        for start in range(0, len(points), size):
            chunk = slice(start, start + size)
            yield chunk, run, _Corners.find(points[chunk], levels, run, hashed)


class _HashGridFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, points: Tensor, table: Tensor, levels: LevelTensors, training: bool) -> Tensor:
        points, table = points.detach(), table.detach()
        out = points.new_empty(len(points), len(levels.levels), table.shape[1])
        for chunk, run, corners in _pieces(points, table, levels, training):
            features = corners.read(table).mul_(corners.weights()[..., None]).sum(dim=0)
            out[chunk, run] = features.transpose(0, 1)
        ctx.save_for_backward(points, table)
        ctx.levels = levels
        return out.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        points, table = ctx.saved_tensors
        levels: LevelTensors = ctx.levels
        by_out = grad_outputs[0].reshape(len(points), len(levels.levels), table.shape[1])
        by_points = torch.zeros_like(points) if ctx.needs_input_grad[0] else None
        by_table = torch.zeros_like(table) if ctx.needs_input_grad[1] else None
        for chunk, run, corners in _pieces(points, table, levels):
            by_features = by_out[chunk, run].transpose(0, 1)  # levels, points, level_feat
            if by_table is not None:
                rows, weights = corners.rows.flatten(), corners.weights()
                # Column by column: on the CPU, index_add_ of whole rows takes ten times as long.
                for column, values in zip(by_table.unbind(dim=1), by_features.unbind(dim=-1), strict=True):
                    column.index_add_(0, rows, (weights * values).flatten())
            if by_points is not None:
                by_weight = corners.read(table).mul_(by_features).sum(dim=-1)
                by_position = corners.position_gradient(by_weight) * levels.scales[run, None]
                by_points[chunk] += by_position.sum(dim=1).T
        return by_points, by_table, None, None


def hash_grid_torch(
    points: Float[Tensor, "points 3"], table: Float[Tensor, "entries level_feat"], levels: LevelTensors
) -> Float[Tensor, "points feat"]:
    """Interpolates like ``hash_grid_reference``, on the device and in the type of both; differentiable once."""
    training = torch.is_grad_enabled() and (points.requires_grad or table.requires_grad)
    return _HashGridFunction.apply(points, table, levels, training)  # type: ignore[return-value]
