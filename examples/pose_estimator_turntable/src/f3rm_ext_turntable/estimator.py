"""Poses of photos that a fixed camera took of a thing on a turntable, at equal angles over one turn."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from f3rm_ext.errors import ConfigError
from f3rm_ext.sfm.estimators import PredictedPoses

ELEVATION = "TURNTABLE_ELEVATION_DEG"
"""Environment variable: how far above the turntable's plane the camera stands, seen from its middle, degrees."""


def orbit_viewmat(azimuth_rad: float, elevation_rad: float) -> Float[np.ndarray, "4 4"]:
    """Returns the pose of a camera at distance 1 from the origin that looks at it: world to camera, OpenCV axes, z up.

    >>> orbit_viewmat(0.0, 0.0) @ np.array([0.0, 0.0, 0.0, 1.0])
    array([0., 0., 1., 1.])
    """
    flat = math.cos(elevation_rad)
    centre = np.array([flat * math.cos(azimuth_rad), flat * math.sin(azimuth_rad), math.sin(elevation_rad)])
    right = np.array([-math.sin(azimuth_rad), math.cos(azimuth_rad), 0.0])
    rotation = np.stack([right, np.cross(-centre, right), -centre])  # rows: x right, y down, z forward
    viewmat = np.eye(4)
    viewmat[:3, :3], viewmat[:3, 3] = rotation, -rotation @ centre
    return viewmat + 0.0  # no -0.0


def predict(images: Sequence[Path], /) -> PredictedPoses:
    """Predicts one turn in equal steps; the unit is the distance of the camera from the middle.

    Raises:
        ConfigError: the elevation is not a number of degrees below 90.
    """
    text = os.environ.get(ELEVATION, "30")
    try:
        elevation_deg = float(text)
    except ValueError:
        elevation_deg = math.nan
    if not abs(elevation_deg) < 90:
        raise ConfigError(f"{ELEVATION} is {text!r}, but it has to be a number of degrees between -90 and 90.")
    step = 2 * math.pi / len(images)
    viewmats = {
        path.name: orbit_viewmat(number * step, math.radians(elevation_deg)) for number, path in enumerate(images)
    }
    return PredictedPoses(viewmats)
