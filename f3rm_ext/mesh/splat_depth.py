"""Depth of splats: the median of each pixel, and the depth on the planes of those Gaussians at which a ray stops.

The mean depth of a pixel, Σ w z / Σ w, lies between two surfaces where both are seen, as it does at the edge of an
object or on a leaf, and is drawn away by whatever is faintly seen behind.

The median, from a histogram of depth in every pixel, stays on the surface that holds half of the weight.

For flat Gaussians the mean over all planes that a ray meets (:mod:`f3rm_ext.splat.regularization.normals`) is smooth,
and right on a wall. Elsewhere a ray first finds the plane at which two fifths of its light are stopped (RaDe-GS takes
half, Zhang et al. 2024), and then the mean of the planes near it. A little less than half keeps more of what is thin.
The depth of a plane is z = d / (n · r), but not farther from the Gaussian's centre than three of its longest standard
deviations; where the plane faces away, it is that of the centre. This is no sum over Gaussians, so rasterisers cannot
composite it: it is computed on the CPU, without gradients.
"""

import math
from typing import no_type_check

import numba
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize.camera import TILE_PX, Camera
from f3rm_ext.splat.rasterize.compositing import (
    FLAGS,
    ONE,
    PATIENCE,
    PIXEL_X,
    PIXEL_Y,
    PIXELS,
    ZERO,
    pixels_within,
    read_gaussian,
    weigh,
)
from f3rm_ext.splat.rasterize.projection import project
from f3rm_ext.splat.rasterize.tiles import bin_gaussians
from f3rm_ext.splat.regularization.frames import to_camera
from f3rm_ext.splat.regularization.normals import facing_normals, plane_distances
from f3rm_ext.splat.rendering import SplatScene, composite

BINS = 64
"""Bins of depth, in equal ratios. Twice as many channels are composited."""
_OUTER = 0.01
"""Share of the mean depths that may lie beyond the first and last bin on either side."""
_MARGIN = 1.2


def median_depth(scene: SplatScene, view: PinholeCameras, mean: Float[Tensor, "h w"]) -> Float[Tensor, "h w"]:
    """Returns the median depth along the camera's axis, scene units; 0 where nothing is seen.

    The weights of the Gaussians are composited into bins of depth, whose range is that of the mean depth (0 where
    nothing is seen). The result is the mean depth of the bin in which half of the weight is reached, and of its
    neighbours, so that it is finer than a bin.
    """
    known = mean[mean > 0]
    if not len(known):
        return torch.zeros_like(mean)
    # Not torch.quantile, which refuses more than 16 million values.
    order, edge = known.sort().values, int(_OUTER * (len(known) - 1))
    low, high = float(order[edge]) / _MARGIN, float(order[len(known) - 1 - edge]) * _MARGIN
    depth = to_camera(scene.gaussians.means, view.viewmats[0])[:, 2]
    edges = torch.logspace(math.log10(low), math.log10(high), BINS - 1, device=depth.device)
    bins = torch.bucketize(depth.contiguous(), edges)
    columns, values = torch.stack([bins, BINS + bins], dim=1), torch.stack([torch.ones_like(depth), depth], dim=1)
    both = composite(scene, view, depth.new_zeros(len(depth), 2 * BINS).scatter_(1, columns, values))
    weight, weighted = both.split(BINS, dim=-1)
    half = 0.5 * weight.sum(dim=-1, keepdim=True)
    middle = (weight.cumsum(dim=-1) >= half).int().argmax(dim=-1, keepdim=True)
    near = (torch.arange(BINS, device=depth.device) - middle).abs() <= 1
    total = (weight * near).sum(dim=-1)
    return torch.where(total > 0, (weighted * near).sum(dim=-1) / total.clamp_min(1e-12), 0)


WINDOW = 0.12
"""Planes that count, by their distance from the first one (see :data:`STOPPED`), as a share of its depth."""
STOPPED = 0.4
"""Accumulation at which a ray has found its first plane; a ray that gathers less has no depth."""
_REACH = 3.0
"""Standard deviations from its centre up to which a Gaussian has a plane."""
_LEAST_COSINE = 1e-3
"""Weight of planes seen edge-on."""


def front_plane_depth(scene: SplatScene, view: PinholeCameras) -> Float[Tensor, "h w"]:
    """Returns the depth along the camera's axis, scene units, on the CPU; 0 where too little of the light stops."""
    camera, shapes = scene.camera(view.to("cpu")), scene.shapes().map(lambda value: value.detach().cpu().float())
    bins = bin_gaussians(project(shapes, camera), camera.size)
    depth = np.zeros((camera.height, camera.width), np.float32)
    planes = _planes(scene, shapes, camera, torch.from_numpy(bins.order)).numpy()
    intersections = bins.tile_order(), bins.starts, bins.ranks, bins.geometry
    _march(*intersections, planes, bins.columns, camera.K.numpy(), depth)
    return torch.from_numpy(depth)


def _planes(
    scene: SplatScene, shapes: Ellipsoids, camera: Camera, order: Int[Tensor, " ranks"]
) -> Float[Tensor, "ranks 6"]:
    """Normal (x, y, z; camera frame), distance of the plane, depth of the centre, and reach of some Gaussians."""
    means, sizes, viewmat = shapes.means[order], shapes.sizes[order], camera.viewmat
    facing = facing_normals(scene.gaussians.normals().detach().cpu().float()[order], means, viewmat)
    distances, depths = plane_distances(facing, means, viewmat), to_camera(means, viewmat)[:, 2]
    return torch.cat([facing, torch.stack([distances, depths, _REACH * sizes.amax(dim=1)], dim=1)], dim=1)


@no_type_check
@numba.njit(parallel=True, fastmath=FLAGS, cache=True, nogil=True, error_model="numpy")
def _march(order, starts, ranks, geometry, planes, columns, K, depth):
    """Computes the depth of every pixel.

    The mean needs to know its window before it begins: the first turn finds the crossing at which the ray has lost
    enough light, the second averages the crossings near it. Keeping them instead would take memory without a bound.

    Arguments are those of :func:`~f3rm_ext.splat.rasterize.compositing.forward`, and :func:`_planes` of each rank.
    """
    height, width = depth.shape
    window, stopped, least = np.float32(WINDOW), np.float32(STOPPED), np.float32(_LEAST_COSINE)
    for task in numba.prange(order.size):
        tile = order[task]
        left, top = (tile % columns) * TILE_PX, (tile // columns) * TILE_PX
        rays_x = (np.float32(left) + PIXEL_X - K[0, 2]) / K[0, 0]
        rays_y = (np.float32(top) + PIXEL_Y - K[1, 2]) / K[1, 1]
        through, weights = np.empty(PIXELS, np.float32), np.empty(PIXELS, np.float32)
        final, last = np.empty(PIXELS, np.float32), np.empty(PIXELS, np.int32)  # `weigh` writes them
        middle, total, weighted = (
            np.zeros(PIXELS, np.float32),
            np.zeros(PIXELS, np.float32),
            np.zeros(PIXELS, np.float32),
        )
        for turn in range(2):
            for p in range(PIXELS):
                inside = (left + PIXEL_X[p] < width) & (top + PIXEL_Y[p] < height)
                through[p] = ONE if inside & (turn == 0 or middle[p] > ZERO) else ZERO
                final[p], last[p] = ONE, -1
            for k in range(starts[tile], starts[tile + 1]):
                rank = ranks[k]
                x, y, a, b, c, opacity = read_gaussian(geometry, rank, left, top)
                normal_x, normal_y, normal_z = planes[rank, 0], planes[rank, 1], planes[rank, 2]
                distance, center = planes[rank, 3], planes[rank, 4]
                near, far = center - planes[rank, 5], center + planes[rank, 5]
                for block in range(2):
                    lo, hi = pixels_within(x, y, geometry, rank, block)
                    if lo == hi:
                        continue
                    weigh(lo, hi, x, y, a, b, c, opacity, np.int32(0), through, final, last, weights)
                    for p in range(lo, hi):
                        cosine = normal_x * rays_x[p] + normal_y * rays_y[p] + normal_z
                        # A plane seen edge-on or from behind has no crossing, or one far outside of its Gaussian.
                        crossing = min(max(distance / cosine if cosine < ZERO else center, near), far)
                        if turn == 0:
                            reached = (weights[p] > ZERO) & (ONE - through[p] >= stopped)
                            middle[p] = crossing if reached else middle[p]
                            through[p] = ZERO if reached else through[p]
                        else:
                            counts = abs(crossing - middle[p]) <= window * middle[p]
                            weight = weights[p] * max(-cosine, least) if counts else ZERO
                            total[p] += weight
                            weighted[p] += weight * crossing
                if k % PATIENCE == 0 and through.sum() == ZERO:
                    break
        for p in range(PIXELS):
            row, column = top + np.int64(PIXEL_Y[p]), left + np.int64(PIXEL_X[p])
            if row < height and column < width:
                depth[row, column] = weighted[p] / total[p] if total[p] > ZERO else ZERO
