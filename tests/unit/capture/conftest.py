"""A small good capture to break in one way at a time."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


class Capture:
    """A folder with images and transforms.json; ``meta`` is written by :meth:`save`."""

    def __init__(self, folder: Path, count: int, size: tuple[int, int] = (16, 12)) -> None:
        self.folder = folder
        (folder / "images").mkdir(parents=True)
        self.meta: dict = {
            "camera_model": "OPENCV", "w": size[0], "h": size[1], "fl_x": 18.0, "fl_y": 18.0, "cx": 8.0, "cy": 6.0,
            "frames": [],
        }  # fmt: skip
        for i in range(count):
            name = f"images/{i:02d}.png"
            self.write_image(name, size)
            angle = 2 * math.pi * i / count
            pose = np.eye(4)
            pose[:3, :3] = [[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0], [0, 0, 1]]
            pose[:3, 3] = [math.cos(angle), math.sin(angle), i / count]
            self.meta["frames"].append({"file_path": name, "transform_matrix": pose.tolist()})
        self.save()

    @property
    def frames(self) -> list[dict]:
        return self.meta["frames"]

    @property
    def names(self) -> list[str]:
        return [frame["file_path"] for frame in self.frames]

    def write_image(self, name: str, size: tuple[int, int], mode: str = "RGB", **options) -> None:
        """Noise, so that files are not tiny."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        shape = (size[1], size[0], 3)
        noise = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
        Image.fromarray(noise).convert(mode).save(path, **options)

    def save(self) -> "Capture":
        (self.folder / "transforms.json").write_text(json.dumps(self.meta))
        return self

    def contents(self) -> dict[str, bytes]:
        """All files, to see that nothing has changed."""
        return {str(path.relative_to(self.folder)): path.read_bytes()
                for path in sorted(self.folder.rglob("*")) if path.is_file()}  # fmt: skip


@pytest.fixture
def make_capture(tmp_path: Path) -> Callable[..., Capture]:
    """Makes captures of a number of images."""

    def make(count: int = 6, **options) -> Capture:
        return Capture(tmp_path / f"capture{len(list(tmp_path.iterdir()))}", count, **options)

    return make


@pytest.fixture
def capture(make_capture: Callable[..., Capture]) -> Capture:
    """A good one of six images."""
    return make_capture()
