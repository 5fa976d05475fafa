"""The camera, projected Gaussians, and constants that all backends share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float, Int
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


@dataclass(frozen=True)
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
    eps2d: float = 0.3
    """Added to the image-space variances, px²."""
    antialiased: bool = False
    """Lower opacities to compensate for the area that eps2d adds (Yu et al. 2024, Mip-Splatting)."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, pixels."""
        return self.width, self.height


class Projection(NamedTuple):
    """Gaussians projected to an image; zeros if not visible."""

    means2d: Float[Tensor, "gaussians 2"]
    """Centres, pixels."""
    conics: Float[Tensor, "gaussians 3"]
    """Inverse covariances (xx, xy, yy), 1/px²; of gsplat, anything if not visible."""
    depths: Float[Tensor, " gaussians"]
    """Along the camera's axis, scene units."""
    alphas: Float[Tensor, " gaussians"]
    """Opacities, compensated if the camera is antialiased."""
    reaches: Int[Tensor, "gaussians *axes"]
    """Radii, pixels; along x and y in gsplat 1.5."""

    @property
    def radii(self) -> Int[Tensor, " gaussians"]:
        """Three standard deviations along the longest axis, rounded up, pixels; 0 if not visible."""
        return scalar_radii(self.reaches)


def scalar_radii(reaches: Int[Tensor, "gaussians *axes"]) -> Int[Tensor, " gaussians"]:
    """Returns one radius for each Gaussian, 0 if it is not drawn, from one or from two."""
    return reaches if reaches.dim() == 1 else reaches.amax(dim=1) * (reaches.amin(dim=1) > 0)
