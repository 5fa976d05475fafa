"""Cameras from ray maps: centres, rotations and, if wanted, intrinsics.

Every ray of a pinhole camera leaves its centre C in the direction d ∝ R K⁻¹ u, where u is the pixel. With K known, R
solves an orthogonal Procrustes problem. With K unknown, A = R K⁻¹ is a homography between pixels and directions, and
since K⁻¹ is upper triangular, A splits into both by QR with a positive diagonal (Hartley and Zisserman 2004, 6.2).
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.sfm.cameras import CameraSet
from f3rm_ext.sfm.rays import cell_centers, map_points

Unknown = Literal["focal", "all"]
"""Intrinsics to recover: focal lengths, with the principal point in the middle of the image, or that point, too.
Noise of the rays turns the camera several times as much if the principal point is free."""
_HYPOTHESES = 96
_RAYS_PER_HYPOTHESIS = 4
_JUDGES = 2048
"""Largest number of rays by which hypotheses are judged."""
_INLIER_SIGMAS = 2.5
_SIGMAS_PER_MEDIAN = 1.4826


def procrustes(local: Float[Tensor, "cams rays 3"], world: Float[Tensor, "cams rays 3"]) -> Float[Tensor, "cams 3 3"]:
    """Returns the rotations R for which R · local is nearest to world, both as unit vectors (Kabsch 1976)."""
    unit_local, unit_world = (functional.normalize(rays, dim=-1) for rays in (local, world))
    U, _, Vh = torch.linalg.svd(unit_world.mT @ unit_local)
    signs = torch.ones_like(U[:, 0])
    # Where the best orthogonal matrix is a reflection, the direction that matters least is turned round.
    signs[:, 2] = torch.linalg.det(U @ Vh).sign()
    return (U * signs[:, None]) @ Vh


def find_calibration(A: Float[Tensor, "3 3"]) -> Float[Tensor, "3 3"]:
    """Returns the calibration matrix K of A ∝ R K⁻¹, with 1 as its last entry; A has a positive determinant.

    >>> K = torch.tensor([[2.0, 0.0, 0.3], [0.0, 3.0, -0.2], [0.0, 0.0, 1.0]])
    >>> torch.allclose(find_calibration(5 * torch.linalg.inv(K)), K, atol=1e-5)
    True
    """
    U = torch.linalg.qr(A).R
    K = torch.linalg.inv(U.diagonal().sign()[:, None] * U)
    return K / K[2, 2]


def _find_focals(A: Float[Tensor, "3 3"]) -> Float[Tensor, "2"]:
    """Focal lengths of A ∝ R diag(1/f_x, 1/f_y, 1), whose columns should be orthogonal.

    The third column, the direction through the principal point, is known best: the others lose their parts along it,
    which are noise, so that this is an orthogonal × lower split.
    """
    Q, _ = torch.linalg.qr(A.flip(1))
    x, y, z = (Q.flip(1) * A).sum(dim=0).abs()
    return torch.stack([z / x, z / y])


def fit_homography(pixels: Float[Tensor, "rays 3"], world: Float[Tensor, "rays 3"]) -> Float[Tensor, "3 3"]:
    """Returns the A with world ∝ A · pixels, by least median of squares (Rousseeuw 1984) and a fit to the inliers.

    Nothing is divided by a third coordinate, so rays in any direction count. Up to half of the rays may be wrong.

    Args:
        pixels: homogeneous; coordinates of order 1.

    Returns:
        A with a positive determinant, Frobenius norm 1.
    """
    pixels, world = (functional.normalize(rays, dim=-1) for rays in (pixels, world))
    generator = torch.Generator().manual_seed(0)
    count = len(pixels)
    judges = torch.randperm(count, generator=generator)[:_JUDGES] if count > _JUDGES else torch.arange(count)
    some_pixels, some_world = pixels[judges.to(pixels.device)], world[judges.to(world.device)]
    order = torch.rand(_HYPOTHESES, len(judges), generator=generator)
    # The places of the largest of random numbers: each hypothesis draws rays without replacement.
    picked = order.topk(_RAYS_PER_HYPOTHESIS, dim=1).indices.to(pixels.device)
    candidates = _least_squares(some_pixels[picked], some_world[picked])
    candidates = torch.cat([candidates, _least_squares(some_pixels[None], some_world[None])])
    medians = _sines(candidates, some_pixels, some_world).square().median(dim=1).values
    best = int(medians.argmin())
    # Least median of squares (Rousseeuw and Leroy 1987), whose scale is corrected for few rays.
    sigma = _SIGMAS_PER_MEDIAN * medians[best].sqrt() * (1 + 5 / max(len(some_pixels) - _RAYS_PER_HYPOTHESIS, 1))
    inliers: Bool[Tensor, " rays"] = _sines(candidates[best : best + 1], pixels, world)[0] <= _INLIER_SIGMAS * sigma
    if int(inliers.sum()) > _RAYS_PER_HYPOTHESIS:
        pixels, world = pixels[inliers], world[inliers]
        A = _least_squares(pixels[None], world[None])[0]
    else:  # exact data: the residuals are rounding
        A = candidates[best]
    return A if ((pixels @ A.T) * world).sum() > 0 else -A


def _least_squares(
    pixels: Float[Tensor, "fits rays 3"], world: Float[Tensor, "fits rays 3"]
) -> Float[Tensor, "fits 3 3"]:
    """The A of norm 1 that makes Σ |world × A · pixels|² smallest, for each fit."""
    x, y, z = world.unbind(-1)
    zero = torch.zeros_like(x)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).unflatten(-1, (3, 3))
    rows = (cross[..., :, :, None] * pixels[..., None, None, :]).flatten(-2).flatten(1, 2)
    if pixels.shape[1] > 3 * _RAYS_PER_HYPOTHESIS:
        # R has the singular values and right vectors of the rows, and is 9 × 9 however many rays there are.
        rows = torch.linalg.qr(rows, mode="r").R
    return torch.linalg.svd(rows).Vh[:, -1].unflatten(-1, (3, 3))


def _sines(
    A: Float[Tensor, "fits 3 3"], pixels: Float[Tensor, "rays 3"], world: Float[Tensor, "rays 3"]
) -> Float[Tensor, "fits rays"]:
    """Sines of the angles between the directions and their fits."""
    rays = functional.normalize(pixels @ A.mT, dim=-1)
    return torch.linalg.cross(rays, world.expand_as(rays)).norm(dim=-1)


def recover_cameras(
    maps: Float[Tensor, "cams 8 rows cols"],
    sizes_px: Float[Tensor, "cams 2"],
    intrinsics: tuple[Float[Tensor, "cams 2"], Float[Tensor, "cams 2"]] | Unknown = "focal",
) -> CameraSet:
    """Recovers cameras from their ray maps, in the maps' frame and scale. Computes in float64.

    A camera's centre is the mean of its rays' origins.

    Args:
        intrinsics: focal lengths and principal points in pixels, or which of them to find.
    """
    rows, cols = maps.shape[-2:]
    sizes_px = sizes_px.double()
    origins, endpoints = (points.flatten(1, 2) for points in map_points(maps.double()))
    centers = origins.mean(dim=1)
    world = endpoints - centers[:, None]
    pixels = cell_centers(sizes_px, rows, cols).flatten(1, 2)
    if isinstance(intrinsics, str):
        focals, principals = _find_intrinsics(pixels, world, sizes_px, intrinsics)
    else:
        focals, principals = (values.double() for values in intrinsics)
    plane = (pixels - principals[:, None]) / focals[:, None]
    rotations = procrustes(functional.pad(plane, (0, 1), value=1.0), world)
    return CameraSet(rotations, centers, focals, principals, sizes_px)


def _find_intrinsics(
    pixels: Float[Tensor, "cams rays 2"],
    world: Float[Tensor, "cams rays 3"],
    sizes_px: Float[Tensor, "cams 2"],
    unknown: Unknown,
) -> tuple[Float[Tensor, "cams 2"], Float[Tensor, "cams 2"]]:
    """Focal lengths and principal points in pixels."""
    half = sizes_px.amin(dim=1) / 2
    middle = sizes_px / 2
    plane = functional.pad((pixels - middle[:, None]) / half[:, None, None], (0, 1), value=1.0)
    fits = [fit_homography(*rays) for rays in zip(plane, world, strict=True)]
    if unknown == "focal":
        return torch.stack([_find_focals(fit) for fit in fits]) * half[:, None], middle
    calibrations = torch.stack([find_calibration(fit) for fit in fits])
    focals = calibrations.diagonal(dim1=1, dim2=2)[:, :2] * half[:, None]
    return focals, calibrations[:, :2, 2] * half[:, None] + middle
