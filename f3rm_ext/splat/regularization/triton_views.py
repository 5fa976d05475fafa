"""Agreement of depth and of patches between two views on CUDA: Triton kernels with analytic gradients.

They must agree with the definitions in :mod:`~f3rm_ext.splat.regularization.multiview` and
:mod:`~f3rm_ext.splat.regularization.patches`.
"""

import math
import sys
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from f3rm_ext.splat.regularization.kernel_functions import MultiviewConsistency, PatchDisagreement
from f3rm_ext.splat.regularization.multiview import DepthView
from f3rm_ext.splat.regularization.triton_pixels import (
    LEAST_SQUARED,
    find_pixel,
    find_ray,
    load3,
    load_intrinsics,
    load_rotation,
    load_shift,
    multiply,
    pixels,
    store3,
)
from f3rm_ext.splat.triton_kernels import launch

BLOCK, PATCHES = 128, 4
"""Pixels and patches per program."""
FAR = tl.constexpr(1e-3)
"""A point counts if its depth in the one view is more than this share of that in the other."""


@no_type_check
@triton.jit
def _between(viewmat, other):
    """Returns rotation, by rows, and shift from the frame of one camera to that of another."""
    a, b, c, d, e, f, g, h, i = load_rotation(viewmat)
    x, y, z = load_shift(viewmat)
    p, q, r, s, t, u, v, w, k = load_rotation(other)
    xx, xy, xz = multiply(p, q, r, a, b, c, d, e, f, g, h, i)
    yx, yy, yz = multiply(s, t, u, a, b, c, d, e, f, g, h, i)
    zx, zy, zz = multiply(v, w, k, a, b, c, d, e, f, g, h, i)
    x, y, z = multiply(x, y, z, xx, xy, xz, yx, yy, yz, zx, zy, zz)
    sx, sy, sz = load_shift(other)
    return xx, xy, xz, yx, yy, yz, zx, zy, zz, sx - x, sy - y, sz - z


@no_type_check
@triton.jit
def _corners(u, v, w, h):
    """Returns columns, rows and distances of the pixels around places, whose centres lie at whole numbers."""
    j, i = u.to(tl.int32), v.to(tl.int32)
    return j, tl.minimum(j + 1, w - 1), i, tl.minimum(i + 1, h - 1), u - j, v - i


@no_type_check
@triton.jit
def _inverse_depth(depth, at, there):
    """Returns the inverse of depths and which of them are known; else 1."""
    d = tl.load(depth + at, mask=there, other=0.0)
    return 1 / tl.where(d > 0, d, 1.0), tl.where(d > 0, 1.0, 0.0)


@no_type_check
@triton.jit
def _multiview_consistency(
    depth, other, K, K_other, viewmat, viewmat_other, trust, gradient, parts, count, w, h2, w2, most, scale,
    SIZE: tl.constexpr,
):  # fmt: skip
    at, i, j, there = find_pixel(count, w, SIZE)
    a, b, c, d, e, f, g, h, k, sx, sy, sz = _between(viewmat, viewmat_other)
    focal_x, focal_y, _, _ = load_intrinsics(K)
    focal_u, focal_v, middle_u, middle_v = load_intrinsics(K_other)
    x, y = find_ray(K, i, j)
    z = tl.load(depth + at, mask=there, other=0.0)
    ax, ay, az = multiply(x, y, 1.0, a, b, c, d, e, f, g, h, k)
    px, py, pz = ax * z + sx, ay * z + sy, az * z + sz
    known = (z > 0) & (pz > z * FAR)
    pz = tl.where(known, pz, 1.0)
    rx, ry = px / pz, py / pz
    u, v = rx * focal_u + middle_u - 0.5, ry * focal_v + middle_v - 0.5
    known = known & (u >= 0) & (u <= w2 - 1) & (v >= 0) & (v <= h2 - 1)
    j0, j1, i0, i1, u, v = _corners(tl.where(known, u, 0.0), tl.where(known, v, 0.0), w2, h2)
    d00, k00 = _inverse_depth(other, i0 * w2 + j0, known)
    d01, k01 = _inverse_depth(other, i0 * w2 + j1, known)
    d10, k10 = _inverse_depth(other, i1 * w2 + j0, known)
    d11, k11 = _inverse_depth(other, i1 * w2 + j1, known)
    share = (k00 * (1 - u) + k01 * u) * (1 - v) + (k10 * (1 - u) + k11 * u) * v
    met = 1 / ((d00 * (1 - u) + d01 * u) * (1 - v) + (d10 * (1 - u) + d11 * u) * v)
    bx, by, bz = multiply(rx * met - sx, ry * met - sy, met - sz, a, d, g, b, e, h, c, f, k)
    known = known & (share > 1 - 1e-3) & (bz > z * FAR)
    bz = tl.where(known, bz, 1.0)
    bx, by = bx / bz, by / bz
    miss_x, miss_y = (bx - x) * focal_x, (by - y) * focal_y
    error = tl.sqrt(miss_x * miss_x + miss_y * miss_y + LEAST_SQUARED)
    known = known & (error < most)
    trusted = tl.where(known, tl.exp(-error), 0.0)
    tl.store(trust + at, trusted, mask=there)
    tl.store(parts + tl.program_id(0), scale * tl.sum(tl.where(known, trusted * error, 0.0)))
    # The same round trip for a small change of depth.
    rx_z, ry_z = (ax - rx * az) / pz, (ay - ry * az) / pz
    inverse_z = ((d01 - d00) * (1 - v) + (d11 - d10) * v) * rx_z * focal_u
    inverse_z += ((d10 - d00) * (1 - u) + (d11 - d01) * u) * ry_z * focal_v
    met_z = -inverse_z * met * met
    bx_z, by_z, bz_z = multiply(
        rx_z * met + rx * met_z, ry_z * met + ry * met_z, met_z, a, d, g, b, e, h, c, f, k
    )  # fmt: skip
    slope = miss_x * focal_x * (bx_z - bx * bz_z) + miss_y * focal_y * (by_z - by * bz_z)
    tl.store(gradient + at, tl.where(known, scale * trusted * slope / (bz * error), 0.0), mask=there)


def multiview_consistency(depth: Tensor, view: Any, other: Any, most: float, trust: Tensor, gradient: Tensor) -> Tensor:
    """Returns parts of :func:`~f3rm_ext.splat.regularization.multiview.multiview_consistency`, and writes trust and
    gradient."""
    count, w = pixels(depth)
    grid = (triton.cdiv(count, BLOCK),)
    parts = depth.new_empty(grid)
    cameras = view.K, other.K, view.viewmat, other.viewmat
    settings = count, w, *other.depth.shape, most, 1 / max(1, count)
    launch(_multiview_consistency, grid, depth, other.depth, *cameras, trust, gradient, parts, *settings, SIZE=BLOCK)
    return parts


@no_type_check
@triton.jit
def _grey(picture, at, there):
    """Returns the brightness of pixels, after ITU-R BT.601."""
    red, green, blue = load3(picture, at, there)
    return 0.299 * red + 0.587 * green + 0.114 * blue


@no_type_check
@triton.jit
def _patch_disagreement(
    depth, normals, photo, picture, trust, places, K, K_other, viewmat, viewmat_other, grad_depth, grad_normals, losses,
    count, w, h2, w2, least, most, RADIUS: tl.constexpr, LANES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    SIDE: tl.constexpr = 2 * RADIUS + 1
    AREA: tl.constexpr = SIDE * SIDE
    patch = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = patch < count
    place = tl.load(places + patch, mask=there, other=0).to(tl.int32)
    a, b, c, d, e, f, g, h, k, sx, sy, sz = _between(viewmat, viewmat_other)
    focal_u, focal_v, middle_u, middle_v = load_intrinsics(K_other)
    middle_x, middle_y = find_ray(K, place // w, place % w)
    weight = tl.load(trust + place, mask=there, other=0.0)
    mz = tl.load(depth + place, mask=there, other=0.0)
    nx, ny, nz = load3(normals, place, there)
    length = tl.maximum(tl.sqrt(nx * nx + ny * ny + nz * nz), LEAST_SQUARED)
    nx, ny, nz = nx / length, ny / length, nz / length
    towards = nx * middle_x + ny * middle_y + nz
    usable = (weight > 0) & (towards < 0)
    # From here on, a row for each patch and a column for each of its pixels.
    s = tl.arange(0, LANES)[None, :]
    lane = (s < AREA) & there[:, None]
    row, column = (place // w)[:, None] + s // SIDE - RADIUS, (place % w)[:, None] + s % SIDE - RADIUS
    x, y = find_ray(K, row, column)
    slant = nx[:, None] * x + ny[:, None] * y + nz[:, None]
    good = slant < 0.2 * towards[:, None]
    slant = tl.where(good, slant, -1.0)
    z = (mz * towards)[:, None] / slant
    ax, ay, az = multiply(x, y, 1.0, a, b, c, d, e, f, g, h, k)
    px, py, pz = ax * z + sx, ay * z + sy, az * z + sz
    good = good & (pz > tl.abs(z) * FAR)
    pz = tl.where(good, pz, 1.0)
    rx, ry = px / pz, py / pz
    u, v = rx * focal_u + middle_u, ry * focal_v + middle_v
    good = good & (u > 0) & (u < w2) & (v > 0) & (v < h2)
    usable = usable & (tl.sum(tl.where(lane & (good == 0), 1, 0), axis=1) == 0)
    lane = lane & usable[:, None]
    u, v = tl.where(lane, u - 0.5, 0.0), tl.where(lane, v - 0.5, 0.0)
    # At the border the outermost pixels go on.
    u_z = tl.where((u > 0) & (u < w2 - 1), focal_u * (ax - rx * az) / pz, 0.0)
    v_z = tl.where((v > 0) & (v < h2 - 1), focal_v * (ay - ry * az) / pz, 0.0)
    u, v = tl.minimum(tl.maximum(u, 0.0), w2 - 1.0), tl.minimum(tl.maximum(v, 0.0), h2 - 1.0)
    j0, j1, i0, i1, u, v = _corners(u, v, w2, h2)
    g00, g01 = _grey(picture, i0 * w2 + j0, lane), _grey(picture, i0 * w2 + j1, lane)
    g10, g11 = _grey(picture, i1 * w2 + j0, lane), _grey(picture, i1 * w2 + j1, lane)
    theirs = (g00 * (1 - u) + g01 * u) * (1 - v) + (g10 * (1 - u) + g11 * u) * v
    slopes = ((g01 - g00) * (1 - v) + (g11 - g10) * v) * u_z + ((g10 - g00) * (1 - u) + (g11 - g01) * u) * v_z
    ours = _grey(photo, row * w + column, lane)
    ours = tl.where(lane, ours - (tl.sum(ours, axis=1) / AREA)[:, None], 0.0)
    theirs = tl.where(lane, theirs - (tl.sum(theirs, axis=1) / AREA)[:, None], 0.0)
    power, power_there = tl.sum(ours * ours, axis=1) / AREA, tl.sum(theirs * theirs, axis=1) / AREA
    common = tl.sum(ours * theirs, axis=1) / AREA
    usable = usable & (power > least) & (power_there > least)
    norm = tl.sqrt(tl.where(usable, power, 1.0)) * tl.sqrt(tl.where(usable, power_there, 1.0))
    wrong = 1 - common / norm
    usable = usable & (wrong < most)
    tl.store(losses + patch, tl.where(usable, weight * wrong, 0.0), mask=there)
    # By the depth at which the ray of each pixel meets the plane, D (n · middle) / (n · ray).
    factor = tl.where(usable, -weight / (norm * AREA), 0.0)
    likeness = common / tl.where(usable, power_there, 1.0)
    lane = lane & usable[:, None]
    share = tl.where(lane, factor[:, None] * (ours - likeness[:, None] * theirs) * slopes / slant, 0.0)
    by_depth = tl.sum(share, axis=1)
    grad = -share * z
    gx = tl.sum(tl.where(lane, grad * x, 0.0), axis=1) + mz * by_depth * middle_x
    gy = tl.sum(tl.where(lane, grad * y, 0.0), axis=1) + mz * by_depth * middle_y
    gz = tl.sum(tl.where(lane, grad, 0.0), axis=1) + mz * by_depth
    along = gx * nx + gy * ny + gz * nz
    tl.store(grad_depth + patch, tl.where(usable, by_depth * towards, 0.0), mask=there)
    gx, gy, gz = (gx - along * nx) / length, (gy - along * ny) / length, (gz - along * nz) / length
    gx, gy, gz = tl.where(usable, gx, 0.0), tl.where(usable, gy, 0.0), tl.where(usable, gz, 0.0)
    store3(grad_normals, patch, gx, gy, gz, there)


def patch_disagreement(
    depth: Tensor, normals: Tensor, photo: Tensor, picture: Tensor, trust: Tensor, places: Tensor,
    view: Any, other: Any, limits: tuple[int, float, float], grad_depth: Tensor, grad_normals: Tensor, losses: Tensor,
) -> None:  # fmt: skip
    """See :func:`f3rm_ext.splat.regularization.view_kernels.patch_disagreement`."""
    radius, least, most = limits
    cameras = view.K, other.K, view.viewmat, other.viewmat
    results = grad_depth, grad_normals, losses
    settings = len(places), depth.shape[1], *picture.shape[:2], least, most
    sizes = {"RADIUS": radius, "LANES": triton.next_power_of_2((2 * radius + 1) ** 2), "SIZE": PATCHES}
    pictures = depth, normals, photo, picture, trust, places
    launch(_patch_disagreement, (triton.cdiv(len(places), PATCHES),), *pictures, *cameras, *results, *settings, **sizes)


def try_out(device: torch.device) -> None:
    """Compiles the kernels and runs them on a wall seen straight on by two cameras side by side."""
    itself, eye = sys.modules[__name__], torch.eye(4, device=device)
    apart, K = eye.clone(), 8 * eye[:3, :3]
    apart[0, 3], K[2, 2], K[:2, 2] = -1.0, 1.0, 8.0
    with torch.enable_grad():
        depth = torch.full((16, 16), 2.2, device=device, requires_grad=True)
        views = DepthView(depth, eye, K), DepthView(torch.full_like(depth, 2.0), apart, K)
        loss, trust = MultiviewConsistency.apply(depth, *views, 1.0, itself)
        photo = (torch.arange(768, device=device) % 7 / 7).view(16, 16, 3)
        normals, place = -eye[2, :3].expand(16, 16, 3), torch.full((1,), 8 * 17, device=device)
        pictures = depth, normals, photo, 1 - photo, torch.ones_like(trust), place
        opposite = PatchDisagreement.apply(*pictures, views[0], views[0], (3, 1e-6, 3.0), itself)
        (gradient,) = torch.autograd.grad(loss + opposite, depth)
    # Reading values waits for the kernels.
    error_px = 8 * (1 / 2 - 1 / 2.2)
    if not math.isclose(float(trust.max()), math.exp(-error_px), rel_tol=1e-3):
        raise RuntimeError("the Triton kernel of two views computes wrong values")
    if not math.isclose(float(gradient.max()), math.exp(-error_px) * 8 / 2.2**2 / 256, rel_tol=1e-3):
        raise RuntimeError("the Triton kernel of two views computes wrong gradients")
    if not math.isclose(float(opposite.detach()), 2.0, rel_tol=1e-3):
        raise RuntimeError("the Triton kernel of patches computes wrong values")
