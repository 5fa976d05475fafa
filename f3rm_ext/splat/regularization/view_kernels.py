"""Agreement of depth and of patches between two views on the CPU: numba kernels with analytic gradients.

They must agree with the definitions in :mod:`~f3rm_ext.splat.regularization.multiview` and
:mod:`~f3rm_ext.splat.regularization.patches`. Without values (:func:`~f3rm_ext.memory.shapes.lacks_values`) they only
allocate.
"""

import math
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from torch import Tensor

from f3rm_ext.memory.shapes import lacks_values, run_kernel
from f3rm_ext.splat.regularization.frames import pixel_rays
from f3rm_ext.splat.regularization.kernels import FLAGS
from f3rm_ext.splat.regularization.plane_kernels import LEAST_SQUARED, ONE, ZERO, rotate, rotate_back


def _between(seen: Any, other: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rotation and shift from the frame of one camera to that of another."""
    first, second = (view.viewmat.detach().numpy().astype(np.float64) for view in (seen, other))
    turn = second[:3, :3] @ first[:3, :3].T
    return turn.astype(np.float32), (second[:3, 3] - turn @ first[:3, 3]).astype(np.float32)


def _intrinsics(K: Tensor) -> np.ndarray:
    return K.detach().numpy()[[0, 1, 0, 1], [0, 1, 2, 2]].astype(np.float32)


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True)
def _multiview_consistency(seen, other, x, y, focal, camera, turn, shift, most, trust, gradient, parts):
    h, w = seen.shape
    h2, w2 = other.shape
    far, scale = np.float32(1e-3), ONE / np.float32(h * w)
    for i in numba.prange(h):
        total = 0.0
        for j in range(w):
            trust[i, j] = gradient[i, j] = ZERO
            z = seen[i, j]
            if not z > 0:
                continue
            ax, ay, az = rotate(turn, x[j], y[i], ONE)
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
            # A plane's inverse depth is linear in the picture, its depth is not.
            there = ONE / ((d00 * (ONE - u) + d01 * u) * (ONE - v) + (d10 * (ONE - u) + d11 * u) * v)
            bx, by, bz = rotate_back(turn, rx * there - shift[0], ry * there - shift[1], there - shift[2])
            if not bz > far * z:
                continue
            bx, by = bx / bz, by / bz
            miss_x, miss_y = (bx - x[j]) * focal[0], (by - y[i]) * focal[1]
            error = math.sqrt(miss_x * miss_x + miss_y * miss_y + LEAST_SQUARED)
            if not error < most:
                continue
            # The trust counts as a constant: it must not pay to disagree more.
            trust[i, j] = math.exp(-error)
            total += trust[i, j] * error
            # The same round trip for a small change of depth.
            rx_z, ry_z = (ax - rx * az) / pz, (ay - ry * az) / pz
            u_z, v_z = rx_z * camera[0], ry_z * camera[1]
            inverse_z = ((d01 - d00) * (ONE - v) + (d11 - d10) * v) * u_z
            inverse_z += ((d10 - d00) * (ONE - u) + (d11 - d01) * u) * v_z
            there_z = -inverse_z * there * there
            bx_z, by_z, bz_z = rotate_back(turn, rx_z * there + rx * there_z, ry_z * there + ry * there_z, there_z)
            slope = miss_x * focal[0] * (bx_z - bx * bz_z) + miss_y * focal[1] * (by_z - by * bz_z)
            gradient[i, j] = scale * trust[i, j] * slope / (bz * error)
        parts[i] = scale * total


def multiview_consistency(depth: Tensor, seen: Any, other: Any, most: float, trust: Tensor, gradient: Tensor) -> Tensor:
    """Returns parts of :func:`~f3rm_ext.splat.regularization.multiview.multiview_consistency`, and writes trust and
    gradient."""
    parts = torch.zeros(depth.shape[0], dtype=torch.float64)
    if not lacks_values(depth):
        rays, cameras = pixel_rays(depth.shape, seen.K), (_intrinsics(seen.K), _intrinsics(other.K))
        given = depth, other.depth, *rays, *cameras, *_between(seen, other), np.float32(most)
        run_kernel(_multiview_consistency, *given, trust, gradient, parts)
    return parts


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
@numba.njit(inline="always")
def _centered_moments(ours, theirs):
    """Subtracts the mean of each patch in place, and returns their variances and their covariance."""
    size = np.float32(len(ours))
    mean, mean_there = ZERO, ZERO
    for s in range(len(ours)):
        mean += ours[s]
        mean_there += theirs[s]
    mean, mean_there = mean / size, mean_there / size
    power, power_there, common = ZERO, ZERO, ZERO
    for s in range(len(ours)):
        ours[s] -= mean
        theirs[s] -= mean_there
        power += ours[s] * ours[s]
        power_there += theirs[s] * theirs[s]
        common += ours[s] * theirs[s]
    return power / size, power_there / size, common / size


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
        inside = True
        for s in range(size):
            row, column = i + s // side - radius, j + s % side - radius
            slants[s] = fx * x[column] + fy * y[row] + fz
            # Where the plane is seen almost edge-on, its depth runs away within the patch.
            if not slants[s] < np.float32(0.2) * towards:
                inside = False
                break
            z = depth[i, j] * towards / slants[s]
            ax, ay, az = rotate(turn, x[column], y[row], ONE)
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
        if not inside:
            continue
        power, power_there, common = _centered_moments(ours, theirs)
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


def patch_disagreement(
    depth: Tensor, normals: Tensor, photo: Tensor, picture: Tensor, trust: Tensor, places: Tensor,
    seen: Any, other: Any, limits: tuple[int, float, float], grad_depth: Tensor, grad_normals: Tensor, losses: Tensor,
) -> None:  # fmt: skip
    """Writes the disagreement of each patch (:func:`~f3rm_ext.splat.regularization.patches.patch_disagreement`), and
    its gradients by depth and normal of its middle, a flat index; limits are radius in pixels, least variance and most
    disagreement."""
    if not lacks_values(depth):
        radius, least, most = limits
        cameras = *pixel_rays(depth.shape, seen.K), _intrinsics(other.K), *_between(seen, other)
        settings = radius, np.float32(least), np.float32(most)
        pictures = depth, normals, photo, picture, trust, places
        run_kernel(_patch_disagreement, *pictures, *cameras, *settings, grad_depth, grad_normals, losses)
