"""Gaussians on triangles and the consistency of normals on the CPU: numba kernels with gradients.

They must agree with :meth:`f3rm_ext.mesh.bound.gaussians.BoundGaussians.gaussians` and
:func:`f3rm_ext.mesh.bound.smoothness.normal_inconsistency`, which some sixty small operators of torch compute.

With the edges a = v1 − v0 and b = v2 − v0, c = a × b and the frame (e, t, n) = (−a / |a|, n × e, c / |c|), a small
rotation ω of the frame is ω·e = −δc·t / |c|, ω·t = δc·e / |c|, ω·n = −δa·t / |a|, and turns the frame's quaternion q by
½ (0, ω) q.
"""

from typing import Any, no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.memory.shapes import run_kernel
from f3rm_ext.splat.triton_kernels import KernelLoss

LEAST = 1e-20
"""Length below which an edge or a normal has no gradient."""


@no_type_check
@numba.njit(error_model="numpy", inline="always")
def _edges(vertices, faces, f):
    """Returns both edges of a triangle from its first corner and their cross product, in double precision."""
    i, j, k = faces[f, 0], faces[f, 1], faces[f, 2]
    x, y, z = np.float64(vertices[i, 0]), np.float64(vertices[i, 1]), np.float64(vertices[i, 2])
    ax, ay, az = vertices[j, 0] - x, vertices[j, 1] - y, vertices[j, 2] - z
    bx, by, bz = vertices[k, 0] - x, vertices[k, 1] - y, vertices[k, 2] - z
    return ax, ay, az, bx, by, bz, ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx


@no_type_check
@numba.njit(error_model="numpy", inline="always")
def _frame(ax, ay, az, cx, cy, cz):
    """Returns the axes of a triangle's frame, and |a| and |c|."""
    along, twice = np.sqrt(ax * ax + ay * ay + az * az), np.sqrt(cx * cx + cy * cy + cz * cz)
    one, two = -1.0 / max(along, LEAST), 1.0 / max(twice, LEAST)
    ex, ey, ez, nx, ny, nz = ax * one, ay * one, az * one, cx * two, cy * two, cz * two
    tx, ty, tz = ny * ez - nz * ey, nz * ex - nx * ez, nx * ey - ny * ex
    return ex, ey, ez, tx, ty, tz, nx, ny, nz, along, twice


@no_type_check
@numba.njit(error_model="numpy", inline="always")
def _quat(ex, ey, ez, tx, ty, tz, nx, ny, nz):
    """Returns the unit quaternion of a frame, see :func:`f3rm_ext.mesh.bound.gaussians.frame_quats`."""
    # Each is four times the square of a component; dividing by the largest never divides by nearly 0.
    w, x, y, z = 1 + ex + ty + nz, 1 + ex - ty - nz, 1 - ex + ty - nz, 1 - ex - ty + nz
    if w >= x and w >= y and w >= z:
        x, y, z = tz - ny, nx - ez, ey - tx
    elif x >= y and x >= z:
        w, y, z = tz - ny, tx + ey, nx + ez
    elif y >= z:
        w, x, z = nx - ez, tx + ey, ny + tz
    else:
        w, x, y = ey - tx, nx + ez, ny + tz
    factor = 1.0 / np.sqrt(w * w + x * x + y * y + z * z)
    return w * factor, x * factor, y * factor, z * factor


@no_type_check
@numba.njit(error_model="numpy", inline="always")
def _half_turn(turns, g):
    """Returns the cosine and sine of a turn, its length, and those of its half, up to a factor."""
    length = max(np.sqrt(np.float64(turns[g, 0]) ** 2 + np.float64(turns[g, 1]) ** 2), 1e-12)
    cosine, sine = turns[g, 0] / length, turns[g, 1] / length
    # Two forms of the same half turn: each is free of cancellation where it is used.
    if cosine >= 0:
        return cosine, sine, length, 1 + cosine, sine
    return cosine, sine, length, sine, 1 - cosine


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _place(vertices, faces, turns, weights, means, quats):
    """Writes the centres and quaternions of Gaussians on triangles."""
    count = weights.shape[0]
    for f in numba.prange(faces.shape[0]):
        ax, ay, az, bx, by, bz, cx, cy, cz = _edges(vertices, faces, f)
        ex, ey, ez, tx, ty, tz, nx, ny, nz, _, _ = _frame(ax, ay, az, cx, cy, cz)
        w, x, y, z = _quat(ex, ey, ez, tx, ty, tz, nx, ny, nz)
        first = faces[f, 0]
        for k in range(count):
            g, second, third = f * count + k, weights[k, 1], weights[k, 2]
            means[g, 0] = vertices[first, 0] + second * ax + third * bx
            means[g, 1] = vertices[first, 1] + second * ay + third * by
            means[g, 2] = vertices[first, 2] + second * az + third * bz
            _, _, _, c, s = _half_turn(turns, g)
            quats[g, 0], quats[g, 1] = w * c - z * s, x * c + y * s
            quats[g, 2], quats[g, 3] = y * c - x * s, z * c + w * s


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _place_backward(vertices, faces, turns, weights, by_means, by_quats, by_corners, by_turns):
    """Adds the gradients by the corners of triangles, and writes those by turns."""
    count = weights.shape[0]
    for f in numba.prange(faces.shape[0]):
        ax, ay, az, bx, by, bz, cx, cy, cz = _edges(vertices, faces, f)
        ex, ey, ez, tx, ty, tz, nx, ny, nz, along, twice = _frame(ax, ay, az, cx, cy, cz)
        w, x, y, z = _quat(ex, ey, ez, tx, ty, tz, nx, ny, nz)
        gw, gx, gy, gz = 0.0, 0.0, 0.0, 0.0
        for k in range(count):
            g = f * count + k
            for corner in range(3):
                for axis in range(3):
                    by_corners[f, corner, axis] += weights[k, corner] * by_means[g, axis]
            cosine, sine, length, c, s = _half_turn(turns, g)
            p, q, r, t = by_quats[g, 0], by_quats[g, 1], by_quats[g, 2], by_quats[g, 3]
            gw, gx, gy, gz = gw + p * c + t * s, gx + q * c - r * s, gy + q * s + r * c, gz + t * c - p * s
            by_c, by_s = p * w + q * x + r * y + t * z, -p * z + q * y - r * x + t * w
            by_cosine, by_sine = (by_c, by_s) if cosine >= 0 else (-by_s, by_c)
            across = (by_sine * cosine - by_cosine * sine) / length
            by_turns[g, 0], by_turns[g, 1] = -across * sine, across * cosine
        # The gradient by ω, along the axes of the frame.
        ox = 0.5 * (w * gx - gw * x + y * gz - z * gy)
        oy = 0.5 * (w * gy - gw * y + z * gx - x * gz)
        oz = 0.5 * (w * gz - gw * z + x * gy - y * gx)
        oe, ot, on = ox * ex + oy * ey + oz * ez, ox * tx + oy * ty + oz * tz, ox * nx + oy * ny + oz * nz
        if along > LEAST and twice > LEAST:
            oe, ot, on = oe / twice, ot / twice, on / along
            px, py, pz = ot * ex - oe * tx, ot * ey - oe * ty, ot * ez - oe * tz
            _add_edges(by_corners, f, ax, ay, az, bx, by, bz, px, py, pz, -on * tx, -on * ty, -on * tz)


@no_type_check
@numba.njit(error_model="numpy", inline="always")
def _add_edges(by_corners, f, ax, ay, az, bx, by, bz, px, py, pz, sx, sy, sz):
    """Adds to the gradients by the corners of a triangle those of p·(a × b) + s·a, where a and b are its edges."""
    sx, sy, sz = by * pz - bz * py + sx, bz * px - bx * pz + sy, bx * py - by * px + sz
    tx, ty, tz = py * az - pz * ay, pz * ax - px * az, px * ay - py * ax
    by_corners[f, 0, 0] -= sx + tx
    by_corners[f, 0, 1] -= sy + ty
    by_corners[f, 0, 2] -= sz + tz
    by_corners[f, 1, 0] += sx
    by_corners[f, 1, 1] += sy
    by_corners[f, 1, 2] += sz
    by_corners[f, 2, 0] += tx
    by_corners[f, 2, 1] += ty
    by_corners[f, 2, 2] += tz


@no_type_check
@numba.njit(cache=True, nogil=True)
def _add_to_vertices(faces, by_corners, gradient):
    """Adds gradients by the corners of triangles to those by vertices."""
    # On one thread: triangles share vertices.
    for f in range(faces.shape[0]):
        for corner in range(3):
            vertex = faces[f, corner]
            for axis in range(3):
                gradient[vertex, axis] += by_corners[f, corner, axis]


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _normals(vertices, faces, normals):
    """Writes unit normals."""
    for f in numba.prange(faces.shape[0]):
        _, _, _, _, _, _, cx, cy, cz = _edges(vertices, faces, f)
        factor = 1.0 / max(np.sqrt(cx * cx + cy * cy + cz * cz), LEAST)
        normals[f, 0], normals[f, 1], normals[f, 2] = cx * factor, cy * factor, cz * factor


@no_type_check
@numba.njit(cache=True, nogil=True)
def _compare_normals(first, second, signs, normals, by_normals, total):
    """Writes the sum of 1 − n·m over pairs, and adds its gradient by normals."""
    result = 0.0  # on one thread: pairs share triangles
    for p in range(first.shape[0]):
        one, two, sign, cosine = first[p], second[p], signs[p], 0.0
        for axis in range(3):
            n, m = normals[one, axis], normals[two, axis]
            cosine += n * m
            by_normals[one, axis] -= sign * m
            by_normals[two, axis] -= sign * n
        result += 1 - sign * cosine
    total[0] = result


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _normals_backward(vertices, faces, by_normals, factor, by_corners):
    """Adds the gradients by the corners of triangles, times a factor, of those by normals."""
    for f in numba.prange(faces.shape[0]):
        ax, ay, az, bx, by, bz, cx, cy, cz = _edges(vertices, faces, f)
        twice = np.sqrt(cx * cx + cy * cy + cz * cz)
        if twice > LEAST:
            nx, ny, nz = cx / twice, cy / twice, cz / twice
            gx, gy, gz = by_normals[f, 0], by_normals[f, 1], by_normals[f, 2]
            outwards, scale = gx * nx + gy * ny + gz * nz, factor / twice
            px, py, pz = scale * (gx - outwards * nx), scale * (gy - outwards * ny), scale * (gz - outwards * nz)
            _add_edges(by_corners, f, ax, ay, az, bx, by, bz, px, py, pz, 0.0, 0.0, 0.0)


class BoundGeometry(torch.autograd.Function):
    """Centres and quaternions, not of unit length, of Gaussians on triangles; differentiable once by vertices, turns.

    Takes vertices (verts, 3), turns (gaussians, 2), faces (faces, 3) and barycentric weights (per triangle, 3).
    """

    @staticmethod
    def forward(
        ctx: Any,
        vertices: Float[Tensor, "verts 3"],
        turns: Float[Tensor, "gaussians 2"],
        faces: Int[Tensor, "faces 3"],
        weights: Float[Tensor, "count 3"],
    ) -> tuple[Tensor, Tensor]:
        means, quats = vertices.new_empty(len(turns), 3), vertices.new_empty(len(turns), 4)
        run_kernel(_place, vertices, faces, turns, weights, means, quats)
        ctx.save_for_backward(vertices, turns, faces, weights)
        return means, quats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        vertices, turns, faces, weights = ctx.saved_tensors
        by_corners, by_turns = vertices.new_zeros(len(faces), 3, 3), torch.empty_like(turns)
        run_kernel(_place_backward, vertices, faces, turns, weights, *grads, by_corners, by_turns)
        return _sum_at_vertices(vertices, faces, by_corners), by_turns, None, None


class NormalInconsistency(KernelLoss):
    """See :func:`f3rm_ext.mesh.bound.smoothness.normal_inconsistency`; differentiable by the vertices."""

    @staticmethod
    def forward(
        ctx: Any, vertices: Tensor, faces: Tensor, first: Tensor, second: Tensor, signs: Tensor
    ) -> Float[Tensor, ""]:
        normals, total = vertices.new_empty(len(faces), 3), vertices.new_empty(1)
        by_normals, by_corners = torch.zeros_like(normals), vertices.new_zeros(len(faces), 3, 3)
        run_kernel(_normals, vertices, faces, normals)
        run_kernel(_compare_normals, first, second, signs, normals, by_normals, total)
        run_kernel(_normals_backward, vertices, faces, by_normals, 1 / len(first), by_corners)
        ctx.save_for_backward(_sum_at_vertices(vertices, faces, by_corners))
        return total[0] / len(first)


def _sum_at_vertices(vertices: Tensor, faces: Tensor, by_corners: Tensor) -> Tensor:
    gradient = torch.zeros_like(vertices)
    run_kernel(_add_to_vertices, faces, by_corners, gradient)
    return gradient
