"""Where the viewer opens: at the training camera that looks best at what all of them look at."""

from dataclasses import dataclass
from math import atan, radians
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.viewer.viewer_elements import ViewerControl

from f3rm_ext import compat

if TYPE_CHECKING:
    from nerfstudio.viewer.viewer import Viewer

_PARALLEL = 0.01
"""Mean squared sine between optical axes and their common direction, below which where they meet means nothing."""
_PER_DOUBLING_RAD = 0.05
"""How much farther off the centre a camera may look to be preferred to one at double or half the usual distance."""
_FOV_RANGE_RAD = (radians(20.0), radians(100.0))
"""Fields of view a page can show without looking odd."""


@dataclass(frozen=True)
class FirstView:
    """What a page of the viewer shows first."""

    index: int
    """Which of the training cameras."""
    c2w: Float[np.ndarray, "3 4"]
    """Its pose in the scene frame, OpenGL axes."""
    fov_rad: float
    """Vertical field of view."""
    distance: float
    """To what it looks at, which the view is turned about; scene units, > 0."""


def first_view(cameras: Cameras) -> FirstView:
    """The view that looks most centrally at where the optical axes meet, from about the usual distance.

    Where they meet nowhere in front of most cameras (they look around, or all in one direction), the first camera's.

    Args:
        cameras: training cameras, of shape (cams,), at least one.
    """
    c2w = cameras.camera_to_worlds.detach().cpu().double().numpy()
    places, axes = c2w[:, :3, 3], -c2w[:, :3, 2]
    index, distance = 0, float(np.median(np.linalg.norm(places - places.mean(axis=0), axis=1)))
    focus = _meeting_point(places, axes)
    if focus is not None:
        ways = focus - places
        distances = np.linalg.norm(ways, axis=1)
        depths = (ways * axes).sum(axis=1)
        is_ahead = depths > 0.0
        if is_ahead.mean() > 0.5:
            off_centre_rad = np.arccos(np.clip(depths / distances.clip(1e-9), -1.0, 1.0))
            unusual = np.abs(np.log2(distances.clip(1e-9) / np.median(distances)))
            cost = np.where(is_ahead, off_centre_rad + _PER_DOUBLING_RAD * unusual, np.inf)
            index = int(cost.argmin())
            distance = float(depths[index])
    height, fy = float(cameras.height[index]), float(cameras.fy[index])
    fov_rad = float(np.clip(2.0 * atan(0.5 * height / fy), *_FOV_RANGE_RAD))
    return FirstView(index, c2w[index, :3, :4], fov_rad, distance if distance > 1e-3 else 1.0)


def _meeting_point(
    places: Float[np.ndarray, "cams 3"], axes: Float[np.ndarray, "cams 3"]
) -> Float[np.ndarray, "3"] | None:
    """The point that is nearest to all optical axes, if there is one."""
    across = np.eye(3) - axes[:, :, None] * axes[:, None, :]
    total = across.mean(axis=0)
    if not np.isfinite(total).all() or np.linalg.eigvalsh(total)[0] < _PARALLEL:
        return None
    return np.linalg.solve(total, (across @ places[:, :, None]).mean(axis=0)[:, 0])


class FirstViewControl(ViewerControl):
    """A control of the viewer by which pages open on a training view."""

    def _setup(self, viewer: "Viewer") -> None:
        super()._setup(viewer)
        cameras = compat.viewer_cameras(viewer)
        if cameras is not None:
            view = first_view(cameras)
            compat.viewer_open_at(viewer, view.index, view.c2w, view.fov_rad, view.distance)
