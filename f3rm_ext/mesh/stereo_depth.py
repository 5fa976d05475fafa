"""Stereo of the photos in place of rendered depth, where the photos are sure.

Rendered depth covers every pixel, but is off where colours say little of it: dark floors, faint walls, the insides of
shelves. Stereo is precise where there is any texture, and finds nothing elsewhere.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float32, Int
from numpy.lib.stride_tricks import sliding_window_view

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.stereo.agreement import agreeing_depth
from f3rm_ext.data.stereo.sweep import AGREEING
from f3rm_ext.mesh.views import SceneViews, StoredViews, stored_views

MIN_VIEWS = 2
"""Views whose stereo must agree on a pixel, itself included."""
FAR_OFF = 0.01
"""Difference beyond which stereo replaces rendered depth, as a share of it: within that, rendered depth is smoother."""
SMOOTHED_PX = 5
"""Side of the square of pixels whose median is taken, odd: stereo is as noisy as it is unbiased."""


def take_stereo(
    stored: StoredViews, stereo: SceneViews, on_progress: Callable[[int], None] = lambda done: None
) -> float:
    """Replaces the depth of views by that of stereo where the stereo of several views agrees, and differs from it.

    Args:
        stereo: the same views with stereo depth; sizes and intrinsics may be others, and none is above 0 where stereo
            finds nothing.
        on_progress: called with the number of views whose stereo is done.

    Returns:
        The share of all pixels that were replaced.
    """
    replaced_count = pixels = 0
    with stored_views(stereo, on_progress) as stereo_views:
        for index in range(len(stored)):
            sure = _smooth(agreeing_depth(stereo_views, index, MIN_VIEWS, AGREEING))
            own = np.asarray(stored.depth(index))
            rows, columns = (
                _nearest(stored.cameras, stereo_views.cameras, index, axis, own.shape[1 - axis], sure.shape[1 - axis])
                for axis in (1, 0)
            )
            measured = sure[rows[:, None], columns]
            replaced = (measured > 0) & (np.abs(measured - own) > FAR_OFF * own)
            stored.set_depth(index, np.where(replaced, measured, own))
            replaced_count, pixels = replaced_count + int(replaced.sum()), pixels + measured.size
    return replaced_count / max(pixels, 1)


def _smooth(depth: Float32[np.ndarray, "h w"]) -> Float32[np.ndarray, "h w"]:
    """The median of the pixels around each that have depth; 0 stays 0."""
    known = np.where(depth > 0, depth, np.float32(np.nan))
    around = sliding_window_view(
        np.pad(known, SMOOTHED_PX // 2, constant_values=np.nan), (SMOOTHED_PX, SMOOTHED_PX)
    ).reshape(*depth.shape, -1)
    smoothed = np.zeros_like(depth)
    smoothed[depth > 0] = np.nanmedian(around[depth > 0], axis=1)
    return smoothed


def _nearest(
    to: PinholeCameras, of: PinholeCameras, index: int, axis: int, size: int, limit: int
) -> Int[np.ndarray, " size"]:
    """The columns (axis 0) or rows (axis 1) of one camera that show the same rays as those of another at its place."""
    K, other = to.Ks[index].double().numpy(), of.Ks[index].double().numpy()
    along = (np.arange(size) + 0.5 - K[axis, 2]) / K[axis, axis]
    return np.floor(along * other[axis, axis] + other[axis, 2]).astype(int).clip(0, limit - 1)
