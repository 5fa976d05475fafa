"""The camera, and the constants all backends share."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

TILE_PX = 16
"""Side of the tiles at which Gaussians are cut off."""
MAX_ALPHA = 0.999
"""No Gaussian covers more of a pixel than this."""
MIN_ALPHA = 1.0 / 255.0
"""Less than this is skipped."""
MIN_TRANSMITTANCE = 1e-4
"""Compositing ends before a Gaussian that would leave no more than this."""
MARGIN = 0.15
"""The Jacobian of the projection is taken no further outside the picture than this part of its width and height."""
MIN_EXTENT = 0.01
"""Least value under the root that gives the longest axis from the mean variance, px⁴."""
MAX_RADIUS_PX = 2.0**30
"""Gaussians larger than this (or not finite) are not drawn."""
MIN_COMPENSATION = 1e-6
"""Compensations below this are 0, with no gradient."""


@dataclass
class Camera:
    """A pinhole camera and how it draws."""

    viewmat: Float[Tensor, "4 4"]
    """Scene to camera; the camera looks along +z, y points down."""
    K: Float[Tensor, "3 3"]
    """Focal lengths and principal point, pixels."""
    width: int
    height: int
    near_plane: float = 0.01
    """Gaussians whose centres are nearer are not drawn, scene units."""
    far_plane: float = 1e10
    """Nor those that are farther, scene units."""
    eps2d: float = 0.3
    """Added to the variances in the picture, px²."""
    radius_clip: float = 0.0
    """Gaussians with a radius of at most this are not drawn, pixels."""
    rows: tuple[int, int] | None = None
    """First row drawn and the one after the last; None for all. The first is a multiple of the tiles' side, so that
    tiles are those of the whole picture."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of what is drawn, pixels."""
        return self.width, self.height if self.rows is None else self.rows[1] - self.rows[0]

    def in_strip(self, means2d: Float[Tensor, "gaussians 2"]) -> Float[Tensor, "gaussians 2"]:
        """Centres in pixels from the first row drawn."""
        return means2d if self.rows is None else means2d - means2d.new_tensor([0.0, float(self.rows[0])])
