"""Exact depth and labels of a capture, where it has them (a synthetic capture does)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int
from PIL import Image

ROOM_PARTS = ("room",)
"""Kinds of things in scene.json that are not objects one would look for."""


@dataclass(frozen=True)
class Thing:
    """A labelled object."""

    label: int
    """Its value in label images."""
    name: str
    """Its name."""


class Truth:
    """What a capture knows exactly about its images; empty for captures that know nothing.

    Args:
        data: folder of the capture, or its transforms.json.
    """

    def __init__(self, data: Path) -> None:
        path = data if data.suffix == ".json" else data / "transforms.json"
        self.folder = path.parent
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        self._depth_unit_m = meta.get("depth_unit_scale_factor")
        self._frames = {(self.folder / frame["file_path"]).resolve(): frame for frame in meta.get("frames", [])}
        self.things = self._read_things(meta.get("classes"))

    @property
    def exact_depth(self) -> bool:
        """Whether depth images come with the unit they are in."""
        return self._depth_unit_m is not None and any("depth_file_path" in frame for frame in self._frames.values())

    def depth_m(self, image: Path, height_px: int, width_px: int) -> Float32[np.ndarray, "h w"] | None:
        """Depth along the optical axis at pixel centres, metres, 0 where unknown; None where there is none.

        Args:
            image: file of the photo.
            height_px: size wanted; the nearest pixel is taken.
            width_px: size wanted.
        """
        values = self._read(image, "depth_file_path", height_px, width_px) if self._depth_unit_m else None
        return None if values is None else (values * float(self._depth_unit_m or 0.0)).astype(np.float32)

    def labels(self, image: Path, height_px: int, width_px: int) -> Int[np.ndarray, "h w"] | None:
        """Label of each pixel, 0 for nothing; None where there are none. Arguments as :meth:`depth_m`."""
        values = self._read(image, "label_file_path", height_px, width_px) if self.things else None
        return None if values is None else values.astype(np.int64)

    def _read(self, image: Path, key: str, height_px: int, width_px: int) -> np.ndarray | None:
        name = self._frames.get(image.resolve(), {}).get(key)
        if name is None or not (self.folder / name).is_file():
            return None
        with Image.open(self.folder / name) as picture:
            values = np.asarray(picture)
        if values.ndim != 2:
            return None
        rows = ((np.arange(height_px) + 0.5) * values.shape[0] / height_px).astype(int)
        cols = ((np.arange(width_px) + 0.5) * values.shape[1] / width_px).astype(int)
        return values[rows][:, cols]

    def _read_things(self, names: Any) -> list[Thing]:
        if not isinstance(names, list):
            return []
        try:
            scene = json.loads((self.folder / "scene.json").read_text(encoding="utf-8"))
            skipped = {thing["label"] for thing in scene["objects"] if thing["kind"] in ROOM_PARTS}
        except (OSError, ValueError, KeyError, TypeError):
            skipped = set()
        return [Thing(i, str(name)) for i, name in enumerate(names) if i and i not in skipped]
