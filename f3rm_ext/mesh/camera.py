"""One pinhole camera in numpy: projection, and rays through pixels."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras


class Camera(NamedTuple):
    """A pinhole camera, OpenCV axes."""

    rotation: Float[np.ndarray, "3 3"]
    """World to camera."""
    center: Float[np.ndarray, "3"]
    """Position of the camera, world frame."""
    focal: Float[np.ndarray, "2"]
    """Horizontal and vertical focal length, pixels."""
    middle: Float[np.ndarray, "2"]
    """Principal point, pixels."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""

    @classmethod
    def of(cls, views: PinholeCameras, index: int, frame: CaptureFrame | None = None) -> "Camera":
        """Returns one of several cameras; with a frame, those are of the scene and the result is of the capture."""
        viewmat, K = views.viewmats[index].double().numpy(), views.Ks[index].double().numpy()
        rotation, center = viewmat[:3, :3], -viewmat[:3, :3].T @ viewmat[:3, 3]
        if frame is not None:
            rotation, center = rotation @ frame.rotation, frame.to_capture(center)
        return cls(rotation, center, K[[0, 1], [0, 1]], K[:2, 2], int(views.widths[index]), int(views.heights[index]))

    def project(self, points: Float[np.ndarray, "n 3"]) -> tuple[Float[np.ndarray, "n 2"], Float[np.ndarray, " n"]]:
        """Returns where points are in the picture, pixels, and their depth; behind the camera it is ≤ 0."""
        local = (points - self.center) @ self.rotation.T
        depth = local[:, 2]
        return local[:, :2] / np.maximum(depth, 1e-9)[:, None] * self.focal + self.middle, depth

    def rays(
        self, places: Float[np.ndarray, "*shape 2"]
    ) -> tuple[Float[np.ndarray, "3"], Float[np.ndarray, "*shape 3"]]:
        """Returns the origin and the directions of rays through places in the picture; directions have depth 1."""
        ahead = (places - self.middle) / self.focal
        return self.center, np.concatenate([ahead, np.ones_like(ahead[..., :1])], axis=-1) @ self.rotation

    def pixel_rays(self, across: float = 0.5, down: float = 0.5) -> tuple[np.ndarray, Float[np.ndarray, "h w 3"]]:
        """Returns :meth:`rays` through one place in every pixel, its centre unless said otherwise."""
        x = (np.arange(self.width) + across - self.middle[0]) / self.focal[0]
        y = (np.arange(self.height) + down - self.middle[1]) / self.focal[1]
        right, below, ahead = self.rotation
        return self.center, x[:, None] * right + (y[:, None] * below + ahead)[:, None]
