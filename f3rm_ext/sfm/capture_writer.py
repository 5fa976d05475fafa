"""Writes a solved model as a capture: transforms.json, points, and COLMAP's files."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from f3rm_ext.capture.colmap_model import APPLIED, UNCHANGED, colmap, make_transforms
from f3rm_ext.capture.points import point_columns
from f3rm_ext.sfm.database import Count, translate_errors
from f3rm_ext.sfm.work_folder import POINTS, TRANSFORMS
from f3rm_ext.utils.atomic_files import write_atomic
from f3rm_ext.utils.output_file import replace_file
from f3rm_ext.utils.ply import write_ply

MASKS = "masks_undistorted"
"""Folder of the masks of photos without distortion."""
SPARSE = Path("colmap", "sparse", "0")
ORIENTATION = "orientation_override"
"""Entry of transforms.json by which nerfstudio turns the scene; "none" keeps the axes of the capture."""


def write_sparse(model: Any, out: Path) -> None:
    """Replaces COLMAP's files of the model, in ``colmap/sparse/0``."""
    target = out / SPARSE
    fresh = target.with_name(".0.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    with translate_errors("writing its model", out):
        model.write(fresh)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(fresh, target)


def write_capture(model: Any, out: Path, images: str, masks: Mapping[str, str], *, z_is_up: bool) -> None:
    """Writes points and transforms.json; the latter comes last, so that a capture without it is not finished.

    Args:
        images: folder of the photos, relative to ``out``.
        masks: mask of each photo by name, relative to ``out``; empty without masks.
        z_is_up: whether z is up in the model. The capture then keeps its axes, and nerfstudio does not turn the scene
            by what is up in the photos: in photos taken straight down, that is horizontal.
    """
    applied = UNCHANGED if z_is_up else APPLIED
    write_sparse(model, out)
    points = list(model.points3D.values())
    xyz = np.array([point.xyz for point in points], dtype=np.float64).reshape(-1, 3) @ applied[:, :3].T + applied[:, 3]
    rgb = np.array([point.color for point in points], dtype=np.uint8).reshape(-1, 3)
    with replace_file(out / POINTS, option="--output") as stream:
        write_ply(stream, point_columns(xyz, rgb))
    content = {
        **make_transforms(model, images, masks, applied),
        "applied_transform": applied.tolist(),
        "ply_file_path": POINTS,
    }
    if z_is_up:
        content[ORIENTATION] = "none"
    write_atomic(out / TRANSFORMS, json.dumps(content, indent=1).encode())


def undistort(model: Any, out: Path, source: str, target: str, masks: Mapping[str, str], count: Count) -> Any:
    """Writes photos and masks without lens distortion.

    Args:
        source: folder of the photos, relative to ``out``.
        target: folder for the new photos, relative to ``out``.
        masks: mask of each photo by name, relative to ``out``; the new ones go to :data:`MASKS`.

    Returns:
        The model with pinhole cameras.
    """
    pycolmap = colmap()
    work = out / "colmap" / ".undistorted.tmp"
    shutil.rmtree(work, ignore_errors=True)
    names = sorted(model.image(number).name for number in model.reg_image_ids())
    with translate_errors("undistorting photos", out):
        pycolmap.undistort_images(work, out / SPARSE, out / source, names, jpeg_quality=95)
        plain = pycolmap.Reconstruction(work / "sparse")
    (work / MASKS).mkdir()
    for number, name in enumerate(names):
        camera = model.camera(model.find_image_with_name(name).camera_id)
        if name in masks:
            with Image.open(out / masks[name]) as mask:
                levels = _undistort_channel(mask.convert("L"), camera)
            Image.fromarray(np.where(levels >= 128, 255, 0).astype(np.uint8)).save(work / undistorted_mask(masks[name]))
        _restore_details(work / "images" / name, out / source / name, camera)
        count(number + 1, len(names))
    for folder, place in ((work / "images", out / target), (work / MASKS, out / MASKS)):
        shutil.rmtree(place, ignore_errors=True)
        if any(folder.iterdir()):
            os.replace(folder, place)
    shutil.rmtree(work)
    return plain


def _undistort_channel(channel: Image.Image, camera: Any) -> UInt8[np.ndarray, "h w"]:
    pycolmap = colmap()
    bitmap = pycolmap.Bitmap.from_array(np.asarray(channel))
    straight, _ = pycolmap.undistort_image(pycolmap.UndistortCameraOptions(), bitmap, camera)
    return straight.to_array().reshape(straight.height, straight.width, -1)[..., 0]


def _restore_details(path: Path, photo: Path, camera: Any) -> None:
    """Gives an undistorted photo what COLMAP does not keep of the original: transparency and EXIF data."""
    with Image.open(photo) as original:
        exif = original.info.get("exif", b"")
        alpha = _undistort_channel(original.getchannel("A"), camera) if original.mode == "RGBA" else None
    if path.suffix == ".png" and (exif or alpha is not None):
        with Image.open(path) as picture:
            if alpha is not None:
                picture.putalpha(Image.fromarray(alpha))
            picture.save(path, exif=exif)
    elif exif:
        data = path.read_bytes()  # the pixels stay as they are
        path.write_bytes(data[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + data[2:])


def undistorted_mask(mask: str) -> str:
    """Returns the name of a mask without distortion."""
    return f"{MASKS}/{Path(mask).name}"
