"""Checks of a capture before anything is trained on it: transforms.json, poses, intrinsics, splits."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs

from f3rm_ext.capture.colmap_model import capture_files, read_model
from f3rm_ext.capture.images import name_some
from f3rm_ext.errors import CaptureError

RIGID_TOLERANCE = 1e-2
"""Largest entry of |RᵀR - I| of a rotation; poses written with three decimals stay well below it."""
INTRINSICS = ("fl_x", "fl_y", "cx", "cy", "w", "h")
DISTORTION = ("k1", "k2", "k3", "k4", "p1", "p2", "distortion_params")
SPLITS = ("train", "val", "test")
Meta = dict[str, Any]


def read_transforms(data: Path) -> tuple[Meta, Path]:
    """Reads transforms.json; without it COLMAP's model, as the contents that transforms.json would have.

    Args:
        data: folder of the capture, or a JSON file in it.

    Returns:
        Its contents, and the folder that file paths are relative to.

    Raises:
        CaptureError: there is no such folder or file, it is not a list of frames in JSON, or the model cannot be used.
    """
    if not data.exists():
        raise CaptureError(f"There is no capture at {data}: check the path given with --data.")
    files = capture_files(data)
    if not files:
        raise CaptureError(
            f"The folder {data} has neither transforms.json nor COLMAP's sparse/0: make a capture from photos with "
            "`f3rm-ext sfm process`, or name another kind of capture at the end of `ns-train`, such as blender-data."
        )
    path = files[0]
    if path.suffix != ".json" and path != data:
        return read_model(data, path.parent), data
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"{path} is not valid JSON ({error}): it may be cut short, so write it again.") from error
    except OSError as error:
        raise CaptureError(f"{path} cannot be read ({error}): check its permissions.") from error
    frames = meta.get("frames") if isinstance(meta, dict) else None
    if not isinstance(frames, list) or not all(isinstance(frame, dict) for frame in frames):
        raise CaptureError(f'{path} has no list "frames": it has to be in nerfstudio\'s format.')
    for number, frame in enumerate(frames):
        if not isinstance(frame.get("file_path"), str) or not frame["file_path"]:
            raise CaptureError(f"Frame {number} of {path} has no file_path: name its image, or take the frame out.")
    return meta, path.parent


def require_images(count: int, where: object) -> None:
    """Raises a :class:`CaptureError` unless there are at least two images."""
    if count < 2:
        number = ("no image", "a single image")[count]
        raise CaptureError(f"{where} has {number}, but a scene needs at least two, and better fifty: add photos.")


def check_pose(matrix: object, name: object) -> None:
    """Checks one camera-to-world matrix.

    A uniform scale in the rotation is refused as well, because positions may or may not include it.

    Args:
        matrix: 4 x 4 numbers (or 3 x 4).
        name: of the frame, for the message.

    Raises:
        CaptureError: wrong shape, NaN or inf, mirrored, scaled, or not a rotation and a position.

    >>> check_pose(np.diag([2.0, 2.0, 2.0, 1.0]), "a.png")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    f3rm_ext.errors.CaptureError: The pose (transform_matrix) of a.png carries a scale of 2: divide its 3 x 3 part ...
    """
    where = f"The pose (transform_matrix) of {name}"
    remedy = "take the frame out, or compute the poses again"
    try:
        pose = np.asarray(matrix, dtype=np.float64)
    except (TypeError, ValueError):
        pose = np.empty(0)
    if pose.shape not in ((4, 4), (3, 4)):
        raise CaptureError(f"{where} is not a matrix of 4 x 4 numbers: {remedy}.")
    if not np.isfinite(pose).all():
        raise CaptureError(f"{where} has a NaN or infinite entry: {remedy}.")
    rotation = pose[:3, :3]
    gram = rotation.T @ rotation
    scale = math.sqrt(max(float(np.trace(gram)) / 3, 0.0))
    if scale > 0 and np.abs(gram / scale**2 - np.eye(3)).max() <= RIGID_TOLERANCE:
        if np.linalg.det(rotation) < 0:
            raise CaptureError(f"{where} mirrors the scene (determinant -1): flip one axis of the rotation.")
        if np.abs(gram - np.eye(3)).max() > RIGID_TOLERANCE:
            raise CaptureError(
                f"{where} carries a scale of {scale:.4g}: divide its 3 x 3 part by that, so that it is a rotation."
            )
    else:
        raise CaptureError(f"{where} is not rigid (its 3 x 3 part is not a rotation): {remedy}.")
    if pose.shape == (4, 4) and np.abs(pose[3] - np.array([0, 0, 0, 1])).max() > RIGID_TOLERANCE:
        raise CaptureError(f"{where} has a last row that is not 0 0 0 1: transpose the matrix, or {remedy}.")


def check_frame_poses(frames: Sequence[Mapping[str, Any]]) -> None:
    """Checks the poses of all frames, which must be 4 x 4, with :func:`check_pose`."""
    for frame in frames:
        matrix = frame.get("transform_matrix")
        if np.shape(matrix) == (3, 4):  # type: ignore[arg-type]
            matrix = None
        check_pose(matrix, frame["file_path"])


def per_frame_intrinsics(meta: Meta) -> Meta:
    """Returns the transforms with intrinsics in every frame, if any frame has its own.

    nerfstudio uses a value at the top for all frames, even for frames that give another one.

    >>> meta = {"fl_x": 500, "frames": [{"file_path": "a.png"}, {"file_path": "b.png", "fl_x": 400}]}
    >>> per_frame_intrinsics(meta)
    {'frames': [{'file_path': 'a.png', 'fl_x': 500}, {'file_path': 'b.png', 'fl_x': 400}]}
    """
    frames = [dict(frame) for frame in meta["frames"]]
    shared = {key: value for key, value in meta.items() if key != "frames"}
    for keys in (*((key,) for key in INTRINSICS), DISTORTION):
        top = {key: shared[key] for key in keys if key in shared}
        if top and any(key in frame for frame in frames for key in keys):
            for key in keys:
                shared.pop(key, None)
            for frame in frames:
                if not any(key in frame for key in keys):
                    frame.update(top)
    return {**shared, "frames": frames}


def check_intrinsics(meta: Meta, camera_models: Sequence[str]) -> None:
    """Checks that every frame has a focal length, a principal point and a size.

    Args:
        meta: result of :func:`per_frame_intrinsics`.
        camera_models: names of the known camera models.

    Raises:
        CaptureError: a value is missing or impossible, or the camera model is unknown.
    """
    model = meta.get("camera_model")
    if model is not None and model not in camera_models:
        raise CaptureError(f"The camera_model {model} is not known: use one of {', '.join(sorted(camera_models))}.")
    for frame in meta["frames"]:
        values = {**{key: meta[key] for key in INTRINSICS if key in meta}, **frame}
        missing = [key for key in INTRINSICS if key not in values]
        if missing:
            raise CaptureError(
                f"The intrinsics {', '.join(missing)} of {frame['file_path']} are missing in transforms.json: "
                "give them at the top for all frames, or in every frame, in pixels."
            )
        for key in INTRINSICS:
            value = values[key]
            number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
            if not math.isfinite(number) or (number <= 0 and key not in ("cx", "cy")):
                raise CaptureError(
                    f"The intrinsic {key} of {frame['file_path']} is {value}: it has to be a positive number of pixels."
                )


def check_same_keys(frames: Sequence[Mapping[str, Any]], key: str) -> None:
    """Checks that either all frames or none name a file such as ``mask_path``.

    Raises:
        CaptureError: only some frames name one.
    """
    without = [frame["file_path"] for frame in frames if key not in frame]
    if without and len(without) < len(frames):
        raise CaptureError(
            f"{len(without)} of {len(frames)} frames have no {key} ({name_some(without)}): "
            "give one to every frame, or to none."
        )


def check_splits(meta: Meta, split: str, *, drop_unknown: bool) -> Meta:
    """Checks the split lists and fills in a missing one.

    ``val`` and ``test`` stand in for each other; if both are missing, there are no evaluation images.

    Args:
        meta: transforms.
        split: the split that will be read: train, val or test.
        drop_unknown: leave out names that belong to no frame instead of refusing them.

    Returns:
        The transforms with a list for ``split``, if they have any lists.

    Raises:
        CaptureError: the training list is missing, or a list has names that belong to no frame.
    """
    lists = {name: meta[f"{name}_filenames"] for name in SPLITS if f"{name}_filenames" in meta}
    if not lists:
        return meta
    if "train" not in lists:
        raise CaptureError(
            f"transforms.json has {', '.join(f'{name}_filenames' for name in lists)} but no train_filenames: "
            "list the training images as well, or remove the lists."
        )
    known = {Path(frame["file_path"]) for frame in meta["frames"]}
    for name, names in lists.items():
        unknown = [entry for entry in names if Path(entry) not in known]
        if unknown and not drop_unknown:
            raise CaptureError(
                f"{name}_filenames in transforms.json lists {len(unknown)} images that no frame has "
                f"({name_some(unknown)}): correct the list, or use --drop-missing-frames True."
            )
        lists[name] = [entry for entry in names if Path(entry) in known]
    other = {"val": "test", "test": "val"}.get(split)
    if split not in lists:
        lists[split] = lists.get(other or "", [])
    return {**meta, **{f"{name}_filenames": names for name, names in lists.items()}}


def check_dataparser_outputs(outputs: DataparserOutputs, *, check_files: bool = True, min_images: int = 2) -> None:
    """Checks the outputs of any dataparser.

    Args:
        outputs: of one split.
        check_files: whether the image files must exist.
        min_images: smallest number of images, 2 for training.

    Raises:
        CaptureError: too few images, missing files, or poses that are not rigid.
    """
    paths = [Path(path) for path in outputs.image_filenames]
    if min_images >= 2:
        require_images(min(len(paths), 2), "The training split of the capture")
    if check_files:
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise CaptureError(
                f"{len(missing)} of {len(paths)} images are not there ({name_some(missing)}): "
                "copy them back, or take their frames out."
            )
    poses: Float[np.ndarray, "cams 3 4"] = outputs.cameras.camera_to_worlds.reshape(-1, 3, 4).cpu().double().numpy()
    for path, pose in zip(paths, poses, strict=True):
        check_pose(pose, path)
