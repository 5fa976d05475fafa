"""A tiny capture whose pixels say where they are, and feature maps that say which image they are of."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.features.source import FeatureSource
from f3rm_ext.features.spec import DisplayBasis, FeatureSpec

CaptureMaker = Callable[..., Path]


def orbit_pose(i: int, count: int) -> list[list[float]]:
    """Camera on a circle, looking at the origin."""
    angle = 2 * math.pi * i / count
    back = np.array([math.cos(angle), math.sin(angle), 0.5])
    back /= np.linalg.norm(back)
    right = np.cross([0.0, 0.0, 1.0], back)
    right /= np.linalg.norm(right)
    pose = np.eye(4)
    pose[:3, :3] = np.stack([right, np.cross(back, right), back], axis=1)
    pose[:3, 3] = 2 * back
    return pose.tolist()


def keep_a_ball(i: int, height: int, width: int) -> np.ndarray:
    """About the silhouette of a ball beside the middle of an orbit of eight."""
    pose = np.array(orbit_pose(i, 8))
    x, y, z = (np.array([0.5, 0.2, 0.1]) - pose[:3, 3]) @ pose[:3, :3]
    row, column = np.mgrid[:height, :width] + 0.5
    return np.hypot(column - width / 2 + width * x / z, row - height / 2 - width * y / z) < width * 0.4 / -z


def picture(i: int, height: int, width: int, channels: int = 3) -> np.ndarray:
    """Red is 10 i, green the row, blue the column, alpha 128."""
    pixels = np.full((height, width, channels), 128, dtype=np.uint8)
    pixels[..., 0] = 10 * i
    pixels[..., 1] = np.arange(height)[:, None]
    pixels[..., 2] = np.arange(width)[None, :]
    return pixels


@pytest.fixture
def object_masks() -> Callable[[int, int, int], np.ndarray]:
    """Masks of an object for a capture of eight images."""
    return keep_a_ball


@pytest.fixture
def make_capture(tmp_path: Path) -> CaptureMaker:
    """Writes ``count`` PNG images and a transforms.json; returns the folder."""

    def make(
        count: int = 8,
        *,
        sizes: Sequence[tuple[int, int]] = ((12, 16),),
        alpha: Sequence[int] = (),
        masks: Callable[[int, int, int], np.ndarray] | None = None,
        val: Sequence[int] | None = (6, 7),
        extra: dict | None = None,
        name: str = "capture",
    ) -> Path:
        folder = tmp_path / name
        (folder / "images").mkdir(parents=True)
        frames = []
        for i in range(count):
            height, width = sizes[i % len(sizes)]
            file_path = f"images/{i:03d}.png"
            Image.fromarray(picture(i, height, width, 4 if i in alpha else 3)).save(folder / file_path)
            frame = {
                "file_path": file_path,
                "transform_matrix": orbit_pose(i, count),
                "w": width,
                "h": height,
                "fl_x": float(width),
                "fl_y": float(width),
                "cx": width / 2,
                "cy": height / 2,
            }
            if masks is not None:
                frame["mask_path"] = f"masks/{i:03d}.png"
                (folder / "masks").mkdir(exist_ok=True)
                mask = masks(i, height, width).astype(np.uint8) * 255
                Image.fromarray(mask).save(folder / frame["mask_path"])
            frames.append(frame)
        meta: dict = {"camera_model": "OPENCV", "frames": frames, **(extra or {})}
        if val is not None:
            names = [frame["file_path"] for frame in frames]
            meta["train_filenames"] = [file for i, file in enumerate(names) if i not in val]
            meta["val_filenames"] = meta["test_filenames"] = [names[i] for i in val]
        (folder / "transforms.json").write_text(json.dumps(meta))
        return folder

    return make


def position_map(i: int, height: int, width: int) -> FeatureMap:
    """Features (number of the image, y, x of the patch centre in pixels), 4-pixel patches."""
    grid = PatchGrid.covering(height // 4, width // 4, height, width)
    centres = grid.centres_px()
    number = np.full((*centres.shape[:2], 1), i, dtype=np.float32)
    return FeatureMap(values=np.concatenate([number, centres], axis=-1).astype(np.float16), grid=grid)


class FakeSource(FeatureSource):
    """The features of a data set without a store: see :func:`position_map`."""

    def __init__(self, dataset) -> None:
        super().__init__((), (), [""] * len(dataset))
        self.dataset = dataset
        self.loaded: list[int] = []
        display = DisplayBasis(torch.zeros(3), torch.eye(3), torch.zeros(3), torch.ones(3))
        self.specs = (FeatureSpec(name="where", dim=3, extractor="fake", identity={}, display=display),)

    def load(self, image_idx: int) -> dict[str, FeatureMap]:
        self.loaded.append(image_idx)
        height = int(self.dataset.cameras.height[image_idx])
        width = int(self.dataset.cameras.width[image_idx])
        return {"where": position_map(image_idx, height, width)}


@pytest.fixture
def fake_source() -> type[FakeSource]:
    """Makes the features of a data set."""
    return FakeSource


@pytest.fixture
def fake_features(monkeypatch: pytest.MonkeyPatch) -> list[list[FakeSource]]:
    """Replaces feature preparation; collects the sources handed out at each call."""
    import f3rm_ext.features.source as module

    calls: list[list[FakeSource]] = []

    def prepare(datasets, options, *, device, local_rank=0, world_size=1, local_size=1):
        calls.append([FakeSource(dataset) for dataset in datasets])
        return calls[-1]

    monkeypatch.setattr(module, "prepare_features", prepare)
    return calls
