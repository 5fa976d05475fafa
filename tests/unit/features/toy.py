"""A tiny extractor and data set for the tests of the feature store; run as a script it is a process of its own."""

import io
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from f3rm_ext.features.base import ExtractorIdentity, PatchGrid
from f3rm_ext.features.store.images import image_key

PATCH_PX = 8


class ToyExtractor:
    """Mean colours of 8 x 8 patches, mixed into 12 dimensions."""

    batch_size = 2

    def __init__(self, log: Path | None = None, *, model: str = "one", dim: int = 12, before: Callable = lambda: None):
        self.log = log
        self.model = model
        self.dim = dim
        self.before = before
        self.mix = np.random.default_rng(5).normal(size=(3, dim)).astype(np.float32)

    @property
    def identity(self) -> ExtractorIdentity:
        return ExtractorIdentity("toy", self.model, "none", "as it is", f"mean {self.dim}")

    def patch_grid(self, height_px: int, width_px: int) -> PatchGrid:
        return PatchGrid.covering(max(1, height_px // PATCH_PX), max(1, width_px // PATCH_PX), height_px, width_px)

    def extract(self, images: Sequence[np.ndarray]) -> list[torch.Tensor]:
        self.before()
        return [self._one(image) for image in images]

    def _one(self, image: np.ndarray) -> torch.Tensor:
        if self.log is not None:
            with open(self.log, "a") as stream:
                stream.write(image_key(image) + "\n")
        grid = self.patch_grid(*image.shape[:2])
        cut = image[: grid.rows * PATCH_PX, : grid.cols * PATCH_PX].astype(np.float32) / 255
        cells = cut.reshape(grid.rows, PATCH_PX, grid.cols, PATCH_PX, 3).mean((1, 3))
        return torch.from_numpy(np.tanh(cells @ self.mix).astype(np.float32))


class ToyDataset:
    """Images in files, as a nerfstudio data set gives them. The sizes of its cameras are only about right."""

    scale_factor = 1.0

    def __init__(self, paths: Sequence[Path]):
        self.image_filenames = list(paths)
        self.cameras = SimpleNamespace(height=[32] * len(paths), width=[32] * len(paths))
        self.decoded: list[int] = []

    def __len__(self) -> int:
        return len(self.image_filenames)

    def get_numpy_image(self, image_idx: int) -> np.ndarray:
        self.decoded.append(image_idx)
        return np.array(Image.open(self.image_filenames[image_idx]))


def write_images(folder: Path, count: int, *, seed: int = 0, channels: int = 3) -> list[Path]:
    """Small images of unequal sizes with a smooth gradient each."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(count):
        height, width = int(rng.integers(17, 40)), int(rng.integers(17, 40))
        ramp = np.linspace(0, 1, height * width).reshape(height, width, 1)
        colors = rng.uniform(0, 255, (2, channels))
        paths.append(folder / f"{number:03d}.png")
        Image.fromarray((colors[0] * ramp + colors[1] * (1 - ramp)).astype(np.uint8)).save(paths[-1])
    return paths


def kill_at_point(target: int) -> None:
    """Makes this process kill itself (SIGKILL) at the given one of the points where a file is being written."""
    from f3rm_ext.utils import atomic_files as atomic

    seen = -1
    replace = os.replace

    def point() -> None:
        nonlocal seen
        seen += 1
        if seen == target:
            os.kill(os.getpid(), signal.SIGKILL)

    class Stream(io.FileIO):
        def write(self, data: bytes) -> int:
            half = len(data) // 2
            super().write(data[:half])
            point()
            return half + super().write(data[half:])

    def counting(function: Callable) -> Callable:
        def call(*arguments: Any) -> Any:
            point()
            result = function(*arguments)
            point()
            return result

        return call

    atomic.open = Stream  # type: ignore[attr-defined]
    os.fsync, os.replace = counting(lambda descriptor: None), counting(replace)


def main(job: dict[str, Any]) -> None:
    """Prepares the features of some images; ``job`` says how."""
    from f3rm_ext.features.options import FeatureOptions
    from f3rm_ext.features.source import prepare_features
    from f3rm_ext.utils.atomic_files import FolderLock

    if "kill_at" in job:
        kill_at_point(job["kill_at"])
    if "on_lock_checked" in job:
        try_lock = FolderLock._try

        def tell(self: FolderLock, descriptor: int) -> bool:
            got = try_lock(self, descriptor)
            if not got:
                job["on_lock_checked"].set()
            return got

        FolderLock._try = tell  # type: ignore[method-assign]

    if "waits_for_first" in job:
        from f3rm_ext.features.stored_head import StoredHead

        StoredHead.wait = lambda *_: (job["waits_for_first"].set(), time.sleep(600))  # type: ignore[method-assign]

    def before() -> None:
        if "extracting" in job:
            job["extracting"].set()
        if "wait_for" in job:
            assert job["wait_for"].wait(60)

    sources = prepare_features(
        [ToyDataset(job["images"])],
        FeatureOptions(extractors=("toy",), cache_dir=job["cache"], codes=job.get("codes", 0)),
        device="cpu",
        local_rank=job.get("rank", 0),
        world_size=job.get("world", 1),
        local_size=job.get("together", 1),
        build=lambda text, *, device: ToyExtractor(job["log"], before=before),
    )
    loaded = [sources[0].load(i)["toy"].values.shape for i in range(len(sources[0]))]
    Path(job["done"]).write_text(str(loaded))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(globals()["JOB"])
