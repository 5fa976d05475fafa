"""What one view shows of each Gaussian, and how deep its rays reach; on the CPU, not differentiable."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize.camera import Camera
from f3rm_ext.splat.rasterize.compositing import measure
from f3rm_ext.splat.rasterize.projection import project
from f3rm_ext.splat.rasterize.tiles import as_array, bin_gaussians


class Sight(NamedTuple):
    """The Gaussians in one view."""

    contributions: Float[Tensor, " gaussians"]
    """Sum of the compositing weights over the pixels."""
    peaks: Float[Tensor, " gaussians"]
    """Largest compositing weight at any pixel, 0 to 1."""
    gains: Float[Tensor, " gaussians"]
    """By how much the squared error of the picture would grow without the Gaussian; 0 without a photo."""
    median_depth: Float[Tensor, "h w"]
    """Depth along the camera's axis at which the accumulation reaches ½, scene units; 0 where it does not."""


@dataclass(frozen=True)
class Truth:
    """A photo to compare a view with; all tensors are on the CPU."""

    colors: Float[Tensor, "gaussians 3"]
    """Colours of the Gaussians in this view."""
    picture: Float[Tensor, "h w 3"]
    """The picture that they make, with its background."""
    photo: Float[Tensor, "h w 3"]
    """The photo that the picture is compared with."""
    share: Float[Tensor, "h w"] | None = None
    """Weights of the pixels, 0 to 1; None for 1 everywhere."""


@torch.no_grad()
def measure_sight(shapes: Ellipsoids, camera: Camera, truth: Truth | None = None) -> Sight:
    """Measures the Gaussians, float32 on the CPU, in one view; without the truth, nothing is known of gains."""
    (width, height), count = camera.size, len(shapes.means)
    if truth is None:
        nothing = torch.zeros(height, width, 3)
        truth = Truth(torch.zeros(count, 3), nothing, nothing, nothing[..., 0])
    share = torch.ones(height, width) if truth.share is None else truth.share
    projected = project(shapes, camera)
    bins = bin_gaussians(projected, camera.size)
    payload = as_array(torch.cat([truth.colors.float(), projected.depths[:, None]], dim=1))[bins.order]
    picture, photo, share = (as_array(value.float()) for value in (truth.picture, truth.photo, share))
    rows = np.zeros((len(bins.ranks), 3), dtype=np.float32)
    median = np.empty((height, width), dtype=np.float32)
    intersections = bins.tile_order(), bins.starts, bins.ranks, bins.geometry
    measure(*intersections, payload, picture, photo, share, bins.columns, rows, median)
    values = np.zeros((3, count), dtype=np.float32)
    drawn = np.flatnonzero(np.diff(bins.slot_starts))  # ranks of no tile would take the value of the next rank
    if len(drawn):
        by_rank, first = rows[bins.slots], bins.slot_starts[drawn]
        for column, reduce in enumerate((np.add, np.maximum, np.add)):
            values[column, bins.order[drawn]] = reduce.reduceat(by_rank[:, column], first)
    return Sight(*map(torch.from_numpy, (*values, median)))
