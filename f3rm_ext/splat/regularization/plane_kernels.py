"""Planes of Gaussians, their depth and the loss of normals on the CPU: numba kernels with analytic gradients.

Each computes in one pass what takes dozens of operators of torch, and its gradient with it where the result is a loss.
They must agree with the definitions in :mod:`~f3rm_ext.splat.regularization.normals` and
:mod:`~f3rm_ext.splat.regularization.planar`. Without values (:func:`~f3rm_ext.memory.shapes.lacks_values`) they only
allocate.
"""

import math
from functools import partial
from typing import no_type_check

import numba
import numpy as np
import torch
from torch import Tensor

from f3rm_ext.memory.shapes import run_kernel
from f3rm_ext.splat.regularization.frames import pixel_rays
from f3rm_ext.splat.regularization.kernels import FLAGS

STRIP_ROWS = 8
"""Rows of a picture that one thread takes at a time."""
ZERO, ONE = np.float32(0.0), np.float32(1.0)
LEAST_SQUARED = np.float32(1e-12)


@no_type_check
@numba.njit(inline="always")
def rotate(matrix, x, y, z):
    """Multiplies a vector by a matrix."""
    return (
        matrix[0, 0] * x + matrix[0, 1] * y + matrix[0, 2] * z,
        matrix[1, 0] * x + matrix[1, 1] * y + matrix[1, 2] * z,
        matrix[2, 0] * x + matrix[2, 1] * y + matrix[2, 2] * z,
    )


@no_type_check
@numba.njit(inline="always")
def rotate_back(matrix, x, y, z):
    """Multiplies a vector by a transposed matrix."""
    return (
        matrix[0, 0] * x + matrix[1, 0] * y + matrix[2, 0] * z,
        matrix[0, 1] * x + matrix[1, 1] * y + matrix[2, 1] * z,
        matrix[0, 2] * x + matrix[1, 2] * y + matrix[2, 2] * z,
    )


# --- planes of Gaussians ---------------------------------------------------------------------------------------------


@no_type_check
@numba.njit(inline="always")
def _axis(quats, scales, i):
    """Returns the unit quaternion of a Gaussian, its length, the column of the smallest scale, and its number."""
    w, x, y, z = quats[i, 0], quats[i, 1], quats[i, 2], quats[i, 3]
    length = max(math.sqrt(w * w + x * x + y * y + z * z), LEAST_SQUARED)
    w, x, y, z = w / length, x / length, y / length, z / length
    k = 0
    for other in range(1, 3):
        if scales[i, other] < scales[i, k]:
            k = other
    if k == 0:
        a, b, c = 1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)
    elif k == 1:
        a, b, c = 2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)
    else:
        a, b, c = 2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)
    return w, x, y, z, length, a, b, c, k


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _facing_planes(means, quats, scales, viewmat, planes):
    for i in numba.prange(means.shape[0]):
        _, _, _, _, _, a, b, c, _ = _axis(quats, scales, i)
        a, b, c = rotate(viewmat, a, b, c)
        px, py, pz = rotate(viewmat, means[i, 0], means[i, 1], means[i, 2])
        distance = a * (px + viewmat[0, 3]) + b * (py + viewmat[1, 3]) + c * (pz + viewmat[2, 3])
        sign = -ONE if distance > 0 else ONE
        planes[i, 0], planes[i, 1], planes[i, 2], planes[i, 3] = sign * a, sign * b, sign * c, sign * distance


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _facing_planes_backward(means, quats, scales, viewmat, grads, grad_means, grad_quats):
    for i in numba.prange(means.shape[0]):
        w, x, y, z, length, a, b, c, k = _axis(quats, scales, i)
        la, lb, lc = rotate(viewmat, a, b, c)
        px, py, pz = rotate(viewmat, means[i, 0], means[i, 1], means[i, 2])
        px, py, pz = px + viewmat[0, 3], py + viewmat[1, 3], pz + viewmat[2, 3]
        sign = -ONE if la * px + lb * py + lc * pz > 0 else ONE
        along = sign * grads[i, 3]
        grad_means[i, 0], grad_means[i, 1], grad_means[i, 2] = rotate_back(viewmat, along * la, along * lb, along * lc)
        ga, gb, gc = rotate_back(
            viewmat,
            sign * grads[i, 0] + along * px,
            sign * grads[i, 1] + along * py,
            sign * grads[i, 2] + along * pz,
        )
        if k == 0:
            gw, gx = 2 * (z * gb - y * gc), 2 * (y * gb + z * gc)
            gy, gz = 2 * (x * gb - w * gc - 2 * y * ga), 2 * (w * gb + x * gc - 2 * z * ga)
        elif k == 1:
            gw, gx = 2 * (x * gc - z * ga), 2 * (y * ga + w * gc - 2 * x * gb)
            gy, gz = 2 * (x * ga + z * gc), 2 * (y * gc - w * ga - 2 * z * gb)
        else:
            gw, gx = 2 * (y * ga - x * gb), 2 * (z * ga - w * gb - 2 * x * gc)
            gy, gz = 2 * (w * ga + z * gb - 2 * y * gc), 2 * (x * ga + y * gb)
        radial = gw * w + gx * x + gy * y + gz * z
        grad_quats[i, 0], grad_quats[i, 1] = (gw - radial * w) / length, (gx - radial * x) / length
        grad_quats[i, 2], grad_quats[i, 3] = (gy - radial * y) / length, (gz - radial * z) / length


facing_planes = partial(run_kernel, _facing_planes)
"""Writes :func:`~f3rm_ext.splat.regularization.normals.facing_planes`."""
facing_planes_backward = partial(run_kernel, _facing_planes_backward)
"""Writes the gradients of :func:`facing_planes` by means and quaternions."""


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _plane_depth(normals, distances, x, y, least_cosine, depth, slopes):
    h, w = distances.shape
    for i in numba.prange(h):
        for j in range(w):
            a, b, c, distance = normals[i, j, 0], normals[i, j, 1], normals[i, j, 2], distances[i, j]
            towards = a * x[j] + b * y[i] + c
            long = math.sqrt((ONE + x[j] * x[j] + y[i] * y[i]) * (a * a + b * b + c * c))
            depth[i, j] = slopes[i, j] = ZERO
            # The plane has to face the camera, not edge-on, in front of it.
            if towards < -least_cosine * long and distance < 0 and math.isfinite(distance):
                slopes[i, j] = ONE / towards
                depth[i, j] = distance / towards


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _plane_depth_backward(depth, slopes, x, y, grads, grad_normals, grad_distances):
    h, w = depth.shape
    for i in numba.prange(h):
        for j in range(w):
            share = grads[i, j] * slopes[i, j] if slopes[i, j] != 0 else ZERO
            grad_distances[i, j] = share
            across = -share * depth[i, j]
            grad_normals[i, j, 0], grad_normals[i, j, 1], grad_normals[i, j, 2] = across * x[j], across * y[i], across


def plane_depth(
    normals: Tensor, distances: Tensor, K: Tensor, least_cosine: float, depth: Tensor, slopes: Tensor
) -> None:
    """Writes :func:`~f3rm_ext.splat.regularization.normals.plane_depth`, and its slopes by the distances."""
    run_kernel(_plane_depth, normals, distances, *pixel_rays(depth.shape, K), np.float32(least_cosine), depth, slopes)


def plane_depth_backward(
    depth: Tensor, slopes: Tensor, K: Tensor, grads: Tensor, grad_normals: Tensor, grad_distances: Tensor
) -> None:
    """Writes the gradients of :func:`plane_depth` by normals and distances."""
    run_kernel(_plane_depth_backward, depth, slopes, *pixel_rays(depth.shape, K), grads, grad_normals, grad_distances)


# --- normals against depth -------------------------------------------------------------------------------------------


@no_type_check
@numba.njit(inline="always")
def _dense_depth(depth, alpha, i, j, divide, least):
    """Returns the depth of a pixel, divided or not; 0 where there is none."""
    d, a = depth[i, j], alpha[i, j]
    if math.isfinite(d) and math.isfinite(a) and a > least and d > 0:
        return d / a if divide else d
    return ZERO


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _dn_consistency(
    depth, alpha, normals, weights, x, y, divide, least, grad_depth, grad_alpha, grad_normals, parts
):  # fmt: skip
    h, w = depth.shape
    scale = ONE / np.float32(h * w)
    strips = (h + STRIP_ROWS - 1) // STRIP_ROWS
    # A pixel adds to the gradients of its neighbours, so every second strip waits for those between.
    for turn in range(2):
        for pair in numba.prange((strips - turn + 1) // 2):
            first = (2 * pair + turn) * STRIP_ROWS
            for i in range(max(1, first), min(h - 1, first + STRIP_ROWS)):
                total = 0.0
                for j in range(1, w - 1):
                    weight = weights[i, j]
                    a, b, c = normals[i, j, 0], normals[i, j, 1], normals[i, j, 2]
                    squared = a * a + b * b + c * c
                    if not (weight > 0 and squared > LEAST_SQUARED and math.isfinite(squared)):
                        continue
                    left = _dense_depth(depth, alpha, i, j - 1, divide, least)
                    right = _dense_depth(depth, alpha, i, j + 1, divide, least)
                    above = _dense_depth(depth, alpha, i - 1, j, divide, least)
                    below = _dense_depth(depth, alpha, i + 1, j, divide, least)
                    if not min(left, right, above, below, _dense_depth(depth, alpha, i, j, divide, least)) > 0:
                        continue
                    ax, ay, az = right * x[j + 1] - left * x[j - 1], (right - left) * y[i], right - left
                    dx, dy, dz = (below - above) * x[j], below * y[i + 1] - above * y[i - 1], below - above
                    nx, ny, nz = dy * az - dz * ay, dz * ax - dx * az, dx * ay - dy * ax
                    stretch, length = math.sqrt(nx * nx + ny * ny + nz * nz), math.sqrt(squared)
                    # Without a direction, the pixel disagrees wholly and pulls nowhere.
                    if stretch == 0:
                        total += weight
                        continue
                    nx, ny, nz = nx / stretch, ny / stretch, nz / stretch
                    a, b, c = a / length, b / length, c / length
                    cosine = a * nx + b * ny + c * nz
                    total += weight * (ONE - cosine)
                    factor = -weight * scale
                    grad_normals[i, j, 0] = factor * (nx - cosine * a) / length
                    grad_normals[i, j, 1] = factor * (ny - cosine * b) / length
                    grad_normals[i, j, 2] = factor * (nz - cosine * c) / length
                    factor /= stretch
                    gx, gy, gz = factor * (a - cosine * nx), factor * (b - cosine * ny), factor * (c - cosine * nz)
                    # The normal is down × across.
                    ux, uy, uz = gy * dz - gz * dy, gz * dx - gx * dz, gx * dy - gy * dx
                    vx, vy, vz = ay * gz - az * gy, az * gx - ax * gz, ax * gy - ay * gx
                    grad_depth[i, j + 1] += ux * x[j + 1] + uy * y[i] + uz
                    grad_depth[i, j - 1] -= ux * x[j - 1] + uy * y[i] + uz
                    grad_depth[i + 1, j] += vx * x[j] + vy * y[i + 1] + vz
                    grad_depth[i - 1, j] -= vx * x[j] + vy * y[i - 1] + vz
                parts[i] = scale * total
    if divide:
        for i in numba.prange(h):
            for j in range(w):
                if grad_depth[i, j] != 0:
                    grad_depth[i, j] /= alpha[i, j]
                    grad_alpha[i, j] = -grad_depth[i, j] * depth[i, j] / alpha[i, j]


def dn_consistency(
    depth: Tensor, alpha: Tensor, normals: Tensor, weights: Tensor, K: Tensor, divide: bool, least: float,
    grad_depth: Tensor, grad_alpha: Tensor, grad_normals: Tensor,
) -> Tensor:  # fmt: skip
    """Returns parts of :func:`~f3rm_ext.splat.regularization.normals.dn_consistency`, and writes its gradients."""
    grads, parts = (grad_depth, grad_alpha, grad_normals), torch.zeros(depth.shape[0], dtype=torch.float64)
    for grad in grads:
        grad.zero_()
    settings = *pixel_rays(depth.shape, K), divide, np.float32(least)
    run_kernel(_dn_consistency, depth, alpha, normals, weights, *settings, *grads, parts)
    return parts


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True)
def _edge_weights(photo, weights, tops):
    h, w = weights.shape
    for i in numba.prange(h):
        top = ZERO
        for j in range(w):
            squared = ZERO
            for k in range(3):
                down = photo[i + 1, j, k] - photo[i - 1, j, k] if 0 < i < h - 1 else ZERO
                across = photo[i, j + 1, k] - photo[i, j - 1, k] if 0 < j < w - 1 else ZERO
                squared += down * down + across * across
            weights[i, j] = math.sqrt(squared)
            top = max(top, weights[i, j])
        tops[i] = top
    most = max(tops.max(), np.float32(1e-6))
    for i in numba.prange(h):
        for j in range(w):
            rest = ONE - weights[i, j] / most
            weights[i, j] = rest * rest


def edge_weights(photo: Tensor) -> Tensor:
    """See :func:`~f3rm_ext.splat.regularization.planar.edge_weights`."""
    weights = photo.new_empty(photo.shape[:2])
    run_kernel(_edge_weights, photo, weights, photo.new_empty(photo.shape[0]))
    return weights
