"""A tiny capture whose pixels say where they are, and feature maps that say which image they are of."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.engine.callbacks import TrainingCallbackAttributes, TrainingCallbackLocation
from PIL import Image

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.data.cycling_config import flag
from f3rm_ext.data.datamanager import F3rmDataManagerConfig
from f3rm_ext.data.image_datamanager import ImageDataManagerConfig
from f3rm_ext.data.mixin import CyclingDataManager
from f3rm_ext.data.placement import Placement
from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.features.source import FeatureSource
from f3rm_ext.features.spec import DisplayBasis, FeatureSpec
from f3rm_ext.synthetic.cameras import look_at

CaptureMaker = Callable[..., Path]
DEFAULTS: dict[type, dict[str, Any]] = {
    F3rmDataManagerConfig: {
        "features": FeatureOptions(extractors=()),
        "train_num_rays_per_batch": 48,
        "eval_num_rays_per_batch": 20,
    },
    ImageDataManagerConfig: {"num_downscales": 0, "stereo_points": "never"},
}


def orbit_pose(i: int, count: int) -> list[list[float]]:
    """Camera on a circle, looking at the origin."""
    angle = 2 * math.pi * i / count
    place = np.array([math.cos(angle), math.sin(angle), 0.5])
    return look_at(2 * place / np.linalg.norm(place), np.zeros(3)).tolist()


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
    """Writes ``count`` PNG images and a transforms.json; returns the folder.

    ``masks`` keep the columns from a number on, the same for all images or one for each, or are made by a function.
    """

    def make(
        count: int = 8,
        *,
        sizes: Sequence[tuple[int, int]] = ((12, 16),),
        alpha: Sequence[int] = (),
        masks: int | Sequence[int] | Callable[[int, int, int], np.ndarray] | None = None,
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
                if callable(masks):
                    mask = masks(i, height, width)
                else:
                    mask = np.mgrid[:height, :width][1] >= (masks if isinstance(masks, int) else masks[i])
                Image.fromarray(mask.astype(np.uint8) * 255).save(folder / frame["mask_path"])
            frames.append(frame)
        meta: dict = {"camera_model": "OPENCV", "frames": frames, **(extra or {})}
        if val is not None:
            names = [frame["file_path"] for frame in frames]
            meta["train_filenames"] = [file for i, file in enumerate(names) if i not in val]
            meta["val_filenames"] = meta["test_filenames"] = [names[i] for i in val]
        (folder / "transforms.json").write_text(json.dumps(meta))
        return folder

    return make


@pytest.fixture
def make_outputs(make_capture: CaptureMaker) -> Callable[..., DataparserOutputs]:
    """Writes a capture as ``make_capture`` does; returns what its dataparser says of all images."""

    def make(count: int = 8, *, parser: dict[str, Any] | None = None, **capture: Any) -> DataparserOutputs:
        config = CaptureDataParserConfig(
            data=make_capture(count, val=None, **capture), train_split_fraction=1.0, **(parser or {})
        )
        return config.setup().get_dataparser_outputs("train")

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
        super().__init__(dataset, ())
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


@pytest.fixture
def keep() -> Iterator[Callable[[Any], Any]]:
    """Returns what it is given, a stream for instance, and closes it at the end."""
    with ExitStack() as stack:
        yield lambda stream: stack.enter_context(closing(stream))


@pytest.fixture
def build_manager(make_capture: CaptureMaker, keep: Callable[[Any], Any]) -> Callable[..., Any]:
    """Builds datamanagers from a config class, as nerfstudio's pipeline does; closes them at the end."""
    folders: list[Path] = []

    def make(
        kind: type, folder: Path | None = None, *, mode: str = "val", world: int = 1, rank: int = 0, **options: Any
    ) -> Any:
        if folder is None and not folders:
            folders.append(make_capture())
        config = kind(data=folder or folders[0], **{**DEFAULTS[kind], **options})
        return keep(config.setup(device="cpu", test_mode=mode, world_size=world, local_rank=rank))

    return make


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, set_gpu_memory: Callable[..., None]) -> None:
    """Takes the CPU for a GPU with one GiB of free memory."""
    set_gpu_memory(1 << 30, 1 << 30)

    def placement(self: Any, option: str, *, off: str, **options: Any) -> Placement:
        return Placement(torch.device("cpu"), off=f"{flag(option)} {off}", **options)

    monkeypatch.setattr(CyclingDataManager, "make_placement", placement)


@pytest.fixture
def run_callbacks() -> Callable[[Any, Path, TrainingCallbackLocation, int], None]:
    """Runs a datamanager's callbacks as the trainer does."""

    def run(manager: Any, base_dir: Path, location: TrainingCallbackLocation, step: int) -> None:
        trainer: Any = SimpleNamespace(base_dir=base_dir)
        for callback in manager.get_training_callbacks(TrainingCallbackAttributes(None, None, None, trainer)):  # type: ignore
            callback.run_callback_at_location(step, location)

    return run
