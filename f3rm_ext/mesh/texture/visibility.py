"""How well a photo sees places on a mesh: hidden or not, how sharp, and how near to an edge that could bleed."""

from collections.abc import Callable
from typing import NamedTuple, no_type_check

import numba
import numpy as np
from jaxtyping import Float, Int
from scipy.ndimage import distance_transform_edt, maximum_filter, minimum_filter

from f3rm_ext.mesh.camera import Camera
from f3rm_ext.mesh.texture.photos import Photo
from f3rm_ext.utils.open3d_library import RayCaster

_NEAR = 2e-3
"""Share of the distance by which a ray ends before its place, so that the place's own triangle does not hide it."""
_FLATTEST = 0.1
"""Cosine between viewing direction and normal below which a photo says nothing about a place."""
_JUMP = 0.02
"""Relative jump of inverse depth between neighbouring pixels that is an edge of an object."""
_STEEPEST = 8.0
"""Change of slope, as depth over width, that is no edge yet but the ridge of a solid."""
_EDGE_WEIGHT = 1e-4
"""Factor on the weight of pixels at such edges: a slightly wrong mesh would take them from the wrong side."""
_BORDER = 0.05
"""Share of the picture's shorter side over which weights fall to zero, so that no photo ends in a visible line."""

_HALVINGS = 2
"""Smaller copies of a photo, for texels that cover several pixels."""


class Places(NamedTuple):
    """Centres of texels on the surface of a mesh."""

    points: Float[np.ndarray, "n 3"]
    """Positions, in the frame of the mesh."""
    normals: Float[np.ndarray, "n 3"]
    """Unit normals of the triangles that they lie on."""
    areas: Float[np.ndarray, " n"]
    """Surface that each texel covers, square units of the mesh."""


class PhotoColors(NamedTuple):
    """The colours of one photo at the places that it sees."""

    indices: Int[np.ndarray, " m"]
    """Indices of those places."""
    weights: Float[np.ndarray, " m"]
    """Weights of the colours in the texture, > 0."""
    colors: Float[np.ndarray, "m 3"]
    """Colours, 0 to 255."""
    pixels: Float[np.ndarray, "m 2"]
    """Column and row of each place in the photo, pixels."""


class PhotoLookup:
    """One photo, ready to colour places."""

    def __init__(self, camera: Camera, photo: Photo, caster: RayCaster) -> None:
        self._camera, self._caster = camera, caster
        self._colors = _pyramid(photo.colors.astype(np.float32), lambda first, second: (first + second) / 2)
        # Bilinear lookups reach into the next pixel, which is larger in a smaller picture.
        trust = _pyramid(_trust(camera, photo.valid, caster)[..., None], np.minimum)
        levels = [trust[0], *(minimum_filter(level, (3, 3, 1)) for level in trust[1:])]
        firsts = np.cumsum([0, *(level.size for level in levels)])
        sizes = [(first, *level.shape[:2]) for first, level in zip(firsts, levels, strict=False)]
        self._trust = np.concatenate([level.reshape(-1) for level in levels]), np.array(sizes, np.int64)

    def look_up(self, places: Places) -> PhotoColors:
        """Returns what the photo says about places.

        The weight grows with the square of the number of pixels that a texel covers, up to one pixel, and with the
        cosine of the viewing angle. It is small at edges of objects and of the picture, and zero under a mask.
        """
        camera, count = self._camera, len(places.points)
        weights, pixels, level = np.empty(count, np.float32), np.empty((count, 2)), np.empty(count, np.int64)
        intrinsics = np.array([*camera.focal, *camera.middle, camera.width, camera.height], np.float64)
        _weigh(*places, camera.rotation, camera.center, intrinsics, *self._trust, weights, pixels, level)
        index = np.flatnonzero(weights)
        index = index[~self._caster.occluded(camera.center, places.points[index] - camera.center, far=1 - _NEAR)]
        pixels, level = pixels[index], level[index]
        colors = np.empty((len(index), self._colors[0].shape[2]), np.float32)
        for halvings, picture in enumerate(self._colors):
            chosen = np.flatnonzero(level == halvings)
            height, width = picture.shape[:2]
            colors[chosen] = bilinear(picture, np.minimum(pixels[chosen] / 2**halvings, [width - 0.5, height - 0.5]))
        return PhotoColors(index, weights[index], colors, pixels)


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _weigh(points, normals, areas, rotation, center, intrinsics, trust, sizes, weights, pixels, level):
    """Computes the weights that places have if nothing hides them, and where they are in the photo.

    Args:
        intrinsics: focal lengths, principal point, width and height, pixels.
        trust: of all pixels of the photo and its smaller copies, one after the other.
        sizes: first pixel in ``trust``, height and width of each of those, (levels, 3).
        weights: result, (n,); 0 where the photo says nothing.
        pixels: result where weights are positive: column and row in the photo, (n, 2).
        level: result where weights are positive: the copy whose pixels are as large as the texel, (n,).
    """
    for i in numba.prange(len(points)):
        weights[i] = 0
        x, y, z = points[i, 0] - center[0], points[i, 1] - center[1], points[i, 2] - center[2]
        depth = x * rotation[2, 0] + y * rotation[2, 1] + z * rotation[2, 2]
        if depth <= 0:
            continue
        column = (x * rotation[0, 0] + y * rotation[0, 1] + z * rotation[0, 2]) / depth * intrinsics[0] + intrinsics[2]
        row = (x * rotation[1, 0] + y * rotation[1, 1] + z * rotation[1, 2]) / depth * intrinsics[1] + intrinsics[3]
        # This and the next condition are written so that NaN fails: it would become an index out of bounds.
        if not (0.5 <= column <= intrinsics[4] - 0.5 and 0.5 <= row <= intrinsics[5] - 0.5):
            continue
        # Both sides of a surface are coloured: where only one can be seen, the mesh hides the other.
        cosine = abs(x * normals[i, 0] + y * normals[i, 1] + z * normals[i, 2])
        cosine /= max(np.sqrt(x * x + y * y + z * z), 1e-12)
        if not cosine > _FLATTEST:
            continue
        covered = areas[i] * cosine * intrinsics[0] * intrinsics[1] / (depth * depth)
        # Where a texel covers many pixels, a smaller picture has their mean.
        halvings = int(min(np.rint(np.log2(max(np.sqrt(covered), 1.0))), len(sizes) - 1))
        first, height, width = sizes[halvings]
        left, top = min(int(column / 2**halvings), width - 1), min(int(row / 2**halvings), height - 1)
        # Never 0 because of the distance alone: a place that is seen from afar only still takes its colour from there.
        weights[i] = trust[first + top * width + left] * cosine * min(max(covered, 1e-6), 1.0) ** 2
        pixels[i, 0], pixels[i, 1], level[i] = column, row, halvings


def bilinear(picture: Float[np.ndarray, "h w c"], places: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "n c"]:
    """Returns values of a picture at places (column, row); the centre of the first pixel is at 0.5."""
    index, share = bilinear_corners(places, picture.shape[1], picture.shape[0])
    result = np.empty((len(places), picture.shape[2]), np.float32)
    _mix(picture.reshape(-1, picture.shape[2]), index, share, result)
    return result


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True)
def _mix(values, index, share, result):
    """Computes sums of four rows of ``values`` each, (n, c), by their indices and shares, (n, 4)."""
    for i in numba.prange(len(index)):
        for c in range(values.shape[1]):
            mean = numba.float32(0)
            for k in range(4):
                mean += values[index[i, k], c] * share[i, k]
            result[i, c] = mean


def bilinear_corners(
    places: Float[np.ndarray, "n 2"], width: int, height: int
) -> tuple[Int[np.ndarray, "n 4"], Float[np.ndarray, "n 4"]]:
    """Returns the four pixels around places, as indices in the flattened picture, and their shares."""
    x, y = np.clip(places[:, 0] - 0.5, 0, width - 1), np.clip(places[:, 1] - 0.5, 0, height - 1)
    left, top = np.minimum(x.astype(np.int64), max(width - 2, 0)), np.minimum(y.astype(np.int64), max(height - 2, 0))
    right, below = np.minimum(left + 1, width - 1), np.minimum(top + 1, height - 1)
    fx, fy = (x - left).astype(np.float32), (y - top).astype(np.float32)
    index = np.stack([top * width + left, top * width + right, below * width + left, below * width + right], axis=1)
    return index, np.stack([(1 - fx) * (1 - fy), fx * (1 - fy), (1 - fx) * fy, fx * fy], axis=1)


def _pyramid(picture: np.ndarray, pool: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> list[np.ndarray]:
    """The picture, at a half and at a quarter of its size unless it is tiny; ``pool`` makes one pixel of two."""
    levels = [picture]
    while len(levels) <= _HALVINGS and min(levels[-1].shape[:2]) > 1:
        height, width = (side // 2 * 2 for side in levels[-1].shape[:2])
        rows = pool(levels[-1][0:height:2, :width], levels[-1][1:height:2, :width])
        levels.append(pool(rows[:, 0::2], rows[:, 1::2]))
    return levels


def _trust(camera: Camera, valid: np.ndarray | None, caster: RayCaster) -> Float[np.ndarray, "h w"]:
    """Factor on the weight of each pixel, 0 to 1."""
    # Directions have depth 1, so that distances along rays are depths. Inverse depth is linear on a plane.
    inverse = 1 / caster.cast(*camera.pixel_rays())["t_hit"]
    # Where two planes meet, it goes on smoothly from one side at least; where a part of the mesh ends, from neither.
    edge = np.zeros(inverse.shape, bool)
    smallest = max(_JUMP, _STEEPEST / float(camera.focal.min()))
    for axis in (0, 1):
        line, marks = np.moveaxis(inverse, axis, 0), np.moveaxis(edge, axis, 0)
        bend = np.abs(line[2:] - 2 * line[1:-1] + line[:-2])
        jump = np.minimum(bend[1:], bend[:-1]) > smallest * np.maximum(line[1:-2], line[2:-1])
        marks[1:-2] |= jump
        marks[2:-1] |= jump
    edge = maximum_filter(edge, 3)
    rows, columns = np.arange(camera.height) + 0.5, np.arange(camera.width) + 0.5
    border = max(_BORDER * min(camera.width, camera.height), 1.0)
    near = np.minimum(np.minimum(columns, camera.width - columns), np.minimum(rows, camera.height - rows)[:, None])
    # Not down to 0, so that what is seen at the rims of photos only has a colour, too.
    trust = np.where(edge, _EDGE_WEIGHT, 1.0) * np.clip(near / border, 0.01, 1)
    if valid is not None and not valid.all():  # without any pixel left out, distances would be those from a corner
        # Bilinear lookups reach into the next pixel.
        trust = (
            trust
            * (maximum_filter(~valid, 3) == 0)
            * np.clip(np.asarray(distance_transform_edt(valid)) / border, 0.01, 1)
        )
    return trust.astype(np.float32)
