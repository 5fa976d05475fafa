"""The losses of planes over pixels, patches and Gaussians on the CPU: numba kernels with analytic gradients.

Each computes in one pass what takes dozens of operators of torch, and its gradient with it where the result is a loss.
They must agree with the definitions in :mod:`~f3rm_ext.splat.regularization.normals`,
:mod:`~f3rm_ext.splat.regularization.multiview` and :mod:`~f3rm_ext.splat.regularization.patches`. Without values
(:func:`~f3rm_ext.memory.shapes.lacks_values`) they only allocate.
"""

import math
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.memory.shapes import lacks_values, run_kernel
from f3rm_ext.splat.regularization.frames import pixel_rays
from f3rm_ext.splat.regularization.kernels import FLAGS

STRIP_ROWS = 8
"""Rows of a picture that one thread takes at a time."""
ZERO, ONE = np.float32(0.0), np.float32(1.0)
LEAST_SQUARED = np.float32(1e-12)


def _rays(picture: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    h, w = picture.shape
    return pixel_rays(h, w, K)


def _between(seen: Any, other: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rotation and shift from the frame of one camera to that of another."""
    first, second = (view.viewmat.detach().numpy().astype(np.float64) for view in (seen, other))
    turn = second[:3, :3] @ first[:3, :3].T
    return turn.astype(np.float32), (second[:3, 3] - turn @ first[:3, 3]).astype(np.float32)


def _intrinsics(K: Tensor) -> np.ndarray:
    return K.detach().numpy()[[0, 1, 0, 1], [0, 1, 2, 2]].astype(np.float32)


@no_type_check
@numba.njit(inline="always")
def _turn(matrix, x, y, z):
    return (
        matrix[0, 0] * x + matrix[0, 1] * y + matrix[0, 2] * z,
        matrix[1, 0] * x + matrix[1, 1] * y + matrix[1, 2] * z,
        matrix[2, 0] * x + matrix[2, 1] * y + matrix[2, 2] * z,
    )


@no_type_check
@numba.njit(inline="always")
def _turn_back(matrix, x, y, z):
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
        a, b, c = _turn(viewmat, a, b, c)
        px, py, pz = _turn(viewmat, means[i, 0], means[i, 1], means[i, 2])
        distance = a * (px + viewmat[0, 3]) + b * (py + viewmat[1, 3]) + c * (pz + viewmat[2, 3])
        sign = -ONE if distance > 0 else ONE
        planes[i, 0], planes[i, 1], planes[i, 2], planes[i, 3] = sign * a, sign * b, sign * c, sign * distance


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _facing_planes_backward(means, quats, scales, viewmat, grads, grad_means, grad_quats):
    for i in numba.prange(means.shape[0]):
        w, x, y, z, length, a, b, c, k = _axis(quats, scales, i)
        la, lb, lc = _turn(viewmat, a, b, c)
        px, py, pz = _turn(viewmat, means[i, 0], means[i, 1], means[i, 2])
        px, py, pz = px + viewmat[0, 3], py + viewmat[1, 3], pz + viewmat[2, 3]
        sign = -ONE if la * px + lb * py + lc * pz > 0 else ONE
        along = sign * grads[i, 3]
        grad_means[i, 0], grad_means[i, 1], grad_means[i, 2] = _turn_back(viewmat, along * la, along * lb, along * lc)
        ga, gb, gc = _turn_back(
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


class FacingPlanes(torch.autograd.Function):
    """See :func:`~f3rm_ext.splat.regularization.normals.facing_planes`."""

    @staticmethod
    def forward(ctx: Any, means: Tensor, quats: Tensor, scales: Tensor, viewmat: Tensor) -> Tensor:
        planes = torch.empty(len(means), 4)
        ctx.save_for_backward(means, quats, scales, viewmat)
        run_kernel(_facing_planes, means, quats, scales, viewmat, planes)
        return planes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        means, quats, _, _ = ctx.saved_tensors
        grad_means, grad_quats = torch.empty_like(means), torch.empty_like(quats)
        run_kernel(_facing_planes_backward, *ctx.saved_tensors, grads[0], grad_means, grad_quats)
        return grad_means, grad_quats, None, None


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


class PlaneDepth(torch.autograd.Function):
    """See :func:`~f3rm_ext.splat.regularization.normals.plane_depth`."""

    @staticmethod
    def forward(ctx: Any, normals: Tensor, distances: Tensor, K: Tensor, least_cosine: float) -> Tensor:
        rays = _rays(distances, K)
        depth, slopes = torch.empty_like(distances), torch.empty_like(distances)
        run_kernel(_plane_depth, normals, distances, *rays, np.float32(least_cosine), depth, slopes)
        ctx.save_for_backward(depth, slopes, *rays)
        return depth

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        depth = ctx.saved_tensors[0]
        grad_normals, grad_distances = depth.new_empty(*depth.shape, 3), torch.empty_like(depth)
        run_kernel(_plane_depth_backward, *ctx.saved_tensors, grads[0], grad_normals, grad_distances)
        return grad_normals, grad_distances, None, None


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
    depth, alpha, normals, weights, x, y, divide, least, grad_depth, grad_alpha, grad_normals, sums
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
                sums[i] = total
    if divide:
        for i in numba.prange(h):
            for j in range(w):
                if grad_depth[i, j] != 0:
                    grad_depth[i, j] /= alpha[i, j]
                    grad_alpha[i, j] = -grad_depth[i, j] * depth[i, j] / alpha[i, j]


class DnConsistency(torch.autograd.Function):
    """See :func:`~f3rm_ext.splat.regularization.normals.dn_consistency`, without ``rebuild_z``; pixels of weight 0 do
    not count."""

    @staticmethod
    def forward(
        ctx: Any, depth: Tensor, alpha: Tensor, normals: Tensor, weights: Tensor, K: Tensor, divide: bool, least: float
    ) -> Tensor:
        grads = torch.zeros_like(depth), torch.zeros_like(depth) if divide else depth.new_empty(0, 0)
        grads = *grads, torch.zeros_like(normals)
        sums = torch.zeros(depth.shape[0], dtype=torch.float64)
        rays = _rays(depth, K)
        run_kernel(_dn_consistency, depth, alpha, normals, weights, *rays, divide, np.float32(least), *grads, sums)
        ctx.save_for_backward(*grads)
        return (sums.sum() / max(1, depth.numel())).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        depth, alpha, normals = (grads[0] * saved if saved.numel() else None for saved in ctx.saved_tensors)
        return depth, alpha, normals, None, None, None, None


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


# --- between views ---------------------------------------------------------------------------------------------------


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _trusted_errors(seen, other, x, y, focal, camera, turn, shift, most, errors, trust, slopes):
    h, w = seen.shape
    h2, w2 = other.shape
    far = np.float32(1e-3)
    for i in numba.prange(h):
        for j in range(w):
            errors[i, j] = trust[i, j] = slopes[i, j] = ZERO
            z = seen[i, j]
            if not z > 0:
                continue
            ax, ay, az = _turn(turn, x[j], y[i], ONE)
            px, py, pz = ax * z + shift[0], ay * z + shift[1], az * z + shift[2]
            if not pz > far * z:
                continue
            rx, ry = px / pz, py / pz
            u, v = rx * camera[0] + camera[2] - np.float32(0.5), ry * camera[1] + camera[3] - np.float32(0.5)
            if not (0 <= u <= w2 - 1 and 0 <= v <= h2 - 1):
                continue
            j0, i0 = int(u), int(v)
            j1, i1 = min(j0 + 1, w2 - 1), min(i0 + 1, h2 - 1)
            u, v = u - np.float32(j0), v - np.float32(i0)
            d00, d01, d10, d11 = other[i0, j0], other[i0, j1], other[i1, j0], other[i1, j1]
            known = ZERO
            if d00 > 0:
                known += (ONE - u) * (ONE - v)
            if d01 > 0:
                known += u * (ONE - v)
            if d10 > 0:
                known += (ONE - u) * v
            if d11 > 0:
                known += u * v
            if not known > ONE - np.float32(1e-3):
                continue
            d00, d01 = ONE / d00 if d00 > 0 else ONE, ONE / d01 if d01 > 0 else ONE
            d10, d11 = ONE / d10 if d10 > 0 else ONE, ONE / d11 if d11 > 0 else ONE
            there = ONE / ((d00 * (ONE - u) + d01 * u) * (ONE - v) + (d10 * (ONE - u) + d11 * u) * v)
            bx, by, bz = _turn_back(turn, rx * there - shift[0], ry * there - shift[1], there - shift[2])
            if not bz > far * z:
                continue
            bx, by = bx / bz, by / bz
            miss_x, miss_y = (bx - x[j]) * focal[0], (by - y[i]) * focal[1]
            error = math.sqrt(miss_x * miss_x + miss_y * miss_y + LEAST_SQUARED)
            errors[i, j] = error
            trust[i, j] = math.exp(-error) if error < most else ZERO
            # The same round trip for a small change of depth.
            rx_z, ry_z = (ax - rx * az) / pz, (ay - ry * az) / pz
            u_z, v_z = rx_z * camera[0], ry_z * camera[1]
            inverse_z = ((d01 - d00) * (ONE - v) + (d11 - d10) * v) * u_z
            inverse_z += ((d10 - d00) * (ONE - u) + (d11 - d01) * u) * v_z
            there_z = -inverse_z * there * there
            bx_z, by_z, bz_z = _turn_back(turn, rx_z * there + rx * there_z, ry_z * there + ry * there_z, there_z)
            slope = miss_x * focal[0] * (bx_z - bx * bz_z) + miss_y * focal[1] * (by_z - by * bz_z)
            slopes[i, j] = slope / (bz * error)


class TrustedErrors(torch.autograd.Function):
    """See :func:`~f3rm_ext.splat.regularization.multiview.trusted_errors`."""

    @staticmethod
    def forward(ctx: Any, depth: Tensor, seen: Any, other: Any, most: float) -> tuple[Tensor, Tensor]:
        errors, trust, slopes = (torch.empty_like(depth) for _ in range(3))
        if not lacks_values(depth):
            rays, cameras = _rays(depth, seen.K), (_intrinsics(seen.K), _intrinsics(other.K))
            between = _between(seen, other)
            results = errors, trust, slopes
            run_kernel(_trusted_errors, depth, other.depth, *rays, *cameras, *between, np.float32(most), *results)
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(trust)
        return errors, trust

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.saved_tensors[0], None, None, None


@no_type_check
@numba.njit(inline="always")
def _grey(picture, i, j):
    """Returns the brightness of a pixel, after ITU-R BT.601."""
    return (
        np.float32(0.299) * picture[i, j, 0]
        + np.float32(0.587) * picture[i, j, 1]
        + np.float32(0.114) * picture[i, j, 2]
    )


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _patch_disagreement(
    depth, normals, photo, picture, trust, places, x, y, camera, turn, shift, radius, least, most,
    grad_depth, grad_normals, losses,
):  # fmt: skip
    w = depth.shape[1]
    h2, w2 = picture.shape[0], picture.shape[1]
    side = 2 * radius + 1
    size = side * side
    for patch in numba.prange(places.shape[0]):
        losses[patch] = grad_depth[patch] = ZERO
        grad_normals[patch, 0] = grad_normals[patch, 1] = grad_normals[patch, 2] = ZERO
        i, j = places[patch] // w, places[patch] % w
        weight = trust[i, j]
        fx, fy, fz = normals[i, j, 0], normals[i, j, 1], normals[i, j, 2]
        length = max(math.sqrt(fx * fx + fy * fy + fz * fz), LEAST_SQUARED)
        fx, fy, fz = fx / length, fy / length, fz / length
        towards = fx * x[j] + fy * y[i] + fz
        if not (weight > 0 and towards < 0):
            continue
        ours, theirs = np.empty(size, np.float32), np.empty(size, np.float32)
        slopes = np.empty(size, np.float32)  # of the other picture's grey, by depth
        slants = np.empty(size, np.float32)
        mean, mean_there, inside = ZERO, ZERO, True
        for s in range(size):
            row, column = i + s // side - radius, j + s % side - radius
            slants[s] = fx * x[column] + fy * y[row] + fz
            if not slants[s] < np.float32(0.2) * towards:
                inside = False
                break
            z = depth[i, j] * towards / slants[s]
            ax, ay, az = _turn(turn, x[column], y[row], ONE)
            px, py, pz = ax * z + shift[0], ay * z + shift[1], az * z + shift[2]
            if not pz > np.float32(1e-3) * abs(z):
                inside = False
                break
            u, v = px / pz * camera[0] + camera[2], py / pz * camera[1] + camera[3]
            if not (0 < u < w2 and 0 < v < h2):
                inside = False
                break
            u, v = u - np.float32(0.5), v - np.float32(0.5)
            u_z, v_z = camera[0] * (ax - px / pz * az) / pz, camera[1] * (ay - py / pz * az) / pz
            # At the border the outermost pixels go on.
            if not 0 < u < w2 - 1:
                u, u_z = min(max(u, ZERO), np.float32(w2 - 1)), ZERO
            if not 0 < v < h2 - 1:
                v, v_z = min(max(v, ZERO), np.float32(h2 - 1)), ZERO
            j0, i0 = int(u), int(v)
            j1, i1 = min(j0 + 1, w2 - 1), min(i0 + 1, h2 - 1)
            u, v = u - np.float32(j0), v - np.float32(i0)
            g00, g01 = _grey(picture, i0, j0), _grey(picture, i0, j1)
            g10, g11 = _grey(picture, i1, j0), _grey(picture, i1, j1)
            theirs[s] = (g00 * (ONE - u) + g01 * u) * (ONE - v) + (g10 * (ONE - u) + g11 * u) * v
            slopes[s] = ((g01 - g00) * (ONE - v) + (g11 - g10) * v) * u_z
            slopes[s] += ((g10 - g00) * (ONE - u) + (g11 - g01) * u) * v_z
            ours[s] = _grey(photo, row, column)
            mean += ours[s]
            mean_there += theirs[s]
        if not inside:
            continue
        mean, mean_there = mean / np.float32(size), mean_there / np.float32(size)
        power, power_there, common = ZERO, ZERO, ZERO
        for s in range(size):
            ours[s] -= mean
            theirs[s] -= mean_there
            power += ours[s] * ours[s]
            power_there += theirs[s] * theirs[s]
            common += ours[s] * theirs[s]
        power, power_there, common = power / np.float32(size), power_there / np.float32(size), common / np.float32(size)
        if not (power > least and power_there > least):
            continue
        norm = math.sqrt(power * power_there)
        wrong = ONE - common / norm
        if not wrong < most:
            continue
        losses[patch] = weight * wrong
        gx, gy, gz, g_towards, g_depth = ZERO, ZERO, ZERO, ZERO, ZERO
        factor = -weight / (norm * np.float32(size))
        for s in range(size):
            row, column = i + s // side - radius, j + s % side - radius
            # By the depth at which the ray of this pixel meets the plane, D (n · middle) / (n · ray).
            share = factor * (ours[s] - common / power_there * theirs[s]) * slopes[s] / slants[s]
            g_depth += share * towards
            g_towards += share * depth[i, j]
            slant = -share * depth[i, j] * towards / slants[s]
            gx += slant * x[column]
            gy += slant * y[row]
            gz += slant
        gx, gy, gz = gx + g_towards * x[j], gy + g_towards * y[i], gz + g_towards
        along = gx * fx + gy * fy + gz * fz
        grad_depth[patch] = g_depth
        grad_normals[patch, 0] = (gx - along * fx) / length
        grad_normals[patch, 1] = (gy - along * fy) / length
        grad_normals[patch, 2] = (gz - along * fz) / length


class PatchDisagreement(torch.autograd.Function):
    """See :func:`~f3rm_ext.splat.regularization.patches.patch_disagreement`; the middles are given as flat indices."""

    @staticmethod
    def forward(
        ctx: Any, depth: Tensor, normals: Tensor, photo: Tensor, picture: Tensor, trust: Tensor, places: Tensor,
        seen: Any, other: Any, limits: tuple[int, float, float],
    ) -> Tensor:  # fmt: skip
        grads = depth.new_empty(len(places)), depth.new_empty(len(places), 3)
        losses = torch.empty_like(grads[0])
        if not lacks_values(depth):
            radius, least, most = limits
            rays, between = _rays(depth, seen.K), _between(seen, other)
            settings = radius, np.float32(least), np.float32(most)
            pictures = depth, normals, photo, picture, trust, places
            run_kernel(_patch_disagreement, *pictures, *rays, _intrinsics(other.K), *between, *settings, *grads, losses)
        ctx.save_for_backward(places, *grads)
        ctx.shape = depth.shape
        return losses.sum() / max(1, len(places))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        places, *parts = ctx.saved_tensors
        factor, (h, w) = grads[0] / max(1, len(places)), ctx.shape
        depth, normals = parts[0].new_zeros(h * w), parts[1].new_zeros(h * w, 3)
        depth.index_add_(0, places, factor * parts[0])
        normals.index_add_(0, places, factor * parts[1])
        return depth.view(h, w), normals.view(h, w, 3), *(None,) * 7
