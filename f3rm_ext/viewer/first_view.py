"""The view that a page of the viewer opens on: a training camera that sees what most cameras look at."""

from dataclasses import dataclass
from math import atan, radians
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.viewer.viewer_elements import ViewerControl
from torch import Tensor

from f3rm_ext import compat
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.query.queryable import Editable
from f3rm_ext.viewer.passes import PicturePasses, next_divisor

if TYPE_CHECKING:
    from nerfstudio.viewer.viewer import Viewer

_PARALLEL = 0.01
"""Mean squared sine of the angles between the optical axes and their common direction, below which the axes count as
parallel."""
_PER_DOUBLING_RAD = 0.05
"""Cost of a camera at twice or half the median distance, as an angle by which it would look past the centre."""
_FOV_RANGE_RAD = (radians(20.0), radians(100.0))
"""Vertical fields of view that look natural on a page."""


@dataclass(frozen=True)
class FirstView:
    index: int
    c2w: Float[np.ndarray, "3 4"]
    """Pose of the camera in the scene frame, OpenGL axes."""
    fov_rad: float
    distance: float
    """Distance from the camera to the point that the view turns about, scene units, above 0."""


def first_view(cameras: Cameras, points: Float[Tensor, "points 3"] | None = None) -> FirstView:
    """Chooses the camera that looks most centrally at the point where the optical axes meet, from a typical distance.

    If the axes do not meet in front of most cameras (cameras look outwards, or all in one direction), the first camera
    is chosen, which turns about a place as deep as the points of the scene are, where these are known.
    """
    c2w = cameras.camera_to_worlds.detach().cpu().double().numpy()
    centers, axes = c2w[:, :3, 3], -c2w[:, :3, 2]
    index, distance = 0, float(np.median(np.linalg.norm(centers - centers.mean(axis=0), axis=1)))
    if points is not None:
        distance = PinholeCameras.of(cameras).median_depth(points.detach()) or distance
    focus = _meeting_point(centers, axes)
    if focus is not None:
        to_focus = focus - centers
        distances = np.linalg.norm(to_focus, axis=1)
        depths = (to_focus * axes).sum(axis=1)
        is_in_front = depths > 0.0
        if is_in_front.mean() > 0.5:
            off_axis_rad = np.arccos(np.clip(depths / distances.clip(1e-9), -1.0, 1.0))
            doublings = np.abs(np.log2(distances.clip(1e-9) / np.median(distances)))
            cost = np.where(is_in_front, off_axis_rad + _PER_DOUBLING_RAD * doublings, np.inf)
            index = int(cost.argmin())
            distance = float(depths[index])
    height, fy = float(cameras.height[index]), float(cameras.fy[index])
    fov_rad = float(np.clip(2.0 * atan(0.5 * height / fy), *_FOV_RANGE_RAD))
    return FirstView(index, c2w[index, :3, :4], fov_rad, distance if distance > 1e-3 else 1.0)


def _meeting_point(
    centers: Float[np.ndarray, "cams 3"], axes: Float[np.ndarray, "cams 3"]
) -> Float[np.ndarray, "3"] | None:
    """Returns the point with the least squared distance to the optical axes; None if they are parallel."""
    projections = np.eye(3) - axes[:, :, None] * axes[:, None, :]
    total = projections.mean(axis=0)
    if not np.isfinite(total).all() or np.linalg.eigvalsh(total)[0] < _PARALLEL:
        return None
    return np.linalg.solve(total, (projections @ centers[:, :, None]).mean(axis=0)[:, 0])


class FirstViewControl(ViewerControl):
    """Makes the pages of a viewer open on a training view and get slow pictures in passes, lets one close or move
    without freezing the others, and lets the process end while pages are open."""

    def _setup(self, viewer: "Viewer") -> None:
        super()._setup(viewer)
        compat.release_viewer_locks()
        compat.interrupt_at_calls()
        compat.render_in_passes(PicturePasses, next_divisor)
        compat.end_viewer_threads_at_exit(viewer)
        cameras = compat.viewer_cameras(viewer)
        if cameras is not None:
            model = viewer.pipeline.model
            view = first_view(cameras, model.points() if isinstance(model, Editable) else None)
            compat.viewer_start_view(viewer, view.index, view.c2w, view.fov_rad, view.distance)
