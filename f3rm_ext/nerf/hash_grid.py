"""Multiresolution hash grid: a readable reference, and the module that picks the fastest backend.

The four backends (tiny-cuda-nn and Triton on CUDA, numba on the CPU, plain torch) compute the same function (see
:mod:`f3rm_ext.nerf.hash_levels`) of the same parameters, one table of shape (entries, features per level).
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from f3rm_ext.compat import autocast_dtype
from f3rm_ext.memory.shapes import kernel_device, lacks_values
from f3rm_ext.nerf.hash_backends import Backend, Implementation, expected_backend, resolve_backend
from f3rm_ext.nerf.hash_levels import PRIMES, GridLevel, LevelTensors, grid_levels
from f3rm_ext.nerf.hash_tcnn import TcnnGrid, encoding_options
from f3rm_ext.nerf.hash_torch import CHUNK_VALUES, CHUNK_VALUES_CPU, TEMPORARIES, hash_grid_torch

INIT_RANGE = 1e-4
"""Tables start uniform in ± this (Müller et al. 2022, section 4)."""


def hash_grid_reference(
    points: Float[Tensor, "points 3"], table: Float[Tensor, "entries level_feat"], levels: tuple[GridLevel, ...]
) -> Float[Tensor, "points feat"]:
    """Interpolates the features of every level trilinearly; the readable definition of the grid.

    Args:
        points: positions in [0, 1]³.
        table: rows of all levels, one level after the other.

    Returns:
        Features, level-major: feat = number of levels × features per level. Differentiable in points and table.
    """
    outputs = []
    corners = torch.tensor([[(c >> axis) & 1 for axis in range(3)] for c in range(8)], device=points.device)
    for level in levels:
        # Half a cell of shift, as in Instant NGP, so that vertices of all levels do not meet at the origin.
        position = points * level.scale + 0.5
        cell = position.detach().floor()
        fraction = position - cell
        vertex = cell.long()[:, None, :] + corners  # points, 8, 3
        if level.is_hashed:
            hashed = vertex * torch.tensor(PRIMES, device=points.device)
            row = (hashed[..., 0] ^ hashed[..., 1] ^ hashed[..., 2]) & 0xFFFFFFFF
        else:
            row = vertex[..., 0] + level.resolution * (vertex[..., 1] + level.resolution * vertex[..., 2])
        weights = torch.where(corners.bool(), fraction[:, None, :], 1.0 - fraction[:, None, :]).prod(dim=-1)
        outputs.append((table[level.offset + row % level.size] * weights[..., None]).sum(dim=1))
    return torch.cat(outputs, dim=-1)


class HashGrid(nn.Module):
    """A hash grid with a single table, evaluated by tiny-cuda-nn or Triton (on CUDA), numba (on the CPU) or torch.

    Args:
        features_per_level: values stored per vertex: 1, 2, 4 or 8.
        log2_hashmap_size: a level has at most 2 to this power rows.
    """

    level_scales: Tensor
    level_rows: Tensor

    def __init__(
        self,
        num_levels: int,
        features_per_level: int,
        base_res: int,
        max_res: int,
        log2_hashmap_size: int,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.levels = grid_levels(num_levels, base_res, max_res, log2_hashmap_size)
        self.features_per_level = features_per_level
        self.out_dim = num_levels * features_per_level
        self.backend: Backend = backend
        entries = self.levels[-1].offset + self.levels[-1].size
        self.table = nn.Parameter(torch.empty(entries, features_per_level).uniform_(-INIT_RANGE, INIT_RANGE))
        tensors = LevelTensors.from_levels(self.levels)
        self.register_buffer("level_scales", tensors.scales, persistent=False)
        self.register_buffer("level_rows", tensors.rows, persistent=False)
        self._tcnn_options = encoding_options(num_levels, features_per_level, base_res, max_res, log2_hashmap_size)
        self._tcnn_grid: TcnnGrid | None = None

    def resolve_backend(self, device: torch.device) -> Implementation:
        """Returns the backend that evaluates tensors on this device."""
        return resolve_backend(self.backend, device)

    def forward(self, points: Float[Tensor, "points 3"], *, frozen: bool = False) -> Float[Tensor, "points feat"]:
        """Returns features of points in [0, 1]³, level-major; float32, or half with a CUDA backend under autocast.

        Args:
            frozen: no gradient flows to the table. A backend computes that gradient even where only the gradient of
                the points is asked for.
        """
        table = self.table.detach() if frozen else self.table
        if lacks_values(points):
            return hash_grid_null(points, table, self.out_dim, self.backend)
        backend = self.resolve_backend(points.device)
        if backend == "numba":
            # Here, because threads.settle sets numba's threads before its import, and CUDA needs no numba.
            from f3rm_ext.nerf.hash_kernels import hash_grid_numba

            return hash_grid_numba(points, table, self.levels)
        if backend == "tcnn":
            if self._tcnn_grid is None:
                self._tcnn_grid = TcnnGrid(self._tcnn_options, self.table.numel())
            return self._tcnn_grid(points, table)
        levels = LevelTensors(self.levels, self.level_scales, self.level_rows)
        if backend == "triton":
            # Here, because not every platform has Triton.
            from f3rm_ext.nerf.hash_triton import hash_grid_triton

            return hash_grid_triton(points, table, levels, autocast_dtype(points.device.type))
        return hash_grid_torch(points, table, levels)


# --- tensors without values -------------------------------------------------------------------------------------------


class _NullGrid(torch.autograd.Function):
    """Keeps points and table, as all backends do. The torch backend also needs ``scratch`` numbers in both passes."""

    @staticmethod
    def forward(ctx: Any, points: Tensor, table: Tensor, width: int, dtype: torch.dtype, scratch: int) -> Tensor:
        points, table = points.detach().contiguous(), table.detach()
        ctx.save_for_backward(points, table)
        ctx.scratch = scratch
        features = points.new_empty(len(points), width, dtype=dtype)
        points.new_empty(scratch)
        return features

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        points, table = ctx.saved_tensors
        kept = gradients[0].contiguous()
        by_table = torch.empty_like(table) if ctx.needs_input_grad[1] else None
        by_points = torch.empty_like(points) if ctx.needs_input_grad[0] else None
        kept.new_empty(ctx.scratch)
        return by_points, by_table, None, None, None


def hash_grid_null(
    points: Float[Tensor, "points 3"], table: Float[Tensor, "entries level_feat"], width: int, backend: Backend
) -> Float[Tensor, "points feat"]:
    """Allocates what a backend allocates and keeps, and computes nothing: kernels cannot read tensors without values.

    Args:
        backend: the backend whose memory is allocated; ``auto`` is the one that a run would choose.
    """
    device_type = kernel_device(points)
    chosen = expected_backend(backend, device_type)
    if chosen == "tcnn":
        # It reads a copy of the table in half precision.
        features = _NullGrid.apply(points, table.half(), width, torch.float16, 0)
        return features if torch.is_autocast_enabled("cpu") else features.float()  # type: ignore[union-attr]
    dtype, scratch = points.dtype, 0
    if chosen == "triton":
        dtype = autocast_dtype("cpu")
    elif chosen == "torch":
        most = CHUNK_VALUES_CPU if device_type == "cpu" else CHUNK_VALUES
        scratch = TEMPORARIES * min(most, 8 * len(points) * width)
    return _NullGrid.apply(points, table, width, dtype, scratch)  # type: ignore[return-value]
