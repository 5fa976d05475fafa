"""Checks of a capture before anything is trained on it: transforms.json, poses, intrinsics, splits."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
from jaxtyping import Float, Float64
from msgspec import Meta as Limits
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs

from f3rm_ext.capture.colmap_model import capture_files, read_model
from f3rm_ext.capture.images import name_some
from f3rm_ext.errors import CaptureError
from f3rm_ext.utils.json_shape import parse_json

RIGID_TOLERANCE = 1e-2
"""Largest entry of |RᵀR - I| of a rotation; poses written with three decimals stay well below it."""
INTRINSICS = ("fl_x", "fl_y", "cx", "cy", "w", "h")
DISTORTION = ("k1", "k2", "k3", "k4", "p1", "p2", "distortion_params")
SPLITS = ("train", "val", "test")
FARTHEST = 1e9
"""Largest coordinate or intrinsic that is believed: areas of triangles of that size still have a square in float32."""
FAR_SPREADS = 1000.0
"""Distance of the cameras from the origin, in lengths of what they span, from which float32 is too coarse for them."""
ORIGIN_KEY = "capture_origin"
"""Key of transforms, as they are read, for the point of the file's frame to which poses are relative."""
LEAST_SPAN = 1e-9
"""Largest distance between cameras that are at one place, units of the capture."""
_SUFFIXES = (".png", ".jpg", ".jpeg")
"""Suffixes of images whose names in transforms.json have none, in the order in which they are tried."""
LEAST_PX = 1e-3
"""Smallest focal length or size that is believed."""
Meta = dict[str, Any]
Number = Annotated[float, Limits(ge=-FARTHEST, le=FARTHEST)]
Factor = Annotated[float, Limits(ge=1 / FARTHEST, le=FARTHEST)]
Matrix = list[list[Number]]


class _Lens(TypedDict, total=False):
    """What may stand at the top or in a frame; sizes and focal lengths are checked when all are there."""

    camera_model: str
    k1: Number
    k2: Number
    k3: Number
    k4: Number
    p1: Number
    p2: Number
    distortion_params: Annotated[list[Number], Limits(min_length=6, max_length=6)]
    depth_unit_scale_factor: Factor


class _Transforms(_Lens, total=False):
    """What is read of transforms.json beside poses, paths and intrinsics, which have checks of their own."""

    frames: list[_Lens]
    applied_transform: Annotated[Matrix, Limits(min_length=3, max_length=4)]
    applied_scale: Factor
    orientation_override: Literal["pca", "up", "vertical", "none"]
    fisheye_crop_radius: Factor | None
    train_filenames: list[str]
    val_filenames: list[str]
    test_filenames: list[str]


_OLD_TRANSFORM = [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, -1.0, 0.0]]
"""What was done to the poses of captures by COLMAP that do not say it."""


def read_transforms(data: Path) -> tuple[Meta, Path]:
    """Reads transforms.json and tells what its paths are relative to; without it COLMAP's model, in the same form.

    Poses far from the origin, as those in geographic coordinates, are relative to the point at :data:`ORIGIN_KEY`. They
    always have an ``applied_transform``.

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
        return _move_near(read_model(data, path.parent)), data
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CaptureError(f"{path} cannot be read ({error}): check its permissions.") from error
    try:
        meta: Meta = parse_json(content, _Transforms)  # type: ignore[assignment]
    except ValueError as error:
        raise CaptureError(
            f'{path} is not valid JSON with a list "frames", as nerfstudio has it ({error}): it may be cut short, so '
            "write it again."
        ) from error
    if "frames" not in meta:
        raise CaptureError(f'{path} has no list "frames", as nerfstudio has it: name the images and poses there.')
    for number, frame in enumerate(meta["frames"]):
        if "file_path" not in frame:
            raise CaptureError(f"Frame {number} of {path} has no file_path: name its image, or take the frame out.")
    for key, value in _paths(meta):
        if not _can_be_path(value):
            raise CaptureError(f"The {key} {str(value)[:80]!r} of {path} cannot be a path: give the name of a file.")
    _complete_names(meta, path.parent)
    if "applied_transform" in meta:
        meta["applied_transform"] = _parse_transform(meta["applied_transform"], path)
    else:  # by nerfstudio's rule, which depends on whether --data is the folder or the file
        is_old = (path.parent / "colmap" / "sparse" / "0").exists()
        meta["applied_transform"] = np.eye(4)[:3].tolist() if not is_old else _OLD_TRANSFORM
    return _move_near(meta), path.parent


def _move_near(meta: Meta) -> Meta:
    """Returns the transforms with poses relative to a point amid them if float32 would not tell them apart."""
    meta.pop(ORIGIN_KEY, None)
    poses = _read_poses(meta["frames"])
    if poses is None:
        return meta  # which is refused later, in a sentence
    centers = poses[:, :3, 3]
    middle = centers.mean(axis=0)
    spread = float(np.abs(centers - middle).max())
    if not 0 < spread * FAR_SPREADS < np.abs(middle).max():
        return meta
    origin = middle.round(max(0, math.ceil(-math.log10(spread))))
    poses[:, :3, 3] -= origin
    frames = [{**frame, "transform_matrix": pose.tolist()} for frame, pose in zip(meta["frames"], poses, strict=True)]
    return {**meta, "frames": frames, ORIGIN_KEY: origin.tolist()}


def _paths(meta: Meta) -> Iterator[tuple[str, object]]:
    """Yields all paths of transforms.json with their keys."""
    for owner in (meta, *meta["frames"]):
        yield from ((key, value) for key, value in owner.items() if key.endswith("_path"))
    for split in SPLITS:
        yield from ((f"{split}_filenames", name) for name in meta.get(f"{split}_filenames", ()))


def _complete_names(meta: Meta, folder: Path) -> None:
    """Gives names of images without suffix, as NeRFCapture and instant-ngp have them, those of their files."""

    def complete(name: str) -> str:
        if Path(name).suffix:
            return name
        return next((name + suffix for suffix in _SUFFIXES if (folder / (name + suffix)).is_file()), name)

    for frame in meta["frames"]:
        frame["file_path"] = complete(frame["file_path"])
    for key in (f"{split}_filenames" for split in SPLITS):
        if key in meta:
            meta[key] = [complete(name) for name in meta[key]]


def _can_be_path(value: object) -> bool:
    """Returns whether the system can be asked for a file of this name."""
    try:
        parts = os.fsencode(value).split(b"/") if isinstance(value, str) and value else []
    except UnicodeEncodeError:
        return False
    return bool(parts) and b"\0" not in b"/".join(parts) and sum(map(len, parts)) < 2048 and max(map(len, parts)) < 256


def _parse_transform(rows: Sequence[Sequence[float | int]], path: Path) -> list[list[float]]:
    """Returns the first three rows of what was done to the poses, if it can be undone."""
    widths = {len(row) for row in rows}
    matrix = np.array(rows, dtype=np.float64)[:3] if widths == {4} else np.zeros((3, 4))
    if np.linalg.matrix_rank(matrix[:, :3]) < 3:
        raise CaptureError(
            f"The applied_transform of {path} is no matrix of 3 x 4 numbers that can be inverted: correct it, or take "
            "it out if the poses are as COLMAP has them."
        )
    return matrix.tolist()


def require_images(count: int, where: object) -> None:
    """Raises a :class:`CaptureError` unless there are at least two images."""
    if count < 2:
        number = ("no image", "a single image")[count]
        raise CaptureError(f"{where} has {number}, but a scene needs at least two, and better fifty: add photos.")


def check_pose(matrix: object, name: object, shapes: Sequence[tuple[int, int]] = ((4, 4), (3, 4))) -> None:
    """Checks one camera-to-world matrix.

    A uniform scale in the rotation is refused as well, because positions may or may not include it.

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
    except (TypeError, ValueError, OverflowError):
        pose = np.empty(0)
    if pose.shape not in shapes:
        raise CaptureError(f"{where} is not a matrix of 4 x 4 numbers: {remedy}.")
    if not (np.abs(pose) <= FARTHEST).all():
        raise CaptureError(f"{where} has a NaN or infinite entry, or one above {FARTHEST:g}: {remedy}.")
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
    if _are_rigid(_read_poses(frames)):
        return  # one by one, a hundred thousand take ten seconds
    for frame in frames:
        check_pose(frame.get("transform_matrix"), frame["file_path"], ((4, 4),))


def check_places(frames: Sequence[Mapping[str, Any]]) -> None:
    """Raises CaptureError if all cameras are at one place: nothing tells distances, and nothing a scale."""
    centers = np.array([frame["transform_matrix"] for frame in frames], dtype=np.float64)[:, :3, 3]
    if np.ptp(centers, axis=0).max() <= LEAST_SPAN:
        raise CaptureError(
            "All cameras are at one place, so their photos do not tell how far things are: add photos from other "
            "places, or train a field that only turns, with `f3rm-ext-data --auto-scale-poses False` at the end of "
            "`ns-train`."
        )


def _read_poses(frames: Sequence[Mapping[str, Any]]) -> Float64[np.ndarray, "frames 4 4"] | None:
    """Returns the poses of all frames; None if one is missing or no 4 x 4 matrix of finite numbers."""
    try:
        poses = np.array([frame.get("transform_matrix") for frame in frames], dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return poses if poses.shape[1:] == (4, 4) and np.isfinite(poses).all() else None


def _are_rigid(poses: Float64[np.ndarray, "frames 4 4"] | None) -> bool:
    """Returns whether :func:`check_pose` passes all of these."""
    if poses is None or not (np.abs(poses) <= FARTHEST).all():
        return False
    rotations = poses[:, :3, :3]
    deviation = np.abs(rotations.transpose(0, 2, 1) @ rotations - np.eye(3)).max(initial=0.0)
    last_rows = np.abs(poses[:, 3] - np.array([0, 0, 0, 1])).max(initial=0.0)
    return bool(max(deviation, last_rows) <= RIGID_TOLERANCE and (np.linalg.det(rotations) > 0).all())


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


def share_camera_model(meta: Meta, kinds: Mapping[str, object]) -> Meta:
    """Returns the transforms with the camera model of the frames at the top, where alone nerfstudio reads it.

    nerfstudio writes it into the frames if they have several cameras.

    Args:
        kinds: the kind of camera that each model is treated as.

    Raises:
        CaptureError: a model is unknown, or the frames have cameras of several kinds.
    """
    shared = meta.get("camera_model", "OPENCV")
    models = dict.fromkeys(frame.get("camera_model", shared) for frame in meta["frames"])
    for model in models:
        if model not in kinds:
            raise CaptureError(f"The camera_model {model} is not known: use one of {', '.join(sorted(kinds))}.")
    if len({kinds[model] for model in models}) > 1:
        raise CaptureError(
            f"The frames mix kinds of cameras ({', '.join(sorted(models))}), but a run has cameras of one kind: make a "
            "capture of each, or undistort the photos beforehand, for instance by `colmap image_undistorter`."
        )
    return {**meta, "camera_model": next(iter(models), shared)}


def check_intrinsics(meta: Meta) -> None:
    """Checks that every frame has a focal length, a principal point and a size. Raises CaptureError if a value is
    missing or impossible."""
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
            number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
            if not abs(number) <= FARTHEST or (number < LEAST_PX and key not in ("cx", "cy")):
                raise CaptureError(
                    f"The intrinsic {key} of {frame['file_path']} is {str(value)[:80]}: it has to be a positive number "
                    "of pixels."
                )


def check_same_keys(frames: Sequence[Mapping[str, Any]], key: str) -> None:
    """Checks that either all frames or none name a file such as ``mask_path``. Raises CaptureError if only some frames
    name one."""
    without = [frame["file_path"] for frame in frames if key not in frame]
    if without and len(without) < len(frames):
        raise CaptureError(
            f"{len(without)} of {len(frames)} frames have no {key} ({name_some(without)}): "
            "give one to every frame, or to none."
        )


def check_splits(meta: Meta, split: str, *, drop_unknown: bool) -> Meta:
    """Checks the split lists, and fills in that of ``split`` if there are any.

    ``val`` and ``test`` stand in for each other; if both are missing, there are no evaluation images. With
    ``drop_unknown``, names that belong to no frame are left out instead of refused.

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
    """Checks the outputs of any dataparser; training needs two images. Raises CaptureError if there are too few, files
    are missing, or poses are not rigid."""
    paths = [Path(path) for path in outputs.image_filenames]
    if min_images >= 2:
        require_images(len(paths), "The training split of the capture")
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
