"""Positions from EXIF: they give a capture its size in metres and its direction of north and up."""

from typing import Any

import numpy as np

from f3rm_ext.sfm.database import FeatureDatabase, colmap

LEAST_EXTENT_M = 30.0
"""GPS of phones and drones is off by metres: positions that lie closer together say nothing."""
_MOST_ERROR_M = 10.0
_LEAST_PHOTOS = 3


def align_with_gps(model: Any, database: FeatureDatabase) -> float | None:
    """Moves, turns and scales a model so that x is east, y north and z up, in metres from the first photo.

    The shape of the model does not change: matches are more exact than GPS.

    Args:
        model: a ``pycolmap.Reconstruction``, changed in place.
        database: has the positions that COLMAP read from EXIF.

    Returns:
        The median distance of cameras from their GPS positions, m; None where fewer than three photos have positions,
        or all lie within :data:`LEAST_EXTENT_M`, and nothing was changed.
    """
    pycolmap = colmap()
    names, places = [], []
    with database.opened() as opened:
        of_image = {prior.corr_data_id.id: prior for prior in opened.read_all_pose_priors() if prior.has_position()}
        for number in model.reg_image_ids():
            prior = of_image.get(number)
            if prior is not None and prior.coordinate_system == pycolmap.PosePriorCoordinateSystem.WGS84:
                names.append(model.image(number).name)
                places.append(np.asarray(prior.position, dtype=np.float64).reshape(3))
    if len(names) < _LEAST_PHOTOS:
        return None
    degrees = np.nan_to_num(np.array(places))
    metres = np.asarray(pycolmap.GPSTransform().ellipsoid_to_enu(degrees, *degrees[0])).reshape(-1, 3)
    if np.ptp(metres[:, :2], axis=0).max() < LEAST_EXTENT_M:
        return None
    options = pycolmap.RANSACOptions(max_error=_MOST_ERROR_M)
    moved = pycolmap.align_reconstruction_to_locations(model, names, metres, _LEAST_PHOTOS, options)
    if moved is None:
        return None
    model.transform(moved)
    centres = np.array([model.find_image_with_name(name).projection_center() for name in names])
    return float(np.median(np.linalg.norm(centres - metres, axis=1)))
