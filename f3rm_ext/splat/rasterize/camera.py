"""The camera, and constants that all backends share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

TILE_PX = 16
"""Side of the tiles at which Gaussians are cut off, pixels."""
MAX_ALPHA = 0.999
"""Upper limit of the opacity of a Gaussian at a pixel."""
MIN_ALPHA = 1.0 / 255.0
"""Gaussians with a lower opacity at a pixel are skipped there."""
MIN_TRANSMITTANCE = 1e-4
"""Compositing ends before a Gaussian that would lower the transmittance to this or less."""
MARGIN = 0.15
"""The Jacobian of the projection is taken at most this far outside the image, as a share of its width and height."""
MIN_EXTENT = 0.01
"""Lower limit of the radicand in the formula of the longest axis, px⁴."""
MAX_RADIUS_PX = 2.0**30
"""Gaussians that are larger, or not finite, are not rendered."""
MIN_COMPENSATION = 1e-6
"""Lower compensations are 0, without gradient."""

Composite = Callable[[Tensor], Tensor]
"""Composites values of Gaussians, (gaussians, channels), over 0 to rows of an image, (h, w, channels); no gradient."""
Strips = Callable[[tuple[int, int]], Composite]
"""Prepares some rows of an image: the first, a multiple of 16, and the row after the last."""


@dataclass
class Camera:
    """A pinhole camera and its settings of the rasteriser."""

    viewmat: Float[Tensor, "4 4"]
    """Scene to camera; OpenCV axes (z forward, y down)."""
    K: Float[Tensor, "3 3"]
    """Focal lengths and principal point, pixels."""
    width: int
    height: int
    near_plane: float = 0.01
    """Gaussians whose centres are nearer are not rendered, scene units."""
    far_plane: float = 1e10
    """Gaussians whose centres are farther are not rendered, scene units."""
    eps2d: float = 0.3
    """Added to the image-space variances, px²."""
    radius_clip: float = 0.0
    """Gaussians with a radius of at most this are not rendered, pixels."""


def shift_to_strip(means2d: Float[Tensor, "gaussians 2"], rows: tuple[int, int]) -> Float[Tensor, "gaussians 2"]:
    """Converts centres to pixels from the first row of a strip."""
    return torch.stack([means2d[:, 0], means2d[:, 1] - rows[0]], dim=-1) if rows[0] else means2d
