"""Geometry of a multiresolution hash grid: the resolution and table rows of each level.

Instant-NGP (Müller et al. 2022, section 3, eq. 2-4) with the conventions of tiny-cuda-nn: level l has scale
s_l = base_res · b^l - 1 and maps coordinates x to x · s_l + ½. Vertices are indexed densely while a level fits into
its part of the table, and hashed beyond.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor

PRIMES = (1, 2654435761, 805459861)
"""Hash multipliers per axis (Müller et al. 2022, eq. 4)."""


@dataclass(frozen=True)
class GridLevel:
    """One resolution of the grid."""

    scale: float
    """Factor by which coordinates in [0, 1] are multiplied before they are shifted by ½."""
    resolution: int
    """Vertices per axis."""
    offset: int
    """First row of this level in the table."""
    size: int

    @property
    def is_hashed(self) -> bool:
        """Whether several vertices may share a row."""
        return self.resolution**3 > self.size


def level_growth(num_levels: int, base_res: int, max_res: int) -> float:
    """Returns the factor b by which the resolution grows from level to level (Müller et al. 2022, eq. 3).

    >>> level_growth(num_levels=5, base_res=16, max_res=256)
    2.0
    """
    return (max_res / base_res) ** (1.0 / max(1, num_levels - 1))


def grid_levels(num_levels: int, base_res: int, max_res: int, log2_hashmap_size: int) -> tuple[GridLevel, ...]:
    """Returns the levels of a grid whose resolutions grow geometrically from base_res to max_res.

    Computes in float32, step by step as tiny-cuda-nn does: where a scale is a whole number in exact arithmetic, an
    error in its last digit decides whether the level has one vertex more per axis.

    Args:
        log2_hashmap_size: a level never has more than 2 to this power rows.

    >>> levels = grid_levels(num_levels=3, base_res=16, max_res=64, log2_hashmap_size=15)
    >>> [(level.resolution, level.size, level.is_hashed) for level in levels]
    [(16, 4096, False), (32, 32768, False), (64, 32768, True)]
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


@dataclass(frozen=True)
class LevelTensors:
    """The levels of a grid as tensors, for backends that evaluate all levels at once."""

    levels: tuple[GridLevel, ...]
    """The same as numbers."""
    scales: Float[Tensor, "levels"]
    rows: Int32[Tensor, "levels 6"]
    """Of each level: the factors of x, y and z, which are primes or strides; first row; number of rows; whether it is
    hashed. A row is the exclusive or (hashed) or the sum (dense) of factors times coordinates, modulo their number."""

    @staticmethod
    def from_levels(levels: tuple[GridLevel, ...]) -> "LevelTensors":
        """Returns tensors on the CPU."""
        rows = []
        for level in levels:
            factors = PRIMES if level.is_hashed else (1, level.resolution, level.resolution**2)
            rows.append([*factors, level.offset, level.size, int(level.is_hashed)])
        # The primes wrap to negative numbers of 32 bits, whose products have the same last 32 bits.
        wrapped = torch.tensor(rows, dtype=torch.int64).to(torch.int32)
        return LevelTensors(levels, torch.tensor([level.scale for level in levels]), wrapped)

    @property
    def runs(self) -> list[tuple[slice, bool]]:
        """Returns neighbouring levels that are all hashed or all dense, with whether they are hashed."""
        runs, start = [], 0
        for hashed, run in itertools.groupby(level.is_hashed for level in self.levels):
            end = start + len(list(run))
            runs.append((slice(start, end), hashed))
            start = end
        return runs
