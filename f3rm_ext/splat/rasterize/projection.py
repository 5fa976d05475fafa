"""Projection of Gaussians on the CPU: numba kernels for values and gradients, in double precision within each Gaussian.

The definition is :func:`f3rm_ext.splat.rasterize.reference.project`. Let a and b be the rows of the Jacobian times the
camera's rotation, R the rotation of the Gaussian and s its sizes. The image-space covariance then consists of the inner
products of u = (a R) ∘ s and v = (b R) ∘ s, which keeps values and gradients short.
"""

import math
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.memory.shapes import lacks_values
from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize.camera import MARGIN, MAX_RADIUS_PX, MIN_COMPENSATION, MIN_EXTENT, Camera, Projection

CHUNK = 1024
"""Gaussians per task."""
TINY = 1e-12
"""Lower limit of a quaternion's length in divisions, as in torch's normalize."""


@no_type_check
@numba.njit(error_model="numpy")
def _dot(a, b):
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


@no_type_check
@numba.njit(error_model="numpy")
def _mix(p, a, q, b):
    return p * a[0] + q * b[0], p * a[1] + q * b[1], p * a[2] + q * b[2]


@no_type_check
@numba.njit(error_model="numpy")
def _load(array, i):
    return np.float64(array[i, 0]), np.float64(array[i, 1]), np.float64(array[i, 2])


@no_type_check
@numba.njit(error_model="numpy")
def _unit(quats, i):
    w, x, y, z = np.float64(quats[i, 0]), np.float64(quats[i, 1]), np.float64(quats[i, 2]), np.float64(quats[i, 3])
    norm = max(math.sqrt(w * w + x * x + y * y + z * z), TINY)
    return w / norm, x / norm, y / norm, z / norm, norm


@no_type_check
@numba.njit(error_model="numpy")
def _axes(w, x, y, z):
    """Returns the columns of the rotation matrix."""
    return (
        (1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)),
        (2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)),
        (2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)),
    )


@no_type_check
@numba.njit(error_model="numpy")
def _clamp(value, low, high):
    return min(max(value, low), high)


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _forward(means, quats, sizes, view, intrinsics, near, eps2d, means2d, conics, depths, compensations, radii):
    fx, fy, cx, cy, width, height = intrinsics
    w0, w1, w2 = _load(view, 0), _load(view, 1), _load(view, 2)
    for i in numba.prange(means.shape[0]):
        mean = _load(means, i)
        x, y, z = _dot(w0, mean) + view[0, 3], _dot(w1, mean) + view[1, 3], _dot(w2, mean) + view[2, 3]
        if not z > near:
            continue
        x_over_z = _clamp(x / z, -(cx + MARGIN * width) / fx, (width - cx + MARGIN * width) / fx)
        y_over_z = _clamp(y / z, -(cy + MARGIN * height) / fy, (height - cy + MARGIN * height) / fy)
        a = _mix(fx / z, w0, -fx / z * x_over_z, w2)
        b = _mix(fy / z, w1, -fy / z * y_over_z, w2)
        qw, qx, qy, qz, _ = _unit(quats, i)
        r0, r1, r2 = _axes(qw, qx, qy, qz)
        s = _load(sizes, i)
        u = _dot(a, r0) * s[0], _dot(a, r1) * s[1], _dot(a, r2) * s[2]
        v = _dot(b, r0) * s[0], _dot(b, r1) * s[1], _dot(b, r2) * s[2]
        xx, xy, yy = _dot(u, u) + eps2d, _dot(u, v), _dot(v, v) + eps2d
        det = xx * yy - xy * xy
        middle = 0.5 * (xx + yy)
        radius = math.ceil(3.0 * math.sqrt(middle + math.sqrt(max(MIN_EXTENT, middle * middle - det))))
        if not (det > 0.0 and radius <= MAX_RADIUS_PX):
            continue
        px, py = fx * x / z + cx, fy * y / z + cy
        if not (px + radius > 0 and px - radius < width and py + radius > 0 and py - radius < height):
            continue
        # The share of the area before eps2d was added (Mip-Splatting's 2D filter): what antialiasing leaves of alpha.
        ratio = (_dot(u, u) * _dot(v, v) - xy * xy) / det
        radii[i] = np.int32(radius)
        means2d[i, 0], means2d[i, 1], depths[i] = px, py, z
        conics[i, 0], conics[i, 1], conics[i, 2] = yy / det, -xy / det, xx / det
        compensations[i] = math.sqrt(ratio) if ratio > MIN_COMPENSATION * MIN_COMPENSATION else 0.0


@no_type_check
@numba.njit(error_model="numpy")
def _covariance_gradients(u, v, eps2d, grad_conic, grad_compensation):
    """Returns gradients of the covariance's xx, xy, yy from those of its inverse and of the compensation."""
    uu, uv, vv = _dot(u, u), _dot(u, v), _dot(v, v)
    xx, yy = uu + eps2d, vv + eps2d
    det = xx * yy - uv * uv
    g0, g1, g2 = grad_conic
    g_det = -(g0 * yy - g1 * uv + g2 * xx) / (det * det)
    ratio = (uu * vv - uv * uv) / det
    g_before = 0.0
    if grad_compensation != 0.0 and ratio > MIN_COMPENSATION * MIN_COMPENSATION:
        g_before = 0.5 * grad_compensation / (math.sqrt(ratio) * det)
        g_det -= g_before * ratio
    g_xx = g2 / det + g_det * yy + g_before * vv
    g_yy = g0 / det + g_det * xx + g_before * uu
    return g_xx, -g1 / det - 2.0 * (g_det + g_before) * uv, g_yy


@no_type_check
@numba.njit(error_model="numpy")
def _quat_gradients(w, x, y, z, norm, c0, c1, c2):
    """Returns the gradient of a quaternion of any length from those of the columns of its rotation matrix."""
    if norm <= TINY:
        return 0.0, 0.0, 0.0, 0.0
    gw = 2 * (x * (c1[2] - c2[1]) + y * (c2[0] - c0[2]) + z * (c0[1] - c1[0]))
    gx = 2 * (-2 * x * (c1[1] + c2[2]) + y * (c1[0] + c0[1]) + z * (c2[0] + c0[2]) + w * (c1[2] - c2[1]))
    gy = 2 * (x * (c1[0] + c0[1]) - 2 * y * (c0[0] + c2[2]) + z * (c2[1] + c1[2]) + w * (c2[0] - c0[2]))
    gz = 2 * (x * (c2[0] + c0[2]) + y * (c2[1] + c1[2]) - 2 * z * (c0[0] + c1[1]) + w * (c0[1] - c1[0]))
    # Only what is perpendicular to the quaternion turns; its length has no effect.
    along = w * gw + x * gx + y * gy + z * gz
    return (gw - w * along) / norm, (gx - x * along) / norm, (gy - y * along) / norm, (gz - z * along) / norm


@no_type_check
@numba.njit(error_model="numpy")
def _add_row(total, row, p, a, q, b):
    for axis in range(3):
        total[row, axis] += p * a[axis] + q * b[axis]


@no_type_check
@numba.njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _backward(
    means, quats, sizes, view, intrinsics, eps2d, radii, g_means2d, g_conics, g_depths, g_compensations, g_means,
    g_quats, g_sizes, g_view,
):  # fmt: skip
    fx, fy, cx, cy, width, height = intrinsics
    w0, w1, w2 = _load(view, 0), _load(view, 1), _load(view, 2)
    for task in numba.prange(g_view.shape[0]):
        # One matrix per task, summed in order afterwards: the camera's gradient does not depend on the threads.
        total = g_view[task]
        for i in range(task * CHUNK, min((task + 1) * CHUNK, means.shape[0])):
            if radii[i] == 0:
                continue
            mean = _load(means, i)
            x, y, z = _dot(w0, mean) + view[0, 3], _dot(w1, mean) + view[1, 3], _dot(w2, mean) + view[2, 3]
            x_over_z = _clamp(x / z, -(cx + MARGIN * width) / fx, (width - cx + MARGIN * width) / fx)
            y_over_z = _clamp(y / z, -(cy + MARGIN * height) / fy, (height - cy + MARGIN * height) / fy)
            j0, j1 = _mix(1.0, w0, -x_over_z, w2), _mix(1.0, w1, -y_over_z, w2)
            a, b = _mix(fx / z, j0, 0.0, j0), _mix(fy / z, j1, 0.0, j1)
            qw, qx, qy, qz, norm = _unit(quats, i)
            r0, r1, r2 = _axes(qw, qx, qy, qz)
            s = _load(sizes, i)
            p = _dot(a, r0), _dot(a, r1), _dot(a, r2)
            q = _dot(b, r0), _dot(b, r1), _dot(b, r2)
            u = p[0] * s[0], p[1] * s[1], p[2] * s[2]
            v = q[0] * s[0], q[1] * s[1], q[2] * s[2]
            g_xx, g_xy, g_yy = _covariance_gradients(u, v, eps2d, _load(g_conics, i), np.float64(g_compensations[i]))
            g_u, g_v = _mix(2.0 * g_xx, u, g_xy, v), _mix(2.0 * g_yy, v, g_xy, u)
            g_p = g_u[0] * s[0], g_u[1] * s[1], g_u[2] * s[2]
            g_q = g_v[0] * s[0], g_v[1] * s[1], g_v[2] * s[2]
            for k in range(3):
                g_sizes[i, k] = g_u[k] * p[k] + g_v[k] * q[k]
            c0, c1, c2 = _mix(g_p[0], a, g_q[0], b), _mix(g_p[1], a, g_q[1], b), _mix(g_p[2], a, g_q[2], b)
            gw, gx, gy, gz = _quat_gradients(qw, qx, qy, qz, norm, c0, c1, c2)
            g_quats[i, 0], g_quats[i, 1], g_quats[i, 2], g_quats[i, 3] = gw, gx, gy, gz

            g_a = _mix(1.0, _mix(g_p[0], r0, g_p[1], r1), g_p[2], r2)
            g_b = _mix(1.0, _mix(g_q[0], r0, g_q[1], r1), g_q[2], r2)
            g_px, g_py = np.float64(g_means2d[i, 0]), np.float64(g_means2d[i, 1])
            g_inverse_z = fx * _dot(g_a, j0) + fy * _dot(g_b, j1) + fx * x * g_px + fy * y * g_py
            g_x, g_y = fx / z * g_px, fy / z * g_py
            # A direction that was limited does not depend on the Gaussian's place.
            if x_over_z == x / z:
                slope = -fx / z * _dot(g_a, w2)
                g_x += slope / z
                g_inverse_z += slope * x
            if y_over_z == y / z:
                slope = -fy / z * _dot(g_b, w2)
                g_y += slope / z
                g_inverse_z += slope * y
            g_z = np.float64(g_depths[i]) - g_inverse_z / (z * z)
            g_mean = _mix(1.0, _mix(g_x, w0, g_y, w1), g_z, w2)
            for axis in range(3):
                g_means[i, axis] = g_mean[axis]
            _add_row(total, 0, fx / z, g_a, g_x, mean)
            _add_row(total, 1, fy / z, g_b, g_y, mean)
            _add_row(total, 2, -fx / z * x_over_z, g_a, g_z, mean)
            _add_row(total, 2, -fy / z * y_over_z, g_b, 0.0, mean)
            total[0, 3] += g_x
            total[1, 3] += g_y
            total[2, 3] += g_z


def _intrinsics(camera: Camera) -> tuple[float, ...]:
    K = camera.K.detach()
    values = (K[0, 0], K[1, 1], K[0, 2], K[1, 2], camera.width, camera.height)
    return tuple(float(value) for value in values)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, means: Tensor, quats: Tensor, sizes: Tensor, viewmat: Tensor, camera: Camera
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        count = len(means)
        means, quats, sizes = (value.detach().contiguous() for value in (means, quats, sizes))
        view = viewmat.detach().double().contiguous()
        means2d, conics, depths, compensations = (torch.zeros(count, *shape) for shape in ((2,), (3,), (), ()))
        radii = torch.zeros(count, dtype=torch.int32)
        _forward(
            means.numpy(), quats.numpy(), sizes.numpy(), view.numpy(), _intrinsics(camera), float(camera.near_plane),
            float(camera.eps2d), means2d.numpy(), conics.numpy(), depths.numpy(), compensations.numpy(), radii.numpy(),
        )  # fmt: skip
        ctx.save_for_backward(means, quats, sizes, view, radii)
        ctx.camera = camera
        ctx.mark_non_differentiable(radii)
        return means2d, conics, depths, compensations, radii

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        means, quats, sizes, view, radii = ctx.saved_tensors
        camera: Camera = ctx.camera
        g_means, g_quats, g_sizes = torch.zeros_like(means), torch.zeros_like(quats), torch.zeros_like(sizes)
        g_view = torch.zeros(-(-len(means) // CHUNK), 3, 4, dtype=torch.float64)
        g_means2d, g_conics, g_depths, g_compensations = (grad.contiguous().numpy() for grad in grads[:4])
        _backward(
            means.numpy(), quats.numpy(), sizes.numpy(), view.numpy(), _intrinsics(camera), float(camera.eps2d),
            radii.numpy(), g_means2d, g_conics, g_depths, g_compensations, g_means.numpy(), g_quats.numpy(),
            g_sizes.numpy(), g_view.numpy(),
        )  # fmt: skip
        g_viewmat = torch.nn.functional.pad(g_view.sum(dim=0), (0, 0, 0, 1)).float()
        gradients = g_means, g_quats, g_sizes, g_viewmat
        return (*(grad if need else None for grad, need in zip(gradients, ctx.needs_input_grad, strict=False)), None)


def project(shapes: Ellipsoids, camera: Camera) -> Projection:
    """Projects Gaussians on the CPU, which it converts to float32."""
    means, quats, sizes, alphas = shapes.map(Tensor.float)
    if lacks_values(means):
        from f3rm_ext.splat.rasterize.null import NullProjection

        projected: Any = NullProjection.apply(means, quats, sizes, camera.viewmat)
    else:
        projected = _Projection.apply(means, quats, sizes, camera.viewmat, camera)
    means2d, conics, depths, compensations, radii = projected
    return Projection(means2d, conics, depths, alphas * compensations if camera.antialiased else alphas, radii)
