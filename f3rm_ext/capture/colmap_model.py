"""COLMAP's models as captures: a folder with photos and ``sparse/0`` in place of transforms.json."""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from jaxtyping import Float64
from nerfstudio.process_data.colmap_utils import parse_colmap_camera_params
from nerfstudio.utils.rich_utils import CONSOLE
from PIL import Image

from f3rm_ext.errors import CaptureError, reason_of
from f3rm_ext.utils.pictures import UNREADABLE

MODEL_KEY = "colmap_path"
"""Key of the transforms that names the folder of the model they were made of."""
APPLIED = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, -1.0, 0.0, 0.0]])
"""Transform from COLMAP's world, whose y axis often points down, to one with z up, the same as nerfstudio's."""
UNCHANGED = np.eye(4)[:3]
Transform = Float64[np.ndarray, "3 4"]
_MODELS = ("sparse/0", "colmap/sparse/0", "sparse")
_PHOTOS = "images"
_MASKS = "masks"
_SPLIT_LISTS = {"train_list.txt": "train", "val_list.txt": "val", "test_list.txt": "test"}
_ASPECT_TOLERANCE = 0.01
"""Sizes of reduced photos are rounded."""


def colmap() -> Any:
    """Returns the module pycolmap. Raises CaptureError if it is not installed."""
    try:
        import pycolmap
    except ImportError as error:
        raise CaptureError(f"pycolmap cannot be used here ({reason_of(error)}): run pip install pycolmap.") from error
    # Its import made SIGTERM print a stack trace.
    with suppress(ValueError):  # only the main thread may set it
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    level = pycolmap.logging.Level
    for severity in (level.INFO, level.WARNING, level.ERROR, level.FATAL):
        # Otherwise it writes files to the system's folder of temporary files. bundle_adjustment undoes logtostderr.
        pycolmap.logging.set_log_destination(severity, "")
    return pycolmap


def capture_files(data: Path) -> list[Path]:
    """Returns the files that hold the poses of a capture: transforms.json, else those of COLMAP's model, if any."""
    path = data if data.is_file() else data / "transforms.json"
    if path.is_file():
        return [path]
    for name in _MODELS:
        files = sorted(item for item in (data / name).glob("*") if item.suffix in (".bin", ".txt") and item.is_file())
        if {"cameras", "images"} <= {item.stem for item in files}:
            return files
    return []


def read_model(data: Path, model_path: Path) -> dict[str, Any]:
    """Returns COLMAP's model as the contents of transforms.json. Poses are in COLMAP's own frame.

    Cameras are scaled where the photos are smaller or larger than those that COLMAP saw. ``train_list.txt`` and its
    like give the splits, as with nerfstudio's dataparser ``colmap``.

    Raises:
        CaptureError: the model cannot be read, has no photo with a pose, or has a camera that nerfstudio cannot use.
    """
    try:
        model = colmap().Reconstruction(model_path)
    except CaptureError:
        raise
    except Exception as error:  # what damaged files raise is undocumented
        raise CaptureError(
            f"COLMAP's model {model_path} cannot be read ({reason_of(error)}): copy cameras, images and points3D again."
        ) from error
    if not model.num_reg_images():
        raise CaptureError(f"COLMAP's model {model_path} has no photo with a pose: run COLMAP's mapper again.")
    _name_larger_model(model_path, model.num_reg_images())
    if (data / _MASKS).is_dir():
        _say_once(
            f"The masks in {data / _MASKS} are not used: nerfstudio's dataparser reads them, if a.jpg has a.png, "
            f"by `colmap --colmap-path {model_path.relative_to(data)} --masks-path {_MASKS}` at the end of `ns-train`."
        )
    names = {number: model.image(number).name for number in model.reg_image_ids()}
    folder = _photo_folder(data, min(names.values()))
    _fit_to_photos(model, names, data / folder)
    try:
        meta = make_transforms(model, folder, {}, UNCHANGED)
    except NotImplementedError as error:
        raise CaptureError(
            f"COLMAP's model {model_path} has a kind of camera that cannot be used ({reason_of(error)}): run `colmap "
            "image_undistorter` on it, and use the folder that it writes."
        ) from error
    kinds = {frame["camera_model"] for frame in meta["frames"] if "camera_model" in frame}
    if len(kinds) > 1:
        raise CaptureError(
            f"COLMAP's model {model_path} mixes kinds of cameras ({', '.join(sorted(kinds))}): run `colmap "
            "image_undistorter` on it, and use the folder that it writes."
        )
    for file, split in _SPLIT_LISTS.items():
        if (data / file).is_file():
            names_in_list = os.fsdecode((data / file).read_bytes()).split("\n")
            meta[f"{split}_filenames"] = [_join(folder, name.strip()) for name in names_in_list if name.strip()]
    return {**meta, "applied_transform": UNCHANGED.tolist(), MODEL_KEY: str(model_path.relative_to(data))}


def _name_larger_model(model_path: Path, count: int) -> None:
    """Says so where COLMAP made a model with more photos beside the one that is read, which has ``count``."""
    others = {path: _count_images(path) for path in sorted(model_path.parent.iterdir()) if path != model_path}
    largest = max(others, key=lambda path: others[path], default=model_path)
    if others.get(largest, 0) > count:
        _say_once(
            f"COLMAP's model {model_path} is used, which has {count} photos, but {largest} has {others[largest]}: "
            "exchange the names of these folders to use that one."
        )


def _count_images(model_path: Path) -> int:
    """The number of photos that a model says it has; 0 if it is none."""
    binary, text = model_path / "images.bin", model_path / "images.txt"
    try:
        if binary.is_file():
            with binary.open("rb") as file:
                return int.from_bytes(file.read(8), "little")
        with text.open("rb") as lines:
            return sum(not line.startswith(b"#") for line in lines) // 2  # a photo and its points
    except OSError:
        return 0


def align_z_up(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns transforms whose z axis points up, so that the scene is that of nerfstudio's dataparser ``colmap``."""
    turn, before = (np.vstack([matrix, [0.0, 0.0, 0.0, 1.0]]) for matrix in (APPLIED, meta["applied_transform"]))
    frames = [
        {**frame, "transform_matrix": (turn @ np.asarray(frame["transform_matrix"], dtype=np.float64)).tolist()}
        for frame in meta["frames"]
    ]
    return {**meta, "frames": frames, "applied_transform": (turn @ before)[:3].tolist()}


def capture_from_camera(cam_from_world: Transform, applied: Transform) -> Float64[np.ndarray, "4 4"]:
    """Returns the pose of a camera as transforms.json has it (c2w, OpenGL axes), from COLMAP's pose (world to camera,
    OpenCV axes) and the transform from COLMAP's world to that of the capture."""
    rotation, translation = cam_from_world[:, :3], cam_from_world[:, 3]
    c2w = np.eye(4)
    c2w[:3, :3] = rotation.T @ np.diag([1.0, -1.0, -1.0])
    c2w[:3, 3] = -rotation.T @ translation
    c2w[:3] = applied @ c2w
    return c2w


def make_transforms(model: Any, images: str, masks: Mapping[str, str], applied: Transform) -> dict[str, Any]:
    """Returns the contents of transforms.json.

    Args:
        images: folder of the photos, relative to the capture.
        masks: mask of each photo by name, relative to the capture; empty without masks.
        applied: from COLMAP's world to that of the capture.
    """
    photos = sorted((model.image(number) for number in model.reg_image_ids()), key=lambda image: image.name)
    # Only of cameras with photos: others may be of kinds that nerfstudio does not know.
    intrinsics = {number: _intrinsics(model.camera(number)) for number in {image.camera_id for image in photos}}
    shared = next(iter(intrinsics.values())) if len(intrinsics) == 1 else {}
    frames = []
    for image in photos:
        frame = {"file_path": _join(images, image.name)}
        if masks:
            frame["mask_path"] = masks[image.name]
        frame["transform_matrix"] = capture_from_camera(image.cam_from_world().matrix(), applied).tolist()
        frame["colmap_im_id"] = image.image_id
        frames.append(frame if shared else {**frame, **intrinsics[image.camera_id]})
    # nerfstudio reads the camera model at the top, also where frames have intrinsics of their own.
    top = shared or {"camera_model": frames[0]["camera_model"]}
    return {**top, "frames": frames}


def _intrinsics(camera: Any) -> dict[str, Any]:
    plain = SimpleNamespace(
        model=camera.model.name, params=list(camera.params), width=int(camera.width), height=int(camera.height)
    )
    return parse_colmap_camera_params(plain)


def _photo_folder(data: Path, name: str) -> str:
    """The folder of the photos, relative to the scene: ``images``, else the first one that has the photo."""
    others = sorted(item.name for item in data.iterdir() if item.is_dir())
    # Of reduced copies the dataparser takes the right one.
    others = [other for other in others if not other.startswith(f"{_PHOTOS}_")]
    return next((folder for folder in (_PHOTOS, *others, "") if (data / folder / name).is_file()), _PHOTOS)


def _fit_to_photos(model: Any, names: Mapping[int, str], folder: Path) -> None:
    """Scales the cameras whose first photo has the same shape as COLMAP's, but another size."""
    firsts: dict[int, str] = {}
    for number, name in sorted(names.items(), key=lambda item: item[1]):
        firsts.setdefault(model.image(number).camera_id, name)
    for number, name in firsts.items():
        camera = model.camera(number)
        try:
            with Image.open(folder / name) as photo:
                width, height = photo.size
        except UNREADABLE:
            continue  # the dataparser checks the photos that it needs
        ratio = (width / camera.width) / (height / camera.height)
        if (width, height) != (camera.width, camera.height) and abs(ratio - 1) < _ASPECT_TOLERANCE:
            _say_once(
                f"The photos in {folder} have {width} x {height} pixels and COLMAP's cameras {camera.width} x "
                f"{camera.height}: the cameras are scaled."
            )
            camera.rescale(width, height)


@cache
def _say_once(text: str) -> None:
    CONSOLE.log(text, markup=False)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
