"""Multiresolution hash grid: a readable reference, and the module that picks the fastest backend.

The four backends (tiny-cuda-nn and Triton on CUDA, numba on the CPU, plain torch) compute the same function (see
:mod:`f3rm_ext.nerf.hash_levels`) of the same parameters, one table of shape (entries, features per level).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from f3rm_ext.compat import autocast_dtype
from f3rm_ext.memory.shapes import lacks_values
from f3rm_ext.nerf.hash_backends import Backend, Implementation, resolve_backend
from f3rm_ext.nerf.hash_levels import PRIMES, GridLevel, LevelTensors, grid_levels
from f3rm_ext.nerf.hash_null import hash_grid_null
from f3rm_ext.nerf.hash_tcnn import TcnnGrid, encoding_options
from f3rm_ext.nerf.hash_torch import hash_grid_torch

INIT_RANGE = 1e-4
"""Tables start uniform in ± this (Müller et al. 2022, section 4)."""


def hash_grid_reference(
    points: Float[Tensor, "points 3"], table: Float[Tensor, "entries level_feat"], levels: tuple[GridLevel, ...]
) -> Float[Tensor, "points feat"]:
    """Interpolates the features of every level trilinearly; the readable definition of the grid.

    Args:
        points: positions in [0, 1]³.
        table: rows of all levels, one level after the other.
        levels: geometry from :func:`~f3rm_ext.nerf.hash_levels.grid_levels`.

    Returns:
        Features, level-major: feat = number of levels × features per level. Differentiable in points and table.
    """
    outputs = []
    corners = torch.tensor([[(c >> axis) & 1 for axis in range(3)] for c in range(8)], device=points.device)
    for level in levels:
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
        backend: see :func:`~f3rm_ext.nerf.hash_backends.resolve_backend`.
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
            # Here, so that CUDA runs never import numba.
            # Not at the top: threads.settle sets numba's threads before its import, and CUDA needs no numba.
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
