"""Multiresolution hash grid: a readable reference, and the module that picks the fastest backend.

The three backends (tiny-cuda-nn, numba on the CPU, plain torch) compute the same function (see
:mod:`f3rm_ext.nerf.hash_levels`) of the same parameters, one table of shape (entries, features per level).
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from f3rm_ext.nerf.hash_levels import PRIMES, GridLevel, grid_levels, level_growth

INIT_RANGE = 1e-4
"""Tables start uniform in ± this (Müller et al. 2022, section 4)."""

Backend = Literal["auto", "tcnn", "numba", "torch"]


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
        if level.hashed:
            hashed = vertex * torch.tensor(PRIMES, device=points.device)
            row = (hashed[..., 0] ^ hashed[..., 1] ^ hashed[..., 2]) & 0xFFFFFFFF
        else:
            row = vertex[..., 0] + level.resolution * (vertex[..., 1] + level.resolution * vertex[..., 2])
        weights = torch.where(corners.bool(), fraction[:, None, :], 1.0 - fraction[:, None, :]).prod(dim=-1)
        outputs.append((table[level.offset + row % level.size] * weights[..., None]).sum(dim=1))
    return torch.cat(outputs, dim=-1)


def tcnn_available() -> bool:
    """Whether tiny-cuda-nn can be imported."""
    try:
        import tinycudann  # noqa: F401  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError):
        return False
    return True


class HashGrid(nn.Module):
    """A hash grid with a single table, evaluated by tiny-cuda-nn (on CUDA), numba (on the CPU) or torch.

    Args:
        num_levels: number of resolutions, ≥ 1.
        features_per_level: values stored per vertex: 1, 2, 4 or 8.
        base_res: vertices per axis of the coarsest level.
        max_res: vertices per axis of the finest level.
        log2_hashmap_size: a level has at most 2 to this power rows.
        backend: ``auto`` takes tiny-cuda-nn for CUDA tensors if it is installed, numba for CPU tensors and torch
            otherwise. A named backend is used on every device that it supports.
    """

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
        self._tcnn_options = {
            "otype": "HashGrid",
            "n_levels": num_levels,
            "n_features_per_level": features_per_level,
            "log2_hashmap_size": log2_hashmap_size,
            "base_resolution": base_res,
            "per_level_scale": level_growth(num_levels, base_res, max_res),
        }
        self._tcnn_module: list[nn.Module] = []  # A list hides it from torch, which would register the table twice.

    def resolve_backend(self, device: torch.device) -> Literal["tcnn", "numba", "torch"]:
        """Returns the backend that evaluates tensors on this device."""
        if device.type == "cuda" and self.backend in ("auto", "tcnn") and tcnn_available():
            return "tcnn"
        if device.type == "cpu" and self.backend in ("auto", "tcnn", "numba"):
            return "numba"
        return "torch"

    def forward(self, points: Float[Tensor, "points 3"]) -> Float[Tensor, "points feat"]:
        """Returns features of points in [0, 1]³, level-major; float32, or float16 with tiny-cuda-nn under autocast."""
        backend = self.resolve_backend(points.device)
        if backend == "numba":
            # Here, so that CUDA runs never import numba.
            # Not at the top: threads.settle sets numba's threads before its import, and CUDA needs no numba.
            from f3rm_ext.nerf.hash_kernels import hash_grid_numba

            return hash_grid_numba(points, self.table, self.levels)
        if backend == "tcnn":
            return self._forward_tcnn(points)
        return hash_grid_reference(points, self.table, self.levels)

    def _forward_tcnn(self, points: Tensor) -> Tensor:
        import tinycudann as tcnn  # pyright: ignore[reportMissingImports]

        if not self._tcnn_module:
            encoding = tcnn.Encoding(3, self._tcnn_options)
            if encoding.params.numel() != self.table.numel():
                raise RuntimeError(
                    f"tiny-cuda-nn stores this grid in {encoding.params.numel()} parameters instead of "
                    f"{self.table.numel()}: use the torch backend, --pipeline.model.backend torch."
                )
            # The registered table stays the parameter; tiny-cuda-nn reads its memory, and gradients flow to it.
            del encoding.params
            self._tcnn_module.append(encoding)
        encoding = self._tcnn_module[0]
        encoding.params = self.table.view(-1)  # type: ignore[assignment]
        features = encoding(points)
        # They are float16, which the float32 layers behind the grid accept only under autocast.
        return features if torch.is_autocast_enabled() else features.float()
