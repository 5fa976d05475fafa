"""Cameras and points from matches, by COLMAP's mappers."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from f3rm_ext.sfm.database import Count, FeatureDatabase, colmap, explained
from f3rm_ext.utils import threads

Mapper = Literal["incremental", "global"]
_SMALLEST_MODEL = 3
_ROUNDS_DEG = (12.0, 6.0, 3.0, 2.0)
"""Refinement of predicted poses, from coarse to fine: largest angle between a point and a feature."""
_LAST_ERROR_PX, _LEAST_ANGLE_DEG = 4.0, 1.5


def folds(camera: Any) -> bool:
    """Tells whether a camera's distortion folds the image over inside of its corners, so that it cannot be undone.

    Args:
        camera: a ``pycolmap.Camera``; only radial distortion of perspective cameras is looked at.
    """
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
    """Finds the cameras.

    Args:
        folder: for COLMAP's own files; must not exist.
        count: called with the number of registered photos.
        refine_distortion: estimate lens distortion; otherwise it stays as it is in the database, zero.

    Returns:
        ``pycolmap.Reconstruction`` objects that share no scale, the one with most photos first; empty if no two photos
        fit together.
    """
    pycolmap = colmap()
    folder.mkdir(parents=True)
    total = len(database.ids())
    cores = threads.usable_cores()
    with explained("solving for the cameras", folder):
        if mapper == "global":
            options = pycolmap.GlobalPipelineOptions(num_threads=cores, random_seed=0, min_model_size=_SMALLEST_MODEL)
            models = pycolmap.global_mapping(database.path, database.images, folder, options)
        else:
            models = {}
            for easier in (False, True):
                options = pycolmap.IncrementalPipelineOptions(
                    num_threads=cores, random_seed=0, min_model_size=min(_SMALLEST_MODEL, total)
                )
                options.ba_refine_extra_params = options.mapper.abs_pose_refine_extra_params = refine_distortion
                if easier:  # few features or a small baseline
                    options.mapper.init_min_num_inliers, options.mapper.init_min_tri_angle = 30, 2.0
                registered = 0

                def one_more() -> None:
                    nonlocal registered
                    registered += 1
                    count(min(registered + 2, total), total)

                models = pycolmap.incremental_mapping(
                    database.path, database.images, folder, options, next_image_callback=one_more
                )
                if models:
                    break
    found = sorted(models.values(), key=lambda model: (-model.num_reg_images(), -model.num_points3D()))
    shutil.rmtree(folder, ignore_errors=True)
    return found


def refine_predicted(
    database: FeatureDatabase, viewmats: Mapping[str, Float[np.ndarray, "4 4"]], folder: Path, count: Count
) -> Any:
    """Triangulates matches with predicted poses and adjusts cameras and points together, from coarse to fine.

    Args:
        viewmats: world to camera, OpenCV axes, by name of the photo.
        folder: for COLMAP's own files; must not exist.

    Returns:
        A ``pycolmap.Reconstruction`` of the photos with a prediction.
    """
    pycolmap = colmap()
    folder.mkdir(parents=True)
    model = pycolmap.Reconstruction()
    with database.opened() as opened:
        for camera in opened.read_all_cameras():
            model.add_camera_with_trivial_rig(camera)
        for image in opened.read_all_images():
            if image.name in viewmats:
                plain = pycolmap.Image(name=image.name, camera_id=image.camera_id, image_id=image.image_id)
                pose = pycolmap.Rigid3d(np.asarray(viewmats[image.name], dtype=np.float64)[:3])
                model.add_image_with_trivial_frame(plain, pose)
    with explained("refining predicted poses", folder):
        for number, angle_deg in enumerate(_ROUNDS_DEG):
            is_last = number == len(_ROUNDS_DEG) - 1
            focal_px = float(np.median([camera.mean_focal_length() for camera in model.cameras.values()]))
            error_px = _LAST_ERROR_PX if is_last else focal_px * np.tan(np.deg2rad(angle_deg))
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
        pycolmap.ObservationManager(model).filter_all_points3D(_LAST_ERROR_PX, _LEAST_ANGLE_DEG)
    shutil.rmtree(folder, ignore_errors=True)
    return model


def names_of(model: Any) -> set[str]:
    """Returns the names of the photos that a model has poses for."""
    return {model.image(number).name for number in model.reg_image_ids()}
