"""Ground truth of a capture: labels and depth of its images.

Labels come in two formats. *Label images* are named in transforms.json: ``classes`` at the top, and
``label_file_path`` or ``label_path`` per frame; each pixel holds the number of its class. *Polygons* are those of
LERF-OVS: one JSON file per labelled frame with ``info`` (name, width, height) and ``objects`` (category,
segmentation, bbox).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Float32, Int
from PIL import Image

from f3rm_ext.errors import CaptureError
from f3rm_ext.utils.json_shape import parse_json
from f3rm_ext.utils.pictures import UNREADABLE

ROOM_PARTS = ("room",)
"""Kinds of things in scene.json that are not objects to search for."""
LABEL_KEYS = ("label_file_path", "label_path")
DEPTH_KEYS = ("depth_file_path", "depth_path")


class _Thing(TypedDict):
    label: int
    kind: str


class _Scene(TypedDict):
    objects: list[_Thing]


@dataclass(frozen=True)
class LabelledObject:
    """A labelled object."""

    label: int
    """Value of the object in label images."""
    name: str


@dataclass(frozen=True)
class LabelledView:
    """The labels of one image at some size."""

    masks: Mapping[str, Bool[np.ndarray, "h w"]]
    """Mask of each visible class."""
    boxes: Mapping[str, tuple[tuple[float, float, float, float], ...]]
    """Boxes (left, top, right, bottom) of each visible class, pixels; one per object."""


@runtime_checkable
class LabelSource(Protocol):
    """Labels of the images of a capture."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labelled objects."""
        ...

    def size_px(self, image: Path) -> tuple[int, int] | None:
        """Returns height and width of the labels of an image; None if it has none."""
        ...

    def view(self, image: Path, height_px: int, width_px: int) -> LabelledView | None:
        """Returns the labels of an image, resampled to a size by nearest pixel; None if it has none. Raises
        CaptureError if there are labels, but they cannot be read."""
        ...


class CaptureGroundTruth:
    """Label images and depth images named in a capture's transforms.json; empty if it names none."""

    def __init__(self, data: Path) -> None:
        path = data if data.suffix == ".json" else data / "transforms.json"
        self.folder = path.parent
        meta = _read_json(path) if path.is_file() else {}
        entries = meta["frames"] if isinstance(meta.get("frames"), list) else []
        frames = [each for each in entries if isinstance(each, dict) and isinstance(each.get("file_path"), str)]
        self._depth_unit_m = meta.get("depth_unit_scale_factor")
        self._frames = {(self.folder / frame["file_path"]).resolve(): frame for frame in frames}
        # Copies of the images at other sizes, as in images_4, have the same names.
        names = [Path(frame["file_path"]).name for frame in frames]
        self._by_name = {} if len(set(names)) < len(names) else dict(zip(names, frames, strict=True))
        names = meta.get("classes")
        self.names: tuple[str, ...] = tuple(map(str, names)) if isinstance(names, list) else ()
        """Names of all labels, beginning with label 0, which means nothing."""
        self.things = self._read_things()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the objects."""
        return tuple(thing.name for thing in self.things)

    @property
    def has_labels(self) -> bool:
        """Whether there are classes and at least one label image."""
        return bool(self.things) and any(_first_value(frame, LABEL_KEYS) for frame in self._frames.values())

    def depth_m(self, image: Path, height_px: int, width_px: int) -> Float32[np.ndarray, "h w"] | None:
        """Returns depth along the optical axis, metres, 0 if unknown, by nearest pixel; None without a depth image."""
        path = self.file(image, DEPTH_KEYS) if self._depth_unit_m else None
        values = None if path is None else nearest(read_map(path, "depth map"), height_px, width_px)
        return None if values is None else (values * float(self._depth_unit_m or 0.0)).astype(np.float32)

    def labels(self, image: Path, height_px: int, width_px: int) -> Int[np.ndarray, "h w"] | None:
        """Returns the label of each pixel, 0 for nothing, by nearest pixel; None without a label image."""
        values = self.label_image(image) if self.things else None
        return None if values is None else nearest(values, height_px, width_px)

    def label_image(self, image: Path) -> Int[np.ndarray, "h w"] | None:
        """Returns the label image of a photo at its own size; None if it has none."""
        path = self.file(image, LABEL_KEYS)
        return None if path is None else read_map(path, "label image").astype(np.int64)

    def files(self, keys: tuple[str, ...]) -> list[Path]:
        """Returns the files that frames name under one of these keys, in the order of frames."""
        files = [self.file(image, keys) for image in self._frames]
        return [path for path in files if path is not None]

    def size_px(self, image: Path) -> tuple[int, int] | None:
        """See :meth:`LabelSource.size_px`."""
        values = self.label_image(image) if self.things else None
        return None if values is None else (values.shape[0], values.shape[1])

    def view(self, image: Path, height_px: int, width_px: int) -> LabelledView | None:
        """See :meth:`LabelSource.view`."""
        labels = self.labels(image, height_px, width_px)
        if labels is None:
            return None
        masks = {thing.name: labels == thing.label for thing in self.things}
        masks = {name: mask for name, mask in masks.items() if mask.any()}
        return LabelledView(masks, {name: (bounding_box(mask),) for name, mask in masks.items()})

    def file(self, image: Path, keys: tuple[str, ...]) -> Path | None:
        """Returns the file that a photo's frame names under one of these keys; None if there is none."""
        name = _first_value(self._frames.get(image.resolve()) or self._by_name.get(image.name) or {}, keys)
        return None if name is None or not (self.folder / name).is_file() else self.folder / name

    def _read_things(self) -> list[LabelledObject]:
        try:
            scene = parse_json((self.folder / "scene.json").read_bytes(), _Scene)
            skipped = {thing["label"] for thing in scene["objects"] if thing["kind"] in ROOM_PARTS}
        except (OSError, ValueError):
            skipped = set()
        return [LabelledObject(i, name) for i, name in enumerate(self.names) if i and i not in skipped]


class PolygonLabels:
    """Labels in the format of LERF-OVS: a folder with one JSON file per labelled frame; other files are skipped. Raises
    CaptureError if there is no such file, or one cannot be understood."""

    def __init__(self, folder: Path) -> None:
        self._frames: dict[str, dict[str, Any]] = {}
        names: dict[str, None] = {}
        for path in sorted(folder.glob("*.json")):
            frame = _read_json(path)
            if not isinstance(frame.get("objects"), list):
                continue
            try:
                size = float(frame["info"]["width"]), float(frame["info"]["height"])
                if not (0 < size[0] < float("inf") and 0 < size[1] < float("inf")):
                    raise ValueError(f"its size is {size[0]:g} x {size[1]:g}")
                objects = [_polygon_object(entry) for entry in frame["objects"]]
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise CaptureError(
                    f"The labels {path} are not understood ({type(error).__name__}: {error}): each needs "
                    "info with width and height, and objects with category and segmentation."
                ) from error
            stem = Path(str(frame["info"].get("name") or path.stem)).stem
            self._frames[stem] = {"size": size, "objects": objects}
            names.update(dict.fromkeys(name for name, _, _ in objects))
        if not self._frames:
            raise CaptureError(
                f"There are no labels in {folder}: it should have a JSON file with `objects` for each labelled frame."
            )
        self.classes = tuple(names)

    @property
    def images(self) -> list[Path]:
        """Names of the labelled images, without suffix."""
        return [Path(stem) for stem in self._frames]

    def size_px(self, image: Path) -> tuple[int, int] | None:
        """See :meth:`LabelSource.size_px`."""
        frame = self._frames.get(image.stem)
        return None if frame is None else (round(frame["size"][1]), round(frame["size"][0]))

    def view(self, image: Path, height_px: int, width_px: int) -> LabelledView | None:
        """See :meth:`LabelSource.view`."""
        frame = self._frames.get(image.stem)
        if frame is None:
            return None
        scale = np.asarray([width_px / frame["size"][0], height_px / frame["size"][1]])
        masks: dict[str, np.ndarray] = {}
        boxes: dict[str, tuple[tuple[float, float, float, float], ...]] = {}
        for name, polygon, box in frame["objects"]:
            mask = polygon_mask(polygon * scale, height_px, width_px)
            masks[name] = masks[name] | mask if name in masks else mask
            left, top, right, bottom = (box.reshape(2, 2) * scale).reshape(-1).tolist()
            boxes[name] = (*boxes.get(name, ()), (left, top, right, bottom))
        return LabelledView(masks, boxes)


def nearest(image: np.ndarray, height_px: int, width_px: int) -> np.ndarray:
    """Resizes an image by nearest pixel.

    >>> nearest(np.array([[1, 2], [3, 4]]), height_px=2, width_px=4).tolist()
    [[1, 1, 2, 2], [3, 3, 4, 4]]
    """
    rows = ((np.arange(height_px) + 0.5) * image.shape[0] / height_px).astype(int)
    cols = ((np.arange(width_px) + 0.5) * image.shape[1] / width_px).astype(int)
    return image[rows][:, cols]


def polygon_mask(corners: Float[np.ndarray, "corners 2"], height_px: int, width_px: int) -> Bool[np.ndarray, "h w"]:
    """Returns a mask of the pixels whose centres lie inside a polygon, by the even-odd rule.

    Corners are (x, y) in continuous pixel coordinates. Drawing libraries such as Pillow also fill the outline, which
    would add half a pixel on all sides.

    >>> polygon_mask(np.array([[0.0, 0.0], [2.0, 0.0], [2.0, 1.0], [0.0, 1.0]]), height_px=2, width_px=3).astype(int)
    array([[1, 1, 0],
           [0, 0, 0]])
    """
    centres = np.arange(height_px) + 0.5
    crossings = np.zeros((height_px, width_px + 1), dtype=np.int64)
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        rows = np.flatnonzero((ay > centres) != (by > centres))
        x = ax + (centres[rows] - ay) * (bx - ax) / (by - ay if by != ay else 1.0)
        crossings[rows, np.clip(np.ceil(x - 0.5), 0, width_px).astype(int)] += 1
    return crossings[:, :width_px].cumsum(axis=1) % 2 == 1


def _polygon_object(entry: Any) -> tuple[str, np.ndarray, np.ndarray]:
    """Returns category, polygon (points, 2) and box (left, top, right, bottom); the polygon's box if none is given."""
    polygon = np.asarray(entry["segmentation"], dtype=np.float64).reshape(-1, 2)
    if len(polygon) < 3 or not np.isfinite(polygon).all():
        raise ValueError("a polygon has fewer than three points, or one that is not finite")
    box = entry.get("bbox") or [*polygon.min(axis=0), *polygon.max(axis=0)]
    return str(entry["category"]), polygon, np.asarray(box, dtype=np.float64).reshape(4)


def bounding_box(mask: Bool[np.ndarray, "h w"]) -> tuple[float, float, float, float]:
    """Returns the left, upper, right and lower edge, px, of the pixels that a mask keeps, at least one."""
    rows, cols = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return float(cols[0]), float(rows[0]), float(cols[-1] + 1), float(rows[-1] + 1)


def _first_value(frame: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((str(frame[key]) for key in keys if frame.get(key)), None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = parse_json(path.read_bytes(), Any)
    except (OSError, ValueError) as error:
        raise CaptureError(f"{path} cannot be read ({error}): mend it, or take it away.") from error
    return raw if isinstance(raw, dict) else {}


def read_map(path: Path, kind: str) -> np.ndarray:
    """Reads labels or depth of a photo, (h, w): an image with one channel, or a NumPy file, as the file has them.

    Args:
        kind: what it is, for messages.

    Raises:
        CaptureError: the file is missing, damaged, or has not one value for each pixel.
    """
    try:
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False)
        else:
            with Image.open(path) as picture:
                values = np.asarray(picture)
    except (*UNREADABLE, EOFError) as error:
        raise CaptureError(f"The {kind} {path} cannot be read ({error}): write it again.") from error
    if values.ndim != 2:
        raise CaptureError(f"The {kind} {path} has {values.ndim} axes, but needs height and width: write it again.")
    return values
