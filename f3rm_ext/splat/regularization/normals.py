"""Normals of Gaussians and of depth maps, the loss that makes them agree, and the depth of the Gaussians' planes."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.regularization.frames import pixel_rays, rotate, to_camera
from f3rm_ext.splat.regularization.kernel_functions import PLANES, DnConsistency, FacingPlanes, PlaneDepth
from f3rm_ext.splat.triton_kernels import choose_kernels


def facing_normals(
    normals: Float[Tensor, "gaussians 3"],
    means: Float[Tensor, "gaussians 3"],
    viewmat: Float[Tensor, "4 4"],
) -> Float[Tensor, "gaussians 3"]:
    """Returns normals of Gaussians, unit vectors of either sign in the scene frame, for compositing: in the camera's
    frame (OpenCV axes), flipped towards the camera."""
    local = rotate(normals, viewmat[:3, :3])
    with torch.no_grad():
        away = (local * to_camera(means, viewmat)).sum(1, keepdim=True) > 0
    return torch.where(away, -local, local)


def normals_from_depth(
    depth: Float[Tensor, "h w"], K: Float[Tensor, "3 3"]
) -> tuple[Float[Tensor, "h w 3"], Bool[Tensor, "h w"]]:
    """Computes normals of the surface that a depth map describes, towards the camera, and a mask of valid pixels.

    Each is the cross product of central differences of the back-projected depth, as in 2D Gaussian splatting: unit
    length, in the camera's frame (OpenCV axes). Border pixels are invalid, as are pixels without positive, finite depth
    there and at the four neighbours; their normals are zero. A factor on the whole map changes nothing.

    Args:
        depth: along the camera's axis, scene units.
        K: intrinsics in pixels; pixel centres at +½.
    """
    h, w = depth.shape
    normals = depth.new_zeros(h, w, 3)
    valid = torch.zeros(h, w, dtype=torch.bool, device=depth.device)
    if h < 3 or w < 3:
        return normals, valid
    with torch.no_grad():
        known = torch.isfinite(depth) & (depth > 0)
        valid[1:-1, 1:-1] = known[1:-1, 1:-1] & known[:-2, 1:-1] & known[2:, 1:-1] & known[1:-1, :-2] & known[1:-1, 2:]
    # Sets unknown depth to 1 before any arithmetic, so that masked pixels cannot produce NaN gradients.
    depth = torch.where(known, depth, 1)
    x, y = pixel_rays((h, w), K)
    points = torch.stack([depth * x, depth * y[:, None], depth], dim=-1)
    across = points[1:-1, 2:] - points[1:-1, :-2]
    down = points[2:, 1:-1] - points[:-2, 1:-1]
    inner = functional.normalize(torch.linalg.cross(down, across), dim=-1, eps=1e-20)
    inner = torch.where(valid[1:-1, 1:-1, None], inner, 0)
    return functional.pad(inner, (0, 0, 1, 1, 1, 1)), valid


def expected_depth(
    depth: Float[Tensor, "h w"], alpha: Float[Tensor, "h w"], *, divide: bool, min_alpha: float
) -> Float[Tensor, "h w"]:
    """Returns composited depth Σ w z, optionally divided by Σ w; 0 where Σ w does not exceed ``min_alpha``. See
    :func:`dn_consistency`."""
    with torch.no_grad():
        dense = torch.isfinite(alpha) & torch.isfinite(depth) & (alpha > max(min_alpha, 1e-6)) & (depth > 0)
    if divide:
        depth = torch.where(dense, depth, 0) / torch.where(dense, alpha, 1)
    return torch.where(dense, depth, 0)


def unit_normals(
    normals: Float[Tensor, "h w 3"], *, rebuild_z: bool
) -> tuple[Float[Tensor, "h w 3"], Bool[Tensor, "h w"]]:
    """Normalises composited normals Σ w n; also returns a mask of valid pixels.

    Args:
        normals: in the camera's frame, towards the camera.
        rebuild_z: keep x and y and set z = −√(1 − x² − y²), as SuGaR does; unsaturated pixels (Σ w < 1) then turn
            towards the camera. Otherwise divide all three by their length, which is independent of Σ w.
    """
    with torch.no_grad():
        usable = torch.isfinite(normals).all(-1)
        if rebuild_z:
            usable &= normals[..., :2].square().sum(-1) < 1 - 1e-6
        else:
            usable &= normals.square().sum(-1) > 1e-12
    straight = torch.zeros_like(normals[0, 0])
    straight[2] = -1.0  # filled on the device; a tensor made of numbers would be copied there
    normals = torch.where(usable[..., None], normals, straight)
    if rebuild_z:
        z = -(1 - normals[..., :2].square().sum(-1, keepdim=True)).sqrt()
        return torch.cat([normals[..., :2], z], dim=-1), usable
    return functional.normalize(normals, dim=-1), usable


def dn_consistency(
    depth: Float[Tensor, "h w"],
    alpha: Float[Tensor, "h w"],
    normals: Float[Tensor, "h w 3"],
    K: Float[Tensor, "3 3"],
    *,
    divide: bool = True,
    rebuild_z: bool = False,
    min_alpha: float = 0.5,
    mask: Bool[Tensor, "h w"] | None = None,
    weights: Float[Tensor, "h w"] | None = None,
) -> Float[Tensor, ""]:
    """Computes 1 − N_rendered · N_depth, summed over valid pixels and divided by the number of all pixels.

    Neither side is detached. A pixel is valid if both normals exist and alpha exceeds ``min_alpha`` there and at its
    four neighbours, away from the border. Other pixels contribute nothing, so an empty image gives 0, and a small
    object has the same weight as its pixels in the colour loss.

    **Whether to divide.** The composited depth is D = A z̄ with A = Σ w and the mean depth z̄ along the ray. Where A
    varies, D bends with it: on a wall seen straight on whose A falls off, D describes a ramp, and the loss would turn
    Gaussians to correct an error of opacity. Divide (the default) for objects with soft or masked borders, thin parts
    and early stages; z̄ is noisy near A = 0, hence ``min_alpha``. Do not divide to reproduce SuGaR, or for closed
    scenes, where A is near 1 and the loss may close the remaining holes.

    Args:
        depth: Σ w z along the camera's axis, over 0.
        alpha: Σ w.
        normals: Σ w n of :func:`facing_normals`.
        rebuild_z: see :func:`unit_normals`; SuGaR uses True, with ``divide`` False.
        min_alpha: accumulation that a pixel must exceed, 0 to 1.
    """
    kernels = None if rebuild_z else choose_kernels(PLANES, depth, alpha, normals)
    if kernels is not None:
        weights = torch.ones_like(depth) if weights is None else weights
        weights = weights if mask is None else weights * mask
        return DnConsistency.apply(depth, alpha, normals, weights, K, divide, max(min_alpha, 1e-6), kernels)  # type: ignore[return-value]
    used = expected_depth(depth, alpha, divide=divide, min_alpha=min_alpha)
    # Depth 0 at thin pixels makes them and their neighbours invalid.
    from_depth, valid = normals_from_depth(used, K)
    rendered, usable = unit_normals(normals, rebuild_z=rebuild_z)
    valid = valid & usable
    if mask is not None:
        valid = valid & mask
    error = 1 - (rendered * from_depth).sum(-1)
    error = error if weights is None else weights * error
    return torch.where(valid, error, 0).sum() / max(1, depth.numel())


MIN_COSINE = 0.02
"""Where the composited plane is closer to edge-on than this, a ray has no depth."""


def plane_distances(
    facing: Float[Tensor, "gaussians 3"], means: Float[Tensor, "gaussians 3"], viewmat: Float[Tensor, "4 4"]
) -> Float[Tensor, " gaussians"]:
    """Returns signed distances n · μ of the Gaussians' planes from the camera, scene units, ≤ 0, from
    :func:`facing_normals`."""
    return (facing * to_camera(means, viewmat)).sum(1)


def facing_planes(gaussians: Gaussians, viewmat: Float[Tensor, "4 4"]) -> Float[Tensor, "gaussians 4"]:
    """Returns normals by :func:`facing_normals`, and as the last column distances by :func:`plane_distances`."""
    kernels = choose_kernels(PLANES, gaussians.means, gaussians.quats, viewmat)
    if kernels is not None:
        return FacingPlanes.apply(gaussians.means, gaussians.quats, gaussians.scales, viewmat, kernels)  # type: ignore[return-value]
    facing = facing_normals(gaussians.normals(), gaussians.means, viewmat)
    return torch.cat([facing, plane_distances(facing, gaussians.means, viewmat)[:, None]], dim=1)


def plane_depth(
    normals: Float[Tensor, "h w 3"], distances: Float[Tensor, "h w"], K: Float[Tensor, "3 3"]
) -> Float[Tensor, "h w"]:
    """Computes the depth at which each ray meets the planes of the Gaussians; differentiable.

    A flat Gaussian is a disc, and the depth of its centre is wrong by up to its size wherever it is tilted. In the
    camera's frame let n be the unit normal of a Gaussian, facing the camera, μ its centre, d = n · μ, and
    r = K⁻¹ (u, v, 1). The ray meets the plane at the depth z = d / (n · r). Composited like colours, N = Σ w n and
    D = Σ w d have the quotient

        D / (N · r) = Σ w (n · r) z / Σ w (n · r),

    the mean of the intersections, weighted by w and by the cosine to the ray: exact if the Gaussians along the ray lie
    in one plane, independent of the accumulation, and least affected by Gaussians seen edge-on. This is the unbiased
    depth of PGSR (Chen et al. 2024).

    It is 0, without gradient, where the plane is seen within :data:`MIN_COSINE` of edge-on or from behind, and where
    nothing is drawn.

    Args:
        normals: N = Σ w n over 0, camera frame (OpenCV axes).
        distances: D = Σ w d over 0, scene units.
    """
    kernels = choose_kernels(PLANES, normals, distances)
    if kernels is not None:
        return PlaneDepth.apply(normals, distances, K, MIN_COSINE, kernels)  # type: ignore[return-value]
    h, w = distances.shape
    x, y = pixel_rays((h, w), K)
    towards = normals[..., 0] * x + normals[..., 1] * y[:, None] + normals[..., 2]
    with torch.no_grad():
        long = (1 + x.square() + y[:, None].square()).sqrt() * normals.norm(dim=-1)
        seen = (towards < -MIN_COSINE * long) & (distances < 0) & torch.isfinite(distances)
    # Sets the others to 1 before the division, so that they cannot produce NaN gradients.
    return torch.where(seen, torch.where(seen, distances, 1) / torch.where(seen, towards, 1), 0)
