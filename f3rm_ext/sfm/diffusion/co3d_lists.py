"""Makes what training reads: lists of CO3D's frames, or data in CO3D's format from captures with depth."""

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from nerfstudio.cameras.cameras import CAMERA_MODEL_TO_TYPE, CameraType
from PIL import Image

from f3rm_ext.capture.checks import DISTORTION
from f3rm_ext.capture.ground_truth import bounding_box
from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.sfm.capture_cameras import CaptureCameras, has_depth, read_capture_cameras, read_depth
from f3rm_ext.sfm.diffusion.co3d import CAMERA_KEYS, IMAGES, Split, depth_path, list_path, write_depth
from f3rm_ext.utils.output_file import replace_file, write_file
from f3rm_ext.utils.pictures import UNREADABLE, read_picture
from f3rm_ext.utils.provenance import require_ours, sign_gzip

COMMAND = "f3rm-ext sfm prepare"
MIN_QUALITY = 0.5
"""Smallest viewpoint quality of a sequence of CO3D."""
MASK_THRESHOLD = 0.4
"""Share of full opacity above which a pixel of a mask belongs to the object."""
_SET_LIST = "set_lists/set_lists_fewview_dev.json"
_INTRINSICS = "ndc_isotropic"
_SPLITS: tuple[Split, Split] = ("train", "test")
Frames = dict[str, list[dict[str, Any]]]


def write_list(root: Path, category: str, split: Split, sequences: Frames) -> Path:
    """Writes the list of a category: for each sequence its frames."""
    path = list_path(root, category, split)
    write_file(path, sign_gzip(json.dumps(sequences).encode(), COMMAND), "--output")
    return path


def require_own_lists(root: Path, category: str) -> None:
    """Raises ConfigError where another program wrote a list of the category; to be called before the work begins."""
    for split in _SPLITS:
        require_ours(list_path(root, category, split), COMMAND, "--output or --category")


def convert_captures(
    captures: Sequence[Path], root: Path, category: str, on_image: Callable[[int], None] = lambda count: None
) -> dict[Split, int]:
    """Writes captures with depth as sequences of one category. Held-out images go to the test list. Those that a
    capture's list of training images leaves out are not written.

    Args:
        captures: nerfstudio captures whose frames have depth maps, by perspective cameras without distortion.
        root: folder that training gets as ``dataset.path``.

    Raises:
        CaptureError: a capture has no depth, is distorted, or lacks a file.
        ConfigError: another program wrote a list of the category, or the folder cannot be written.
    """
    require_own_lists(root, category)
    lists: dict[Split, Frames] = {"train": {}, "test": {}}
    count = 0
    for number, data in enumerate(captures):
        capture = read_capture_cameras(data)
        _require_depth_and_pinholes(capture, data)
        name = f"{number:03d}_{capture.folder.resolve().name}"
        folder = root / IMAGES / category / name
        cameras = capture.cameras.to_pytorch3d()
        split_of = _read_splits(capture)
        for index, frame in enumerate(capture.frames):
            split = split_of(Path(frame["file_path"]))
            if split is None:
                continue
            file = f"frame{index:06d}.jpg"
            photo = capture.folder / frame["file_path"]
            try:
                pixels = read_picture(photo)
            except UNREADABLE as error:
                raise CaptureError(f"The image {photo} cannot be read ({error}): copy it back.") from error
            with replace_file(folder / "images" / file, "--output") as stream:
                Image.fromarray(pixels).save(stream, "JPEG", quality=95)
            write_depth(depth_path(folder / "images" / file), read_depth(frame, capture.folder))
            lists[split].setdefault(name, []).append(
                {
                    "filepath": f"{category}/{name}/images/{file}",
                    "bbox": [0, 0, int(frame["w"]), int(frame["h"])],
                    **{key: getattr(cameras, key)[index].tolist() for key in CAMERA_KEYS},
                }
            )
            count += 1
            on_image(count)
    for split in _SPLITS:
        write_list(root, category, split, lists[split])
    return {split: sum(map(len, lists[split].values())) for split in _SPLITS}


def _read_splits(capture: CaptureCameras) -> Callable[[Path], Split | None]:
    """Returns what tells the list of an image; None for those in none of a capture that lists its training images."""
    lists = {
        name: {Path(path) for path in capture.frames[0][f"{name}_filenames"]}
        for name in ("train", "val", "test")
        if f"{name}_filenames" in capture.frames[0]
    }

    def split_of(path: Path) -> Split | None:
        if any(path in lists.get(name, ()) for name in ("val", "test")):
            return "test"
        return "train" if path in lists.get("train", (path,)) else None

    return split_of


def _require_depth_and_pinholes(capture: CaptureCameras, data: Path) -> None:
    if not has_depth(capture, range(len(capture.frames))):
        raise CaptureError(f"{data} has frames without depth_file_path: endpoints of rays are made of depth maps.")
    for frame in capture.frames:
        model = frame.get("camera_model", "OPENCV")
        if CAMERA_MODEL_TO_TYPE.get(model) != CameraType.PERSPECTIVE:
            raise CaptureError(
                f"{data} has cameras of the model {model}, but CO3D's are pinholes: make perspective images first."
            )
        if np.any(np.concatenate([np.ravel(frame.get(key, 0.0)) for key in DISTORTION])):
            raise CaptureError(f"{data} has lens distortion, but CO3D's cameras have none: undistort its images first.")


class FrameLists(NamedTuple):
    """The lists of a category."""

    counts: dict[Split, int]
    """Number of images in each list."""
    missing: dict[str, Path]
    """The first missing file of each sequence that lacks some; its frames with missing files are left out."""


def find_downloads(root: Path) -> list[str]:
    """Returns the categories of CO3D in ``root/co3d``, sorted."""
    categories = sorted(path.parent.name for path in (root / IMAGES).glob("*/frame_annotations.jgz"))
    if not categories:
        raise ConfigError(f"There are no categories of CO3D in {root / IMAGES}: download them there.")
    return categories


def list_co3d(root: Path, category: str, on_frame: Callable[[int], None] = lambda count: None) -> FrameLists:
    """Writes the lists of a category of CO3D v2 as RayDiffusion's preparation does.

    Frames are those of the few-view development set, of sequences whose viewpoint quality is above 0.5. Boxes hold the
    pixels of the masks above 0.4; frames with an empty mask are left out.

    Args:
        root: folder that holds ``co3d`` with the category as downloaded, or some of its sequences.

    Raises:
        ConfigError: a list of the category is missing, all images are, its cameras are those of CO3D v1, or another
            program wrote a list of this name.
    """
    require_own_lists(root, category)
    folder = root / IMAGES / category
    frames = _read(folder / "frame_annotations.jgz")
    sequences = {entry["sequence_name"]: entry for entry in _read(folder / "sequence_annotations.jgz")}
    sets: Mapping[str, Iterable[Sequence[Any]]] = _read(folder / _SET_LIST)
    good = {name for name, entry in sequences.items() if (entry.get("viewpoint_quality_score") or 0) > MIN_QUALITY}
    by_path = {entry["image"]["path"]: entry for entry in frames}
    listed = FrameLists({}, {})
    count = 0
    for split in _SPLITS:
        lists: Frames = {}
        for name, _, path in sets[split]:
            count += 1
            on_frame(count)
            if name not in good or path not in by_path:
                continue
            mask, viewpoint = root / IMAGES / by_path[path]["mask"]["path"], by_path[path]["viewpoint"]
            if viewpoint.get("intrinsics_format", _INTRINSICS) != _INTRINSICS:
                raise ConfigError(
                    f"The cameras of {folder} are in {viewpoint['intrinsics_format']}, as in CO3D v1: download v2."
                )
            image = root / IMAGES / path
            absent = [file for file in (image, depth_path(image), mask) if not file.is_file()]
            if absent:
                listed.missing.setdefault(name, absent[0])
                continue
            box = _box_of_mask(mask)
            if box is not None:
                camera = {key: viewpoint[key] for key in CAMERA_KEYS}
                lists.setdefault(name, []).append({"filepath": path, "bbox": box, **camera})
        write_list(root, category, split, lists)
        listed.counts[split] = sum(map(len, lists.values()))
    if listed.missing and not any(listed.counts.values()):
        raise ConfigError(
            f"No sequence of {category} is complete: {next(iter(listed.missing.values()))} is missing, for one. "
            "Download images, depths and masks of the sequences you want."
        )
    return listed


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".jgz":
            with gzip.open(path, "rt", encoding="utf-8") as stream:
                return json.load(stream)
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{path} of CO3D cannot be read ({error}): download the category again.") from error


def _box_of_mask(path: Path) -> list[int] | None:
    """Left, upper, right and lower edge of an object, pixels."""
    try:
        with Image.open(path) as image:
            mask = np.asarray(image.convert("L")) > MASK_THRESHOLD * 255
    except UNREADABLE as error:
        raise ConfigError(f"The mask {path} of CO3D cannot be read ({error}): download the sequence again.") from error
    return [int(edge) for edge in bounding_box(mask)] if mask.any() else None
