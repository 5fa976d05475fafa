"""The pixels of a tile as the kernels see them: two blocks of 16 rows of 8 pixels, one vector register per row.

A Gaussian touches whole rows of a block, so that every inner loop runs over consecutive pixels without a branch.
"""

from typing import no_type_check

import numba
import numpy as np

from f3rm_ext.splat.rasterize.camera import MAX_ALPHA, MIN_ALPHA, MIN_TRANSMITTANCE, TILE_PX

FLAGS = {"contract", "reassoc", "arcp", "nsz"}
"""Licences for the compiler: sums in any order, but infinities and NaN as they are."""
LANES = 8
"""Pixels per row of a block."""
BLOCK = LANES * TILE_PX
"""Pixels of a block."""
PIXELS = TILE_PX * TILE_PX
"""Pixels of a tile."""
_P = np.arange(PIXELS)
PIXEL_X = (_P % LANES + _P // BLOCK * LANES + 0.5).astype(np.float32)
"""Centre of each pixel from the tile's left edge, pixels."""
PIXEL_Y = (_P // LANES % TILE_PX + 0.5).astype(np.float32)
"""Centre of each pixel from the tile's upper edge, pixels."""
ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
"""Typed constants: a bare literal would turn the kernels' arithmetic into float64."""
TOP, SKIP, END = np.float32(MAX_ALPHA), np.float32(MIN_ALPHA), np.float32(MIN_TRANSMITTANCE)
FADED = np.float32(40.0)
"""exp(−40) is far below anything that counts."""
LOG2E = np.float32(1.4426950408889634)
E1, E2, E3, E4, E5, E6 = (
    np.float32(v) for v in (0.6931471806, 0.2402265070, 0.0555041087, 0.0096181291, 0.0013333558, 0.0001540353)
)
"""ln(2)^k / k!: the series of 2^f, accurate to 2e-7 for |f| ≤ ½."""


@no_type_check
@numba.njit(inline="always")
def decay(power):
    """exp(−power) for 0 ≤ power, without a call, so that loops over it vectorise; 0 ≤ power is not checked."""
    scaled = min(power, FADED) * LOG2E
    whole = np.int32(scaled + HALF)
    f = np.float32(whole) - scaled
    mantissa = ONE + f * (E1 + f * (E2 + f * (E3 + f * (E4 + f * (E5 + f * E6)))))
    return mantissa * np.int32((np.int32(127) - whole) << np.int32(23)).view(np.float32)


@no_type_check
@numba.njit(inline="always")
def rows_within(y, reach):
    """First row of a tile that a Gaussian at y from its upper edge reaches, and the one after the last."""
    first = np.ceil(max(y - reach - HALF, ZERO))
    last = np.floor(min(y + reach - HALF, np.float32(TILE_PX - 1)))
    return np.int64(first), np.int64(last) + 1


@no_type_check
@numba.njit(inline="always")
def block_within(x, reach, block):
    """Whether a Gaussian at x from a tile's left edge reaches a block of it."""
    first = np.float32(block * LANES) + HALF
    return x + reach >= first and x - reach <= first + np.float32(LANES - 1)


def balanced(loads: np.ndarray, threads: int) -> np.ndarray:
    """Order of tasks for a prange, which gives each thread a run of them, that spreads their loads evenly."""
    heavy_first = np.argsort(-loads, kind="stable")
    return np.concatenate([heavy_first[thread::threads] for thread in range(threads)])
