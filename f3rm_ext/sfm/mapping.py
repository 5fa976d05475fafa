"""Cameras and points from matches by COLMAP's mappers, and their alignment with GPS positions from EXIF."""

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from f3rm_ext.sfm.database import Count, FeatureDatabase, colmap, translate_errors
from f3rm_ext.utils import threads

Mapper = Literal["incremental", "global"]
_SMALLEST_MODEL = 3
_GLOBAL_TOLERANCE = 1e-6
"""Relative change of the cost at which the adjustment of all cameras ends; that of nerfstudio. With COLMAP's own, 0,
poses are no nearer to the given ones of three captures, and a video of small motion takes 1.7 times as long."""
_ROUNDS_DEG = (12.0, 6.0, 3.0, 2.0)
"""Refinement of predicted poses, from coarse to fine: largest angle between a point and a feature."""
LAST_ERROR_PX, _LEAST_ANGLE_DEG = 4.0, 1.5
"""Largest distance of a feature from its point, and smallest angle between two rays, of points that are kept."""
LEAST_EXTENT_M = 30.0
"""GPS of phones and drones is off by metres: positions that lie closer together say nothing."""
_MOST_ERROR_M, _MOST_TURN_RAD = 10.0, 0.1
"""Largest error of positions that count, and largest turn about the way of the cameras that their errors may cause."""
_LEAST_ACROSS = 0.3
"""Smallest part of the photos' up, of length 1, across their way that tells what is up."""
_LEAST_PHOTOS = 3
_LEAST_UP = 0.55
"""Length of the mean of the photos' upper edges below which they cancel out: that of cameras which turn by 205 degrees.
More than half a turn is rather one around a thing, by photos on their side, than one over it."""
_LEAST_WIDTH, _MOST_HEIGHT = 0.1, 0.1
"""Smallest width of the cameras' positions for their length, and largest height for their width, that are a plane."""


def distortion_folds(camera: Any) -> bool:
    """Returns whether the distortion of a ``pycolmap.Camera`` folds the image over inside of its corners, so that it
    cannot be undone; only radial distortion of perspective cameras is checked."""
    params, extra = list(camera.params), list(camera.extra_params_idxs())
    if camera.model.name not in ("SIMPLE_RADIAL", "RADIAL", "OPENCV"):
        return False
    k1, k2 = params[extra[0]], params[extra[1]] if len(extra) > 1 else 0.0
    focal = camera.mean_focal_length()
    x = max(camera.principal_point_x, camera.width - camera.principal_point_x) / focal
    y = max(camera.principal_point_y, camera.height - camera.principal_point_y) / focal
    corner = np.hypot(x, y)
    radii = np.linspace(0, 2 * corner, 256)  # without distortion
    grows = 1 + 3 * k1 * radii**2 + 5 * k2 * radii**4 > 0
    until = len(radii) if grows.all() else int(grows.argmin())
    distorted = radii * (1 + k1 * radii**2 + k2 * radii**4)
    return bool(distorted[:until].max(initial=0.0) < corner)


def solve(
    database: FeatureDatabase, folder: Path, mapper: Mapper, count: Count, refine_distortion: bool = True
) -> list[Any]:
    """Solves for the cameras.

    Args:
        folder: temporary folder of COLMAP, which must not exist.
        count: called with the number of registered photos.
        refine_distortion: estimate lens distortion; otherwise the database's stays, which is zero.

    Returns:
        ``pycolmap.Reconstruction`` objects that share no scale, the one with most photos first; empty if no two photos
        fit together.
    """
    pycolmap = colmap()
    folder.mkdir(parents=True)
    total = len(database.ids())
    cores = threads.usable_cores()
    with translate_errors("solving for the cameras", folder):
        if mapper == "global":
            options = pycolmap.GlobalPipelineOptions(num_threads=cores, random_seed=0, min_model_size=_SMALLEST_MODEL)
            models = pycolmap.global_mapping(database.path, database.images, folder, options)
        else:
            models = {}
            for easier in (False, True):
                options = pycolmap.IncrementalPipelineOptions(
                    num_threads=cores, random_seed=0, min_model_size=min(_SMALLEST_MODEL, total)
                )
                options.ba_global_function_tolerance = _GLOBAL_TOLERANCE
                options.ba_refine_extra_params = options.mapper.abs_pose_refine_extra_params = refine_distortion
                if easier:  # few features or a small baseline
                    options.mapper.init_min_num_inliers, options.mapper.init_min_tri_angle = 30, 2.0
                numbers = itertools.count(3)  # the first call comes after the third photo
                models = pycolmap.incremental_mapping(
                    database.path,
                    database.images,
                    folder,
                    options,
                    next_image_callback=lambda numbers=numbers: count(min(next(numbers), total), total),
                )
                if models:
                    break
    shutil.rmtree(folder, ignore_errors=True)
    return sorted(models.values(), key=lambda model: (-model.num_reg_images(), -model.num_points3D()))


def adjust(model: Any, refine_distortion: bool = True) -> None:
    """Adjusts all cameras and points of a ``pycolmap.Reconstruction`` together, in place, and removes points that do
    not fit them. Lens distortion stays unless it is refined."""
    pycolmap = colmap()
    options = pycolmap.BundleAdjustmentOptions(print_summary=False, refine_extra_params=refine_distortion)
    pycolmap.bundle_adjustment(model, options)
    pycolmap.ObservationManager(model).filter_all_points3D(LAST_ERROR_PX, _LEAST_ANGLE_DEG)


def refine_predicted(
    database: FeatureDatabase, viewmats: Mapping[str, Float[np.ndarray, "4 4"]], folder: Path, count: Count
) -> Any:
    """Triangulates matches with predicted poses and adjusts cameras and points together, from coarse to fine.

    Args:
        viewmats: world to camera, OpenCV axes, by name of the photo.
        folder: temporary folder of COLMAP, which must not exist.

    Returns:
        A ``pycolmap.Reconstruction`` of the photos with a prediction.
    """
    pycolmap = colmap()
    folder.mkdir(parents=True)
    model = pycolmap.Reconstruction()
    with database.open() as opened:
        for camera in opened.read_all_cameras():
            model.add_camera_with_trivial_rig(camera)
        for image in opened.read_all_images():
            if image.name in viewmats:
                plain = pycolmap.Image(name=image.name, camera_id=image.camera_id, image_id=image.image_id)
                pose = pycolmap.Rigid3d(np.asarray(viewmats[image.name], dtype=np.float64)[:3])
                model.add_image_with_trivial_frame(plain, pose)
    with translate_errors("refining predicted poses", folder):
        for number, angle_deg in enumerate(_ROUNDS_DEG):
            is_last = number == len(_ROUNDS_DEG) - 1
            focal_px = float(np.median([camera.mean_focal_length() for camera in model.cameras.values()]))
            error_px = LAST_ERROR_PX if is_last else focal_px * np.tan(np.deg2rad(angle_deg))
            options = pycolmap.IncrementalPipelineOptions(
                num_threads=threads.usable_cores(), random_seed=0, extract_colors=is_last
            )
            triangulation = options.triangulation
            triangulation.create_max_angle_error = triangulation.continue_max_angle_error = angle_deg
            triangulation.complete_max_reproj_error = triangulation.merge_max_reproj_error = error_px
            options.mapper.filter_max_reproj_error = error_px
            model = pycolmap.triangulate_points(
                model, database.path, database.images, folder, clear_points=True, options=options
            )
            adjustment = pycolmap.BundleAdjustmentOptions(print_summary=False)
            adjustment.ceres.loss_function_type = pycolmap.LossFunctionType.CAUCHY
            adjustment.ceres.loss_function_scale = max(1.0, error_px / 8)
            adjustment.refine_focal_length = adjustment.refine_extra_params = is_last
            pycolmap.bundle_adjustment(model, adjustment)
            count(number + 1, len(_ROUNDS_DEG))
        pycolmap.ObservationManager(model).filter_all_points3D(LAST_ERROR_PX, _LEAST_ANGLE_DEG)
    shutil.rmtree(folder, ignore_errors=True)
    return model


def separate_cameras(model: Any) -> Any:
    """Returns a copy of a model in which each photo has a camera of its own, with a focal length of its own.

    Poses, points and focal lengths are adjusted together; the distortion stays.
    """
    pycolmap = colmap()
    separate = pycolmap.Reconstruction()
    for number in sorted(model.reg_image_ids()):
        image = model.image(number)
        camera = pycolmap.Camera(model.camera(image.camera_id).todict() | {"camera_id": number})
        separate.add_camera_with_trivial_rig(camera)
        pixels = np.array([feature.xy for feature in image.points2D], dtype=np.float64).reshape(-1, 2)
        plain = pycolmap.Image(name=image.name, keypoints=pixels, camera_id=number, image_id=number)
        separate.add_image_with_trivial_frame(plain, image.cam_from_world())
    for point in model.points3D.values():
        separate.add_point3D(point.xyz, point.track, point.color)
    adjustment = pycolmap.BundleAdjustmentOptions(print_summary=False, refine_extra_params=False)
    adjustment.ceres.loss_function_type = pycolmap.LossFunctionType.CAUCHY
    pycolmap.bundle_adjustment(separate, adjustment)
    return separate


def image_names(model: Any) -> set[str]:
    """Returns the names of the photos that have a pose in a model."""
    return {model.image(number).name for number in model.reg_image_ids()}


def photo_up(model: Any) -> Float[np.ndarray, "3"]:
    """Returns the mean direction of the upper edges of photos in the world, of length 1 where all agree."""
    views = np.array([model.image(number).cam_from_world().rotation.matrix() for number in model.reg_image_ids()])
    return -views[:, 1].mean(axis=0)


def align_with_gps(model: Any, database: FeatureDatabase) -> float | None:
    """Moves, turns and scales a model so that x is east, y north and z up, in metres from the first photo.

    The shape of the model does not change: matches are more exact than GPS. Of photos along a straight way, what is up
    in them decides the turn about it.

    Args:
        model: a ``pycolmap.Reconstruction``, changed in place.
        database: database with the positions that COLMAP read from EXIF.

    Returns:
        The median distance of cameras from their GPS positions, m; None where fewer than three photos have positions,
        or all lie within :data:`LEAST_EXTENT_M`, and nothing was changed.
    """
    pycolmap = colmap()
    names, places = [], []
    with database.open() as opened:
        of_image = {prior.corr_data_id.id: prior for prior in opened.read_all_pose_priors() if prior.has_position()}
        for number in model.reg_image_ids():
            prior = of_image.get(number)
            if prior is not None and prior.coordinate_system == pycolmap.PosePriorCoordinateSystem.WGS84:
                names.append(model.image(number).name)
                places.append(np.asarray(prior.position, dtype=np.float64).reshape(3))
    if len(names) < _LEAST_PHOTOS:
        return None
    degrees = np.array(places)
    metres = np.asarray(pycolmap.GPSTransform().ellipsoid_to_enu(degrees, *degrees[0])).reshape(-1, 3)
    if np.ptp(metres[:, :2], axis=0).max() < LEAST_EXTENT_M:
        return None
    options = pycolmap.RANSACOptions(max_error=_MOST_ERROR_M)
    similarity = pycolmap.align_reconstruction_to_locations(model, names, metres, _LEAST_PHOTOS, options)
    if similarity is None:
        return None
    centres = np.array([similarity * model.find_image_with_name(name).projection_center() for name in names])
    if np.ptp(centres[:, :2], axis=0).max() < LEAST_EXTENT_M:  # a wrong position made the extent
        return None
    model.transform(similarity)
    error_m = float(np.median(np.linalg.norm(centres - metres, axis=1)))
    middle = centres.mean(axis=0)
    _, spread, directions = np.linalg.svd(centres - middle)
    if error_m > _MOST_TURN_RAD * spread[1]:
        model.transform(_upright_turn(model, middle, directions[0]))
    return error_m


def _upright_turn(model: Any, middle: Float[np.ndarray, "3"], direction: Float[np.ndarray, "3"]) -> Any:
    """Returns the turn about a straight way of the cameras that makes photos upright; their positions leave it open.
    The way is given by a point and its direction, of length 1."""
    pycolmap = colmap()
    now, goal = (up - (up @ direction) * direction for up in (photo_up(model), np.array([0.0, 0.0, 1.0])))
    # Photos that look down and whose upper edges point along the way do not tell it either.
    tells = np.linalg.norm(now) >= _LEAST_ACROSS
    angle = np.arctan2(direction @ np.cross(now, goal), now @ goal) if tells else 0.0
    turn = pycolmap.Rotation3d(angle * direction)
    return pycolmap.Sim3d(1.0, turn, middle - turn.matrix() @ middle)


def level_positions(model: Any) -> bool:
    """Turns a model so that the plane of the cameras is level where the upper edges of photos cancel out.

    They do around a thing in photos that lie on their side, and in photos straight down along strips. Cameras look down
    on average.

    Args:
        model: a ``pycolmap.Reconstruction``, changed in place.

    Returns:
        Whether it was turned, so that z is up; not where photos tell what is up, or positions are no plane.
    """
    if np.linalg.norm(photo_up(model)) >= _LEAST_UP:
        return False
    images = [model.image(number) for number in model.reg_image_ids()]
    centres = np.array([image.projection_center() for image in images])
    _, spread, directions = np.linalg.svd(centres - centres.mean(axis=0))
    if spread[1] < _LEAST_WIDTH * spread[0] or spread[2] > _MOST_HEIGHT * spread[1]:
        return False
    views = np.array([image.cam_from_world().rotation.matrix()[2] for image in images])
    up = directions[2] * (-1.0 if views.mean(axis=0) @ directions[2] > 0 else 1.0)
    side = directions[0]
    turn = colmap().Rotation3d(np.stack([side, np.cross(up, side), up]))
    model.transform(colmap().Sim3d(1.0, turn, np.zeros(3)))
    return True
