"""Cameras on an orbit around the table. Poses are camera to world, OpenGL (x right, y up, looking along -z)."""

import numpy as np
from jaxtyping import Float

HEIGHTS = (1.22, 1.5, 1.82)
"""Heights of the cameras, in turn, metres."""
RADII = (1.62, 1.66, 1.56)
"""Distances of the cameras from the axis of the room, in turn, metres."""


def look_at(eye: Float[np.ndarray, "3"], target: Float[np.ndarray, "3"]) -> Float[np.ndarray, "4 4"]:
    """Returns the pose of a camera at ``eye`` whose optical axis passes through ``target``.

    >>> look_at(np.array([0.0, -2.0, 0.0]), np.zeros(3))[:3, 2].tolist()  # z points away from the target
    [0.0, -1.0, 0.0]
    """
    back = eye - target
    back = back / np.linalg.norm(back)
    right = np.cross((0.0, 0.0, 1.0), back)
    right = right / np.linalg.norm(right)
    pose = np.eye(4)
    pose[:3, 0], pose[:3, 1], pose[:3, 2], pose[:3, 3] = right, np.cross(back, right), back, eye
    return pose


def orbit(number: int, target: Float[np.ndarray, "3"], seed: int) -> Float[np.ndarray, "cams 4 4"]:
    """Returns poses once around the room's axis with alternating heights, each a little off its regular place."""
    rng = np.random.default_rng([seed, 2])
    start = rng.uniform(0, 2 * np.pi)
    poses = []
    for k in range(number):
        angle = start + 2 * np.pi * (k + rng.uniform(-0.3, 0.3)) / number
        radius = RADII[k % 3] + rng.uniform(-0.08, 0.08)
        height = HEIGHTS[k % 3] + rng.uniform(-0.06, 0.06)
        poses.append(look_at(np.array([radius * np.cos(angle), radius * np.sin(angle), height]), target))
    return np.stack(poses)


def focal_length_px(fov_deg: float, width_px: int) -> float:
    """Returns the focal length in pixels for a horizontal field of view.

    >>> round(float(focal_length_px(90.0, 640)), 6)
    320.0
    """
    return width_px / 2 / np.tan(np.deg2rad(fov_deg) / 2)


def held_out_views(number: int, every: int) -> list[int]:
    """Returns the indices of the held-out views: the middle one of every ``every`` views, and at least one.

    >>> held_out_views(20, every=8)
    [4, 12]
    """
    return list(range(every // 2, number, every)) or [number - 1]
