"""Multiresolution hash grid: geometry, a readable reference, and the module that picks the fastest backend.

The function is that of Instant-NGP (Müller et al. 2022, section 3, eq. 2–4) with the conventions of tiny-cuda-nn:
level l has scale s_l = base_res · b^l − 1, coordinates x · s_l + ½, dense indexing while the level fits into the
table and hashing beyond. The three backends (tiny-cuda-nn, numba on the CPU, plain torch) therefore compute the
same function of the same parameters, which are stored as one (entries, features per level) table.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

PRIMES = (1, 2654435761, 805459861)
"""Hash multipliers per axis (Müller et al. 2022, eq. 4)."""
INIT_RANGE = 1e-4
"""Tables start uniform in ± this (Müller et al. 2022, section 4)."""

Backend = Literal["auto", "tcnn", "numba", "torch"]


@dataclass(frozen=True)
class GridLevel:
    """One resolution of the grid."""

    scale: float
    """Coordinates in [0, 1] are multiplied by this, then shifted by ½."""
    resolution: int
    """Vertices per axis."""
    offset: int
    """First row of this level in the table."""
    size: int
    """Rows of this level."""

    @property
    def hashed(self) -> bool:
        """Whether several vertices may share a row."""
        return self.resolution**3 > self.size


def level_growth(num_levels: int, base_res: int, max_res: int) -> float:
    """By how much the resolution grows from level to level."""
    return (max_res / base_res) ** (1.0 / max(1, num_levels - 1))


def grid_levels(num_levels: int, base_res: int, max_res: int, log2_hashmap_size: int) -> tuple[GridLevel, ...]:
    """The levels of a grid whose resolutions grow geometrically from base_res to max_res.

    Computed in float32, step by step as tiny-cuda-nn does it: where a scale is a whole number in exact arithmetic, an
    error in its last digit decides whether the level has one vertex more per axis.

    Args:
        num_levels: number of levels L ≥ 1.
        base_res: vertices per axis of the coarsest level.
        max_res: vertices per axis of the finest level.
        log2_hashmap_size: a level never has more than 2 to this power rows.
    """
    # log2f and exp2f round what they find in double precision, here as in C.
    log2_growth = np.float32(math.log2(np.float32(level_growth(num_levels, base_res, max_res))))
    levels: list[GridLevel] = []
    offset = 0
    for level in range(num_levels):
        grown = np.float32(2.0 ** float(np.float32(level) * log2_growth))
        scale = float(grown * np.float32(base_res) - np.float32(1.0))
        resolution = math.ceil(scale) + 1
        size = min(-(-(resolution**3) // 8) * 8, 2**log2_hashmap_size)
        levels.append(GridLevel(scale=scale, resolution=resolution, offset=offset, size=size))
        offset += size
    return tuple(levels)


def hash_grid_reference(
    points: Float[Tensor, "points 3"], table: Float[Tensor, "entries level_feat"], levels: tuple[GridLevel, ...]
) -> Float[Tensor, "points feat"]:
    """Trilinearly interpolated features of every level, level-major; the readable definition.

    Args:
        points: positions in [0, 1]³.
        table: rows of all levels, one below the other.
        levels: geometry from :func:`grid_levels`.

    Returns:
        Features, feat = number of levels × features per level. Differentiable in points and table.
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
    """A hash grid with one table, evaluated by tiny-cuda-nn, by numba (on the CPU) or by torch.

    Args:
        num_levels: number of resolutions, ≥ 1.
        features_per_level: features stored per vertex: 1, 2, 4 or 8.
        base_res: coarsest resolution, vertices per axis.
        max_res: finest resolution, vertices per axis.
        log2_hashmap_size: at most 2 to this power rows per level.
        backend: ``auto`` takes tiny-cuda-nn for CUDA tensors where it is installed, numba for CPU tensors and torch
            otherwise; a named backend is used wherever it can run.
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
        self._tcnn_module: list[nn.Module] = []  # In a list, so that its parameters are not registered twice.

    def resolve_backend(self, device: torch.device) -> Literal["tcnn", "numba", "torch"]:
        """The backend that runs for tensors on this device."""
        if device.type == "cuda" and self.backend in ("auto", "tcnn") and tcnn_available():
            return "tcnn"
        if device.type == "cpu" and self.backend in ("auto", "tcnn", "numba"):
            return "numba"
        return "torch"

    def forward(self, points: Float[Tensor, "points 3"]) -> Float[Tensor, "points feat"]:
        """Features of points in [0, 1]³, level-major; float32, but float16 of tiny-cuda-nn under autocast."""
        backend = self.resolve_backend(points.device)
        if backend == "numba":
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
                    f"tiny-cuda-nn lays this grid out with {encoding.params.numel()} parameters, not "
                    f"{self.table.numel()}: ask for the torch backend with --pipeline.model.backend torch."
                )
            # The registered table is the parameter; tiny-cuda-nn reads the same memory, so gradients land in it.
            del encoding.params
            self._tcnn_module.append(encoding)
        encoding = self._tcnn_module[0]
        encoding.params = self.table.view(-1)  # type: ignore[assignment]
        features = encoding(points)
        # They are float16, which the float32 layers behind the grid take under CUDA's autocast only.
        return features if torch.is_autocast_enabled() else features.float()
