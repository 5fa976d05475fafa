"""Planes of Gaussians, their depth and the loss of normals on CUDA: Triton kernels with analytic gradients.

They must agree with the definitions in :mod:`~f3rm_ext.splat.regularization.normals` and
:mod:`~f3rm_ext.splat.regularization.planar`. The gradient of a depth is gathered from the pixels around it, so that
results are the same in each run.
"""

import math
import sys
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from f3rm_ext.splat.regularization.kernel_functions import DnConsistency, FacingPlanes, PlaneDepth
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

BLOCK = 128
"""Pixels or Gaussians per program."""
INFINITE = tl.constexpr(float("inf"))


# --- planes of Gaussians ---------------------------------------------------------------------------------------------


@no_type_check
@triton.jit
def _load_axis(quats, scales, i, there):
    """Returns the unit quaternion of Gaussians, its length, the column of the smallest scale, and its number."""
    w = tl.load(quats + 4 * i, mask=there, other=1.0)
    x = tl.load(quats + 4 * i + 1, mask=there, other=0.0)
    y = tl.load(quats + 4 * i + 2, mask=there, other=0.0)
    z = tl.load(quats + 4 * i + 3, mask=there, other=0.0)
    length = tl.maximum(tl.sqrt(w * w + x * x + y * y + z * z), LEAST_SQUARED)
    w, x, y, z = w / length, x / length, y / length, z / length
    s0, s1, s2 = load3(scales, i, there)
    k = tl.where(s1 < s0, 1, 0)
    k = tl.where(s2 < tl.minimum(s0, s1), 2, k)
    a = tl.where(k == 0, 1 - 2 * (y * y + z * z), 2 * tl.where(k == 1, x * y - w * z, x * z + w * y))
    b = tl.where(k == 1, 1 - 2 * (x * x + z * z), 2 * tl.where(k == 0, x * y + w * z, y * z - w * x))
    c = tl.where(k == 2, 1 - 2 * (x * x + y * y), 2 * tl.where(k == 0, x * z - w * y, y * z + w * x))
    return w, x, y, z, length, a, b, c, k


@no_type_check
@triton.jit
def _load_place(means, viewmat, i, there):
    """Returns the centres of Gaussians in the frame of the camera."""
    mx, my, mz = load3(means, i, there)
    sx, sy, sz = load_shift(viewmat)
    a, b, c, d, e, f, g, h, k = load_rotation(viewmat)
    px, py, pz = multiply(mx, my, mz, a, b, c, d, e, f, g, h, k)
    return px + sx, py + sy, pz + sz


@no_type_check
@triton.jit
def _facing_planes(means, quats, scales, viewmat, planes, count, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = i < count
    _, _, _, _, _, x, y, z, _ = _load_axis(quats, scales, i, there)
    a, b, c, d, e, f, g, h, k = load_rotation(viewmat)
    x, y, z = multiply(x, y, z, a, b, c, d, e, f, g, h, k)
    px, py, pz = _load_place(means, viewmat, i, there)
    distance = x * px + y * py + z * pz
    sign = tl.where(distance > 0, -1.0, 1.0)
    tl.store(planes + 4 * i, sign * x, mask=there)
    tl.store(planes + 4 * i + 1, sign * y, mask=there)
    tl.store(planes + 4 * i + 2, sign * z, mask=there)
    tl.store(planes + 4 * i + 3, sign * distance, mask=there)


@no_type_check
@triton.jit
def _facing_planes_backward(
    means, quats, scales, viewmat, grads, grad_means, grad_quats, count, SIZE: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = i < count
    w, x, y, z, length, nx, ny, nz, column = _load_axis(quats, scales, i, there)
    a, b, c, d, e, f, g, h, k = load_rotation(viewmat)
    lx, ly, lz = multiply(nx, ny, nz, a, b, c, d, e, f, g, h, k)
    px, py, pz = _load_place(means, viewmat, i, there)
    sign = tl.where(lx * px + ly * py + lz * pz > 0, -1.0, 1.0)
    along = sign * tl.load(grads + 4 * i + 3, mask=there, other=0.0)
    gx = sign * tl.load(grads + 4 * i, mask=there, other=0.0) + along * px
    gy = sign * tl.load(grads + 4 * i + 1, mask=there, other=0.0) + along * py
    gz = sign * tl.load(grads + 4 * i + 2, mask=there, other=0.0) + along * pz
    mx, my, mz = multiply(along * lx, along * ly, along * lz, a, d, g, b, e, h, c, f, k)
    store3(grad_means, i, mx, my, mz, there)
    gx, gy, gz = multiply(gx, gy, gz, a, d, g, b, e, h, c, f, k)
    # Derivatives of the three columns of the matrix of a quaternion.
    qw = tl.where(column == 0, z * gy - y * gz, tl.where(column == 1, x * gz - z * gx, y * gx - x * gy))
    qx = tl.where(
        column == 0,
        y * gy + z * gz,
        tl.where(column == 1, y * gx + w * gz - 2 * x * gy, z * gx - w * gy - 2 * x * gz),
    )
    qy = tl.where(
        column == 0,
        x * gy - w * gz - 2 * y * gx,
        tl.where(column == 1, x * gx + z * gz, w * gx + z * gy - 2 * y * gz),
    )
    qz = tl.where(
        column == 0,
        w * gy + x * gz - 2 * z * gx,
        tl.where(column == 1, y * gz - w * gx - 2 * z * gy, x * gx + y * gy),
    )
    radial = qw * w + qx * x + qy * y + qz * z
    tl.store(grad_quats + 4 * i, 2 * (qw - radial * w) / length, mask=there)
    tl.store(grad_quats + 4 * i + 1, 2 * (qx - radial * x) / length, mask=there)
    tl.store(grad_quats + 4 * i + 2, 2 * (qy - radial * y) / length, mask=there)
    tl.store(grad_quats + 4 * i + 3, 2 * (qz - radial * z) / length, mask=there)


def facing_planes(means: Tensor, quats: Tensor, scales: Tensor, viewmat: Tensor, planes: Tensor) -> None:
    """Writes :func:`~f3rm_ext.splat.regularization.normals.facing_planes`."""
    launch(_facing_planes, _grid(means), means, quats, scales, viewmat, planes, len(means), SIZE=BLOCK)


def facing_planes_backward(
    means: Tensor, quats: Tensor, scales: Tensor, viewmat: Tensor, grads: Tensor, grad_means: Tensor, grad_quats: Tensor
) -> None:
    """Writes the gradients of :func:`facing_planes` by means and quaternions."""
    given = means, quats, scales, viewmat, grads
    launch(_facing_planes_backward, _grid(means), *given, grad_means, grad_quats, len(means), SIZE=BLOCK)


def _grid(rows: Tensor) -> tuple[int]:
    return (triton.cdiv(len(rows), BLOCK),)


# --- depth of planes -------------------------------------------------------------------------------------------------


@no_type_check
@triton.jit
def _plane_depth(normals, distances, K, depth, slopes, count, w, least_cosine, SIZE: tl.constexpr):
    at, i, j, there = find_pixel(count, w, SIZE)
    x, y = find_ray(K, i, j)
    a, b, c = load3(normals, at, there)
    distance = tl.load(distances + at, mask=there, other=0.0)
    towards = a * x + b * y + c
    long = tl.sqrt((1 + x * x + y * y) * (a * a + b * b + c * c))
    seen = (towards < -least_cosine * long) & (distance < 0) & (distance > -INFINITE)
    slope = tl.where(seen, 1 / tl.where(seen, towards, 1.0), 0.0)
    tl.store(slopes + at, slope, mask=there)
    tl.store(depth + at, slope * tl.where(seen, distance, 0.0), mask=there)


@no_type_check
@triton.jit
def _plane_depth_backward(depth, slopes, K, grads, grad_normals, grad_distances, count, w, SIZE: tl.constexpr):
    at, i, j, there = find_pixel(count, w, SIZE)
    x, y = find_ray(K, i, j)
    slope = tl.load(slopes + at, mask=there, other=0.0)
    share = tl.where(slope != 0, slope * tl.load(grads + at, mask=there, other=0.0), 0.0)
    across = -share * tl.load(depth + at, mask=there, other=0.0)
    tl.store(grad_distances + at, share, mask=there)
    store3(grad_normals, at, across * x, across * y, across, there)


def plane_depth(
    normals: Tensor, distances: Tensor, K: Tensor, least_cosine: float, depth: Tensor, slopes: Tensor
) -> None:
    """Writes :func:`~f3rm_ext.splat.regularization.normals.plane_depth`, and its slopes by the distances."""
    sizes = *pixels(depth), least_cosine
    launch(_plane_depth, _grid(depth.view(-1)), normals, distances, K, depth, slopes, *sizes, SIZE=BLOCK)


def plane_depth_backward(
    depth: Tensor, slopes: Tensor, K: Tensor, grads: Tensor, grad_normals: Tensor, grad_distances: Tensor
) -> None:
    """Writes the gradients of :func:`plane_depth` by normals and distances."""
    results = grad_normals, grad_distances
    launch(
        _plane_depth_backward, _grid(depth.view(-1)), depth, slopes, K, grads, *results, *pixels(depth), SIZE=BLOCK
    )  # fmt: skip


# --- normals against depth -------------------------------------------------------------------------------------------


@no_type_check
@triton.jit
def _dense_depth(depth, alpha, i, j, h, w, least, DIVIDE: tl.constexpr):
    """Returns the depth of pixels, divided or not; 0 where there is none."""
    there = (i >= 0) & (i < h) & (j >= 0) & (j < w)
    d = tl.load(depth + i * w + j, mask=there, other=0.0)
    a = tl.load(alpha + i * w + j, mask=there, other=0.0)
    # NaN is on neither side of any number, so the comparisons leave it out as well.
    dense = (d > 0) & (d < INFINITE) & (a > least) & (a < INFINITE)
    if DIVIDE:
        d = d / tl.where(dense, a, 1.0)
    return tl.where(dense, d, 0.0)


@no_type_check
@triton.jit
def _disagree(
    normals, weights, at, centre, left, right, above, below, x, x_left, x_right, y, y_above, y_below
):  # fmt: skip
    """Returns the loss of pixels without its scale, and its gradients by the normal, by the difference of the points
    right and left, and by that of the points below and above. All are 0 where a pixel does not count.

    Args:
        centre: depth, as of the four neighbours; at least one is 0 outside of the picture's inner part.
        x: x / z of the ray; y likewise.
    """
    whole = tl.minimum(tl.minimum(tl.minimum(left, right), tl.minimum(above, below)), centre) > 0
    weight = tl.load(weights + at, mask=whole, other=0.0)
    a, b, c = load3(normals, at, whole)
    squared = a * a + b * b + c * c
    valid = (weight > 0) & (squared > LEAST_SQUARED) & (squared < INFINITE)
    weight = tl.where(valid, weight, 0.0)
    short = tl.where(valid, 1 / tl.sqrt(tl.where(valid, squared, 1.0)), 0.0)
    a, b, c = tl.where(valid, a, 0.0) * short, tl.where(valid, b, 0.0) * short, tl.where(valid, c, 0.0) * short
    ax, ay, az = right * x_right - left * x_left, (right - left) * y, right - left
    dx, dy, dz = (below - above) * x, below * y_below - above * y_above, below - above
    # The normal of the depth is down × across.
    nx, ny, nz = dy * az - dz * ay, dz * ax - dx * az, dx * ay - dy * ax
    stretch = tl.sqrt(nx * nx + ny * ny + nz * nz)
    known = stretch > 0
    unit = tl.where(known, 1 / tl.where(known, stretch, 1.0), 0.0)
    nx, ny, nz = nx * unit, ny * unit, nz * unit
    cosine = a * nx + b * ny + c * nz
    by_normal, by_depth = -weight * short, -weight * unit
    ga, gb, gc = by_normal * (nx - cosine * a), by_normal * (ny - cosine * b), by_normal * (nz - cosine * c)
    gx, gy, gz = by_depth * (a - cosine * nx), by_depth * (b - cosine * ny), by_depth * (c - cosine * nz)
    ux, uy, uz = gy * dz - gz * dy, gz * dx - gx * dz, gx * dy - gy * dx
    vx, vy, vz = ay * gz - az * gy, az * gx - ax * gz, ax * gy - ay * gx
    return weight * (1 - cosine), ga, gb, gc, ux, uy, uz, vx, vy, vz


@no_type_check
@triton.jit
def _dn_consistency(
    depth, alpha, normals, weights, K, grad_depth, grad_alpha, grad_normals, parts, count, w, least, scale,
    DIVIDE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at, i, j, there = find_pixel(count, w, SIZE)
    h = count // w
    focal_x, focal_y, _, _ = load_intrinsics(K)
    x, y = find_ray(K, i, j)
    step_x, step_y = 1 / focal_x, 1 / focal_y
    x1, x2, x3, x4 = x - 2 * step_x, x - step_x, x + step_x, x + 2 * step_x
    y1, y2, y3, y4 = y - 2 * step_y, y - step_y, y + step_y, y + 2 * step_y
    # Depth of the pixel (z00) and of those at most two steps from it, by steps down and to the right.
    z00 = _dense_depth(depth, alpha, i, j, h, w, least, DIVIDE)
    z01 = _dense_depth(depth, alpha, i, j + 1, h, w, least, DIVIDE)
    z02 = _dense_depth(depth, alpha, i, j + 2, h, w, least, DIVIDE)
    z0m = _dense_depth(depth, alpha, i, j - 1, h, w, least, DIVIDE)
    z0n = _dense_depth(depth, alpha, i, j - 2, h, w, least, DIVIDE)
    z10 = _dense_depth(depth, alpha, i + 1, j, h, w, least, DIVIDE)
    z20 = _dense_depth(depth, alpha, i + 2, j, h, w, least, DIVIDE)
    zm0 = _dense_depth(depth, alpha, i - 1, j, h, w, least, DIVIDE)
    zn0 = _dense_depth(depth, alpha, i - 2, j, h, w, least, DIVIDE)
    z11 = _dense_depth(depth, alpha, i + 1, j + 1, h, w, least, DIVIDE)
    z1m = _dense_depth(depth, alpha, i + 1, j - 1, h, w, least, DIVIDE)
    zm1 = _dense_depth(depth, alpha, i - 1, j + 1, h, w, least, DIVIDE)
    zmm = _dense_depth(depth, alpha, i - 1, j - 1, h, w, least, DIVIDE)
    loss, ga, gb, gc, _, _, _, _, _, _ = _disagree(normals, weights, at, z00, z0m, z01, zm0, z10, x, x2, x3, y, y2, y3)
    store3(grad_normals, at, scale * ga, scale * gb, scale * gc, there)
    tl.store(parts + tl.program_id(0), scale * tl.sum(loss))
    # The pixel is the right one of its left neighbour, and so on.
    _, _, _, _, gx, gy, gz, _, _, _ = _disagree(normals, weights, at - 1, z0m, z0n, z00, zmm, z1m, x2, x1, x, y, y2, y3)
    _, _, _, _, ux, uy, uz, _, _, _ = _disagree(normals, weights, at + 1, z01, z00, z02, zm1, z11, x3, x, x4, y, y2, y3)
    gx, gy, gz = gx - ux, gy - uy, gz - uz
    _, _, _, _, _, _, _, vx, vy, vz = _disagree(normals, weights, at - w, zm0, zmm, zm1, zn0, z00, x, x2, x3, y2, y1, y)
    gx, gy, gz = gx + vx, gy + vy, gz + vz
    _, _, _, _, _, _, _, vx, vy, vz = _disagree(normals, weights, at + w, z10, z1m, z11, z00, z20, x, x2, x3, y3, y, y4)
    gradient = scale * ((gx - vx) * x + (gy - vy) * y + gz - vz)
    if DIVIDE:
        dense = z00 > 0
        a = tl.load(alpha + at, mask=there & dense, other=1.0)
        gradient = gradient / a
        tl.store(grad_alpha + at, -gradient * z00, mask=there)
    tl.store(grad_depth + at, gradient, mask=there)


def dn_consistency(
    depth: Tensor, alpha: Tensor, normals: Tensor, weights: Tensor, K: Tensor, divide: bool, least: float,
    grad_depth: Tensor, grad_alpha: Tensor, grad_normals: Tensor,
) -> Tensor:  # fmt: skip
    """Returns parts of :func:`~f3rm_ext.splat.regularization.normals.dn_consistency`, and writes its gradients."""
    (count, w), grid = pixels(depth), _grid(grad_depth.view(-1))
    parts, settings = depth.new_empty(grid), {"DIVIDE": divide, "SIZE": BLOCK}
    given = depth, alpha, normals, weights, K, grad_depth, grad_alpha, grad_normals, parts
    launch(_dn_consistency, grid, *given, count, w, least, 1 / max(1, count), **settings)
    return parts


# --- edges of photos -------------------------------------------------------------------------------------------------


@no_type_check
@triton.jit
def _steepness(photo, steepness, tops, count, w, SIZE: tl.constexpr):
    at, i, j, there = find_pixel(count, w, SIZE)
    inner_row, inner_column = there & (i > 0) & (i < count // w - 1), there & (j > 0) & (j < w - 1)
    a, b, c = load3(photo, at + w, inner_row)
    d, e, f = load3(photo, at - w, inner_row)
    squared = (a - d) * (a - d) + (b - e) * (b - e) + (c - f) * (c - f)
    a, b, c = load3(photo, at + 1, inner_column)
    d, e, f = load3(photo, at - 1, inner_column)
    squared += (a - d) * (a - d) + (b - e) * (b - e) + (c - f) * (c - f)
    steep = tl.sqrt(squared)
    tl.store(steepness + at, steep, mask=there)
    tl.store(tops + tl.program_id(0), tl.max(steep))


@no_type_check
@triton.jit
def _flatness(weights, top, count, w, SIZE: tl.constexpr):
    """Replaces lengths of gradients by weights."""
    at, _, _, there = find_pixel(count, w, SIZE)
    rest = 1 - tl.load(weights + at, mask=there, other=0.0) / tl.maximum(tl.load(top), 1e-6)
    tl.store(weights + at, rest * rest, mask=there)


def edge_weights(photo: Tensor) -> Tensor:
    """See :func:`~f3rm_ext.splat.regularization.planar.edge_weights`."""
    weights = photo.new_empty(photo.shape[:2])
    grid = _grid(weights.view(-1))
    tops = photo.new_empty(grid)
    launch(_steepness, grid, photo, weights, tops, *pixels(weights), SIZE=BLOCK)
    launch(_flatness, grid, weights, tops.amax(), *pixels(weights), SIZE=BLOCK)
    return weights


def try_out(device: torch.device) -> None:
    """Compiles the kernels and runs them on a wall seen straight on."""
    itself, eye = sys.modules[__name__], torch.eye(4, device=device)
    with torch.enable_grad():
        means = (2 * eye[2:3, :3]).requires_grad_()
        quats = eye[:1].clone().requires_grad_()
        planes = FacingPlanes.apply(means, quats, -eye[2:3, :3], eye, itself)
        normals, distances = planes[:, :3].expand(5, 5, 3), planes[:, 3].expand(5, 5)
        depth = PlaneDepth.apply(normals, distances, eye[:3, :3], 0.02, itself)
        weights = edge_weights(torch.ones(5, 5, 3, device=device))
        inner = DnConsistency.apply(depth, weights, -normals, weights, eye[:3, :3], True, 0.5, itself)
        gradients = torch.autograd.grad(depth.sum() + inner, (means, quats))
    # A normal away from the wall costs 2 at each of 9 of 25 pixels. Reading values waits for the kernels.
    if not math.isclose(float(depth.detach().mean()), 2.0, rel_tol=1e-4):
        raise RuntimeError("the Triton kernels of planes compute wrong depths")
    if not math.isclose(float(inner.detach()), 18 / 25, rel_tol=1e-4):
        raise RuntimeError("the Triton kernel of normals computes wrong values")
    if not math.isclose(float(gradients[0][0, 2]), 25.0, rel_tol=1e-4) or not bool(gradients[1].isfinite().all()):
        raise RuntimeError("the Triton kernels of planes compute wrong gradients")
