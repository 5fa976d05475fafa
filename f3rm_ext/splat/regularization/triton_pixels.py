"""Pixels, rays and cameras in Triton kernels. Cameras are read by the GPU, for which the host need not wait."""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

LEAST_SQUARED = tl.constexpr(1e-12)
"""Least squared length of a normal."""


@no_type_check
@triton.jit
def load3(table, row, there):
    """Returns three columns of a table of three."""
    x = tl.load(table + 3 * row, mask=there, other=0.0)
    y = tl.load(table + 3 * row + 1, mask=there, other=0.0)
    z = tl.load(table + 3 * row + 2, mask=there, other=0.0)
    return x, y, z


@no_type_check
@triton.jit
def store3(table, row, x, y, z, there):
    """Writes three columns of a table of three."""
    tl.store(table + 3 * row, x, mask=there)
    tl.store(table + 3 * row + 1, y, mask=there)
    tl.store(table + 3 * row + 2, z, mask=there)


@no_type_check
@triton.jit
def load_rotation(viewmat):
    """Returns the rotation of a view matrix by rows."""
    a, b, c = tl.load(viewmat), tl.load(viewmat + 1), tl.load(viewmat + 2)
    d, e, f = tl.load(viewmat + 4), tl.load(viewmat + 5), tl.load(viewmat + 6)
    g, h, i = tl.load(viewmat + 8), tl.load(viewmat + 9), tl.load(viewmat + 10)
    return a, b, c, d, e, f, g, h, i


@no_type_check
@triton.jit
def load_shift(viewmat):
    """Returns the shift of a view matrix."""
    return tl.load(viewmat + 3), tl.load(viewmat + 7), tl.load(viewmat + 11)


@no_type_check
@triton.jit
def load_intrinsics(K):
    """Returns the focal lengths and the middle of a camera, pixels."""
    return tl.load(K), tl.load(K + 4), tl.load(K + 2), tl.load(K + 5)


@no_type_check
@triton.jit
def multiply(x, y, z, a, b, c, d, e, f, g, h, i):
    """Multiplies a vector by a matrix given by rows."""
    return a * x + b * y + c * z, d * x + e * y + f * z, g * x + h * y + i * z


@no_type_check
@triton.jit
def find_pixel(count, w, SIZE: tl.constexpr):
    """Returns the pixels of a program as indices, rows and columns, and which of them are in the picture."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    return at, at // w, at % w, at < count


@no_type_check
@triton.jit
def find_ray(K, i, j):
    """Returns x / z and y / z of rays through the centres of pixels."""
    focal_x, focal_y, middle_x, middle_y = load_intrinsics(K)
    return (j + 0.5 - middle_x) / focal_x, (i + 0.5 - middle_y) / focal_y


def pixels(picture: Tensor) -> tuple[int, int]:
    """Returns the number of pixels of a picture and its width."""
    return picture.shape[0] * picture.shape[1], picture.shape[1]
