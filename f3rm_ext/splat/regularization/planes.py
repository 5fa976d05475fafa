"""Depth by intersecting each ray with the planes of the Gaussians, instead of the depth of their centres.

A flat Gaussian is a disc, and a ray meets it where it meets the disc's plane. The depth of its centre, which ordinary
compositing blends, is wrong by up to the size of the disc wherever the disc is tilted. In the camera's frame let n be
the unit normal of a Gaussian, facing the camera, μ its centre, d = n · μ the signed distance of its plane from the
camera (d ≤ 0), and r = K⁻¹ (u, v, 1) the ray of a pixel, scaled to r_z = 1. The ray meets the plane at the depth

    z = d / (n · r).

Any backend composites n and d like four more colours, N = Σ w n and D = Σ w d. Their quotient

    D / (N · r) = Σ w (n · r) z / Σ w (n · r)

is the mean of the intersections, weighted by w and by the cosine to the ray. It is exact if the Gaussians along the ray
lie in one plane, whatever their opacities, and it does not depend on the accumulation. Gaussians seen edge-on, whose
intersections are the least certain, count the least. This is the unbiased depth of PGSR (Chen et al. 2024). RaDe-GS
(Zhang et al. 2024) intersects as well but takes one of the intersections, the median along the ray; a median is no sum
and would need kernels of its own in every backend.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.splat.regularization.frames import pixel_rays, to_camera

MIN_COSINE = 0.02
"""Where the composited plane is closer to edge-on than this, a ray has no depth."""


def plane_distances(
    facing: Float[Tensor, "gaussians 3"], means: Float[Tensor, "gaussians 3"], viewmat: Float[Tensor, "4 4"]
) -> Float[Tensor, " gaussians"]:
    """Returns signed distances n · μ of the Gaussians' planes from the camera, scene units, ≤ 0.

    Args:
        facing: normals of :func:`~f3rm_ext.splat.regularization.normals.facing_normals`.
    """
    return (facing * to_camera(means, viewmat)).sum(1)


def plane_depth(
    normals: Float[Tensor, "h w 3"], distances: Float[Tensor, "h w"], K: Float[Tensor, "3 3"]
) -> Float[Tensor, "h w"]:
    """Computes the depth D / (N · r) along the camera's axis; differentiable.

    It is 0, without gradient, where the plane is seen within :data:`MIN_COSINE` of edge-on or from behind, and where
    nothing is drawn.

    Args:
        normals: N = Σ w n over 0, camera frame (OpenCV axes).
        distances: D = Σ w d over 0, scene units.
    """
    h, w = distances.shape
    x, y = pixel_rays(h, w, K)
    towards = normals[..., 0] * x + normals[..., 1] * y[:, None] + normals[..., 2]
    with torch.no_grad():
        long = (1 + x.square() + y[:, None].square()).sqrt() * normals.norm(dim=-1)
        seen = (towards < -MIN_COSINE * long) & (distances < 0) & torch.isfinite(distances)
    # Sets the others to 1 before the division, so that they cannot produce NaN gradients.
    return torch.where(seen, torch.where(seen, distances, 1) / torch.where(seen, towards, 1), 0)
