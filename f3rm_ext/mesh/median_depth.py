"""Median depth of splats, from a histogram of depth in every pixel.

The mean depth of a pixel, Σ w z / Σ w, lies between two surfaces where both are seen, and is drawn away by whatever is
faintly seen behind. The median stays on the surface that holds half of the weight.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.regularization.frames import to_camera
from f3rm_ext.splat.rendering import RenderSettings, SplatScene, composite

BINS = 64
"""Bins of depth, in equal ratios. Twice as many channels are composited."""
_OUTER = 0.01
"""Share of the mean depths that may lie beyond the first and last bin on either side."""
_MARGIN = 1.2


def median_depth(
    scene: SplatScene, view: PinholeCameras, mean: Float[Tensor, "h w"], settings: RenderSettings
) -> Float[Tensor, "h w"]:
    """Returns the median depth along the camera's axis, scene units; 0 where nothing is seen.

    The weights of the Gaussians are composited into bins of depth. The result is the mean depth of the bin in which
    half of the weight is reached, and of its neighbours, so that it is finer than a bin.

    Args:
        scene: the Gaussians.
        view: one camera.
        mean: the mean depth, from which the range of the bins is taken; 0 where nothing is seen.
        settings: of the rasteriser.
    """
    seen = mean[mean > 0]
    if not len(seen):
        return torch.zeros_like(mean)
    # Not torch.quantile, which refuses more than 16 million values.
    order, edge = seen.sort().values, int(_OUTER * (len(seen) - 1))
    low, high = float(order[edge]) / _MARGIN, float(order[len(seen) - 1 - edge]) * _MARGIN
    depth = to_camera(scene.gaussians.means, view.viewmats[0])[:, 2]
    edges = torch.logspace(math.log10(low), math.log10(high), BINS - 1, device=depth.device)
    mine = functional.one_hot(torch.bucketize(depth.contiguous(), edges), BINS).to(depth)
    both = composite(scene, view, torch.cat([mine, mine * depth[:, None]], dim=1), settings)
    weight, weighted = both.split(BINS, dim=-1)
    half = 0.5 * weight.sum(dim=-1, keepdim=True)
    middle = (weight.cumsum(dim=-1) >= half).int().argmax(dim=-1, keepdim=True)
    near = (torch.arange(BINS, device=depth.device) - middle).abs() <= 1
    total = (weight * near).sum(dim=-1)
    return torch.where(total > 0, (weighted * near).sum(dim=-1) / total.clamp_min(1e-12), 0)
