"""Lists the Gaussians of each tile of the image, front to back."""

from dataclasses import dataclass
from typing import no_type_check

import numba
import numpy as np
from torch import Tensor

from f3rm_ext.splat.rasterize.camera import MIN_ALPHA, TILE_PX, Projection

GEOMETRY = 11
"""Numbers per Gaussian in :attr:`Bins.geometry`."""
SLACK_POWER, SLACK_PX = 1e-2, 1e-2
"""Margins of the reach of a Gaussian, so that compositing is certain to skip everything beyond it."""


@dataclass
class Bins:
    """Gaussians sorted front to back ("ranks"), and their intersections with tiles, sorted by tile, then by rank."""

    order: np.ndarray
    """Gaussian of each rank, (ranks,) int64."""
    geometry: np.ndarray
    """Per rank: x, y, conic xx, xy, yy, opacity; of the ellipse where alpha is 1/255 the reach along x and along y, and
    slope, rise and lean of its edge (see :mod:`~f3rm_ext.splat.rasterize.compositing`); (ranks, 11) float32, pixels."""
    starts: np.ndarray
    """First intersection of each tile, (tiles + 1,) int64."""
    ranks: np.ndarray
    """Rank of each intersection, (intersections,) int32."""
    slots: np.ndarray
    """Positions in ``ranks`` of each rank's intersections, rank by rank, (intersections,) int64."""
    slot_starts: np.ndarray
    """First slot of each rank, (ranks + 1,) int64."""
    columns: int
    """Tiles per row of tiles."""

    def tile_order(self, first: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns tiles in an order that balances a prange, which gives each thread a consecutive run of them."""
        heavy_first = first + np.argsort(-np.diff(self.starts)[first:stop], kind="stable")
        threads = numba.get_num_threads()
        return np.concatenate([heavy_first[thread::threads] for thread in range(threads)])


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _measure(order, means2d, conics, alphas, radii, columns, rows, geometry, rectangles, counts):
    tile = np.float32(TILE_PX)
    for rank in numba.prange(order.size):
        i = order[rank]
        x, y, radius = means2d[i, 0], means2d[i, 1], np.float32(radii[i])
        a, b, c = np.float64(conics[i, 0]), np.float64(conics[i, 1]), np.float64(conics[i, 2])
        det = a * c - b * b
        reach_x = reach_y = rise = np.inf
        slope = lean = 0.0
        if det > 0.0:
            # Where ½ dᵀ conic d = ln(255 alpha), the opacity of the Gaussian is 1/255.
            twice = 2.0 * (np.log(alphas[i] / MIN_ALPHA) + SLACK_POWER)
            reach_x = np.sqrt(twice * c / det) + SLACK_PX
            reach_y = np.sqrt(twice * a / det) + SLACK_PX
            slope, rise, lean = -b / c, np.sqrt(det) / c, -b * reach_x / np.sqrt(a * c)
        # The radius of three standard deviations is gsplat's; the reach is less where a Gaussian is faint or narrow.
        x0 = max(np.floor((x - radius) / tile), np.floor((x - reach_x) / tile))
        y0 = max(np.floor((y - radius) / tile), np.floor((y - reach_y) / tile))
        x1 = min(np.ceil((x + radius) / tile), np.ceil((x + reach_x) / tile))
        y1 = min(np.ceil((y + radius) / tile), np.ceil((y + reach_y) / tile))
        left, right = np.int32(min(max(x0, 0), columns)), np.int32(min(max(x1, 0), columns))
        top, bottom = np.int32(min(max(y0, 0), rows)), np.int32(min(max(y1, 0), rows))
        rectangles[rank, 0], rectangles[rank, 1], rectangles[rank, 2], rectangles[rank, 3] = left, top, right, bottom
        counts[rank] = max(right - left, 0) * max(bottom - top, 0)
        geometry[rank, 0], geometry[rank, 1] = x, y
        geometry[rank, 2], geometry[rank, 3], geometry[rank, 4] = conics[i, 0], conics[i, 1], conics[i, 2]
        geometry[rank, 5], geometry[rank, 6], geometry[rank, 7] = alphas[i], reach_x, reach_y
        geometry[rank, 8], geometry[rank, 9], geometry[rank, 10] = slope, rise, lean


@no_type_check
@numba.njit(cache=True, nogil=True)
def _count(rectangles, columns, starts):
    for rank in range(rectangles.shape[0]):
        for row in range(rectangles[rank, 1], rectangles[rank, 3]):
            for column in range(rectangles[rank, 0], rectangles[rank, 2]):
                starts[row * columns + column + 1] += 1
    for tile in range(starts.size - 1):
        starts[tile + 1] += starts[tile]


@no_type_check
@numba.njit(cache=True, nogil=True)
def _fill(rectangles, columns, cursor, ranks, slots):
    # Ranks go from front to back, so a counting sort by tile leaves every tile sorted by depth.
    slot = 0
    for rank in range(rectangles.shape[0]):
        for row in range(rectangles[rank, 1], rectangles[rank, 3]):
            for column in range(rectangles[rank, 0], rectangles[rank, 2]):
                tile = row * columns + column
                ranks[cursor[tile]] = rank
                slots[slot] = cursor[tile]
                cursor[tile] += 1
                slot += 1


def front_to_back(depths: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Returns indices of the visible Gaussians, sorted by depth, then by index; (ranks,) int64."""
    indices = np.flatnonzero(visible)
    # Bits of positive floats sort like the floats: one integer key of depth and index sorts fast and is unique.
    keys = (depths[indices].view(np.uint32).astype(np.uint64) << np.uint64(32)) | indices.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def as_array(value: Tensor) -> np.ndarray:
    """Returns a contiguous array of a tensor on the CPU."""
    return value.detach().contiguous().numpy()


def bin_gaussians(projected: Projection, size: tuple[int, int]) -> Bins:
    """Sorts Gaussians, float32 on the CPU, by depth and lists them by the tiles of an image of a width and height."""
    means2d, conics, depths, alphas, radii = map(as_array, projected)
    columns, rows = (-(-side // TILE_PX) for side in size)
    order = front_to_back(depths, (radii > 0) & (alphas >= np.float32(MIN_ALPHA)))
    geometry = np.empty((len(order), GEOMETRY), dtype=np.float32)
    rectangles = np.empty((len(order), 4), dtype=np.int32)
    slot_starts = np.zeros(len(order) + 1, dtype=np.int64)
    _measure(order, means2d, conics, alphas, radii, columns, rows, geometry, rectangles, slot_starts[1:])
    np.cumsum(slot_starts, out=slot_starts)
    starts = np.zeros(columns * rows + 1, dtype=np.int64)
    _count(rectangles, columns, starts)
    ranks, slots = np.empty(slot_starts[-1], dtype=np.int32), np.empty(slot_starts[-1], dtype=np.int64)
    _fill(rectangles, columns, starts.copy(), ranks, slots)
    return Bins(order, geometry, starts, ranks, slots, slot_starts, columns)
