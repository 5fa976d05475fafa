"""Writes a solved model as a capture: transforms.json, points, and COLMAP's files."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from jaxtyping import Float64, UInt8
from nerfstudio.process_data.colmap_utils import parse_colmap_camera_params
from PIL import Image

from f3rm_ext.sfm.database import Count, colmap, explained
from f3rm_ext.utils.atomic_files import write_atomic
from f3rm_ext.utils.output_file import replacing
from f3rm_ext.utils.ply import write_ply

TRANSFORMS, POINTS = "transforms.json", "sparse_pc.ply"
SPARSE = Path("colmap", "sparse", "0")
APPLIED = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, -1.0, 0.0, 0.0]])
"""From COLMAP's world, whose y axis often points down, to that of the capture, as ns-process-data turns it."""
UNCHANGED = np.eye(4)[:3]
Transform = Float64[np.ndarray, "3 4"]


def capture_from_camera(cam_from_world: Transform, applied: Transform) -> Float64[np.ndarray, "4 4"]:
    """Returns the pose of a camera as transforms.json has it: c2w, OpenGL axes.

    Args:
        cam_from_world: COLMAP's pose: world to camera, OpenCV axes.
        applied: from COLMAP's world to that of the capture.
    """
    rotation, translation = cam_from_world[:, :3], cam_from_world[:, 3]
    c2w = np.eye(4)
    c2w[:3, :3] = rotation.T @ np.diag([1.0, -1.0, -1.0])
    c2w[:3, 3] = -rotation.T @ translation
    c2w[:3] = applied @ c2w
    return c2w


def transforms_of(model: Any, images: str, masks: Mapping[str, str], applied: Transform) -> dict[str, Any]:
    """Returns the contents of transforms.json.

    Args:
        model: a ``pycolmap.Reconstruction``.
        images: folder of the photos, relative to the capture.
        masks: mask of each photo by name, relative to the capture; empty without masks.
        applied: from COLMAP's world to that of the capture.
    """
    intrinsics = {number: _intrinsics(camera) for number, camera in model.cameras.items()}
    frames = []
    for image in sorted((model.image(number) for number in model.reg_image_ids()), key=lambda image: image.name):
        frame = {"file_path": f"{images}/{image.name}"}
        if masks:
            frame["mask_path"] = masks[image.name]
        frame["transform_matrix"] = capture_from_camera(image.cam_from_world().matrix(), applied).tolist()
        frame["colmap_im_id"] = image.image_id
        frames.append((image.camera_id, frame))
    used = {number for number, _ in frames}
    shared = intrinsics[used.pop()] if len(used) == 1 else {}
    own = (frame if shared else {**frame, **intrinsics[number]} for number, frame in frames)
    return {**_with_model(shared, intrinsics), "frames": list(own)}


def _intrinsics(camera: Any) -> dict[str, Any]:
    plain = SimpleNamespace(
        model=camera.model.name, params=list(camera.params), width=int(camera.width), height=int(camera.height)
    )
    return parse_colmap_camera_params(plain)


def _with_model(shared: dict[str, Any], intrinsics: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """nerfstudio reads the camera model at the top, also where frames have intrinsics of their own."""
    any_of_them = next(iter(intrinsics.values()))
    return shared or {"camera_model": any_of_them["camera_model"]}


def points_of(model: Any, applied: Transform) -> tuple[Float64[np.ndarray, "points 3"], UInt8[np.ndarray, "points 3"]]:
    """Returns positions, in the frame of transforms.json, and colours of the points."""
    points = list(model.points3D.values())
    xyz = np.array([point.xyz for point in points], dtype=np.float64).reshape(-1, 3)
    rgb = np.array([point.color for point in points], dtype=np.uint8).reshape(-1, 3)
    return xyz @ applied[:, :3].T + applied[:, 3], rgb


def remove_folder(folder: Path) -> None:
    """Removes a folder of temporary files, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def write_sparse(model: Any, out: Path) -> None:
    """Replaces COLMAP's files of the model, in ``colmap/sparse/0``."""
    target = out / SPARSE
    fresh = target.with_name(".0.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    with explained("writing its model", out):
        model.write(fresh)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(fresh, target)


def write_capture(model: Any, out: Path, images: str, masks: Mapping[str, str], applied: Transform) -> None:
    """Writes points and transforms.json; the latter comes last, so that a capture without it is not finished.

    Args:
        model: a ``pycolmap.Reconstruction``.
        out: folder of the capture.
        images: folder of the photos, relative to ``out``.
        masks: mask of each photo by name, relative to ``out``; empty without masks.
        applied: from COLMAP's world to that of the capture.

    Raises:
        ConfigError: a file cannot be written.
    """
    write_sparse(model, out)
    xyz, rgb = points_of(model, applied)
    columns = {name: column for name, column in zip("xyz", xyz.astype(np.float32).T, strict=True)}
    columns |= {name: np.ascontiguousarray(rgb[:, i]) for i, name in enumerate(("red", "green", "blue"))}
    with replacing(out / POINTS, option="--output") as stream:
        write_ply(stream, columns)
    content = {
        **transforms_of(model, images, masks, applied),
        "applied_transform": applied.tolist(),
        "ply_file_path": POINTS,
    }
    write_atomic(out / TRANSFORMS, json.dumps(content, indent=1).encode())


def undistort(model: Any, out: Path, source: str, target: str, masks: Mapping[str, str], count: Count) -> Any:
    """Writes photos and masks without lens distortion.

    Args:
        model: a ``pycolmap.Reconstruction``.
        out: folder of the capture.
        source: folder of the photos, relative to ``out``.
        target: folder for the new photos, relative to ``out``.
        masks: mask of each photo by name, relative to ``out``; the new ones go to ``masks_undistorted/``.
        count: called with the photos done.

    Returns:
        The model with pinhole cameras.
    """
    pycolmap = colmap()
    work = out / "colmap" / ".undistorted.tmp"
    shutil.rmtree(work, ignore_errors=True)
    names = sorted(model.image(number).name for number in model.reg_image_ids())
    with explained("undistorting photos", out):
        pycolmap.undistort_images(work, out / SPARSE, out / source, names, jpeg_quality=95)
        plain = pycolmap.Reconstruction(work / "sparse")
    shutil.rmtree(out / target, ignore_errors=True)
    os.replace(work / "images", out / target)
    shutil.rmtree(work)
    for number, name in enumerate(names):
        if name in masks:
            camera = model.camera(model.find_image_with_name(name).camera_id)
            with Image.open(out / masks[name]) as mask:
                bitmap = pycolmap.Bitmap.from_array(np.asarray(mask.convert("L")))
            straight, _ = pycolmap.undistort_image(pycolmap.UndistortCameraOptions(), bitmap, camera)
            levels = straight.to_array().reshape(straight.height, straight.width, -1)[..., 0]
            path = out / undistorted_mask(masks[name])
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.where(levels >= 128, 255, 0).astype(np.uint8)).save(path)
        count(number + 1, len(names))
    return plain


def undistorted_mask(mask: str) -> str:
    """Returns the name of a mask without distortion.

    >>> undistorted_mask("masks/a.png")
    'masks_undistorted/a.png'
    """
    return f"masks_undistorted/{Path(mask).name}"
