"""Batches of pixels and features from a cycling window of images."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nerfstudio.data.datasets.base_dataset import InputDataset
from torch import Tensor

from f3rm_ext.data.coverage import Coverage
from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.image_reader import MaskedPixels, read_pixels
from f3rm_ext.data.pixel_sampler import ImagePixels, PackedPixels, batch_seed
from f3rm_ext.data.prefetch import WindowFeed, read_each
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.features.sampling import PackedMaps
from f3rm_ext.features.source import FeatureSource


@dataclass(frozen=True)
class LoadedWindow:
    """The pixels and features of a window."""

    pixels: PackedPixels
    features: dict[str, PackedMaps]

    @property
    def images(self) -> tuple[int, ...]:
        """The images' indices in the data set."""
        return self.pixels.images

    def to(self, device: torch.device) -> "LoadedWindow":
        """Returns a copy on a device."""
        return LoadedWindow(self.pixels.to(device), {name: maps.to(device) for name, maps in self.features.items()})


def load_window(
    dataset: InputDataset,
    source: FeatureSource | None,
    images: tuple[int, ...],
    stopped: Callable[[], bool],
    masked: MaskedPixels = "ignore",
) -> LoadedWindow:
    """Reads the images and features of a window.

    Raises:
        LoadCancelled: ``stopped`` returned True.
        UserError: an image or a feature shard cannot be read.
    """

    def read(image: int) -> tuple[ImagePixels, dict[str, FeatureMap]]:
        return read_pixels(dataset, image, masked), {} if source is None else source.load(image)

    parts = read_each(images, read, stopped)
    pixels = PackedPixels.pack(images, [part[0] for part in parts])
    maps = [part[1] for part in parts]
    features: dict[str, PackedMaps] = {}
    if source is not None:
        features = {name: PackedMaps.pack([one[name] for one in maps]) for name in maps[0]}
    return LoadedWindow(pixels=pixels, features=features)


class PixelStream:
    """Endless batches from one data set. Loads nothing before the first batch.

    A batch depends only on the window and on (seed, split, rank, batch number). After a resume the same batches follow,
    whatever else has drawn random numbers.
    """

    def __init__(
        self,
        dataset: InputDataset,
        cycle: ImageCycle,
        *,
        num_rays: int,
        split: str,
        device: torch.device | str = "cpu",
        pixels_on_device: bool = False,
        source: FeatureSource | None = None,
        feature_ray_fraction: float = 1.0,
        masked: MaskedPixels = "ignore",
        divided_rays: int | None = None,
    ) -> None:
        """Loads nothing yet.

        Args:
            dataset: images and cameras.
            cycle: decides which images are in memory when.
            num_rays: rays per batch of this process.
            split: name of the split; distinguishes the streams of a run.
            device: device of the batches.
            pixels_on_device: whether the window's pixels and features are kept on that device.
            source: feature maps of the images, if any.
            feature_ray_fraction: fraction of each batch's rays that get features, (0, 1].
            masked: "background" also draws masked pixels, as transparent ones.
            divided_rays: rays of the batch that all processes share; None if each draws a batch of its own. Where all
                of them hold all images, every process draws this batch and takes each n-th ray of it, so that any
                number of processes trains on the same rays.
        """
        self.dataset = dataset
        self.cycle = cycle
        self.num_rays_per_batch = num_rays
        self.split = split
        self.device = torch.device(device)
        self.pixels_on_device = pixels_on_device
        self.source = source
        self.feature_ray_fraction = feature_ray_fraction
        self.masked: MaskedPixels = masked
        together = divided_rays is not None and not cycle.changes and cycle.window_size == cycle.num_images
        self._drawn_together = divided_rays if together else None
        self.batches = 0
        sizes = (dataset.cameras.height * dataset.cameras.width).reshape(-1).cpu().numpy().astype(np.int64)
        self._coverage = Coverage(sizes, cycle.shards)
        self._feed: WindowFeed[LoadedWindow] = WindowFeed(cycle, self._load, leave=self._leave, place=self._placed)
        self._window_rays: Tensor | None = None
        self._window_steps = 0
        self._round: tuple[tuple[int, ...], ...] = ()
        self._generator: torch.Generator | None = None

    @property
    def coverage(self) -> Coverage:
        """What training has seen so far."""
        self._flush()
        return self._coverage

    def set_num_rays_per_batch(self, num_rays_per_batch: int) -> None:
        """Changes the batch size, as nerfstudio's pixel samplers do."""
        self.num_rays_per_batch = num_rays_per_batch

    def next(self) -> dict[str, Any]:
        """Returns the next batch.

        Returns:
            ``image`` Float[rays channels] in [0, 1] and ``indices`` Int[rays 3] (image, row, column). If there are
            features, ``features`` has them by name, Float[feat_rays feat], for the first rays. If masked pixels are
            drawn, ``kept`` Bool[rays 1] is False for them: their features are those of something else.

        Raises:
            UserError: an image or a feature shard of the window cannot be read.
        """
        window = self._current()
        generator = self._generator
        assert generator is not None and self._window_rays is not None
        shards, shard = self.cycle.shards, self.cycle.shard
        together = self._drawn_together is not None
        generator.manual_seed(batch_seed(self.cycle.seed, self.split, 0 if together else shard, self.batches))
        self.batches += 1
        self._window_steps += 1
        rays, part = self.num_rays_per_batch, slice(None)
        if self._drawn_together is not None:
            rays, part = self._drawn_together, slice(shard, None, shards)
        sample = window.pixels.sample(rays, generator, part)
        self._window_rays.index_add_(0, sample.slots, torch.ones_like(sample.slots))
        batch: dict[str, Any] = {
            "image": sample.colors.to(self.device),
            "indices": sample.indices.to(self.device),
        }
        if self.masked == "background" and batch["image"].shape[1] == 4:
            batch["kept"] = batch["image"][:, 3:] > 0
        if window.features:
            # Of a batch drawn together, its first rays have features: here, the first ones of this process.
            count = len(range(math.ceil(self.feature_ray_fraction * rays))[part])
            slots = sample.slots[:count]
            yx_px = sample.indices[:count, 1:].float() + 0.5
            batch["features"] = {
                name: maps.sample(slots, yx_px).to(self.device) for name, maps in window.features.items()
            }
        return batch

    def state(self) -> dict[str, Any]:
        """Returns what :meth:`load_state` needs to continue with the same windows and pixels."""
        return {"cycle": self.cycle.state(), "batches": self.batches, "coverage": self.coverage.state()}

    def load_state(self, state: Mapping[str, Any]) -> bool:
        """Continues where :meth:`state` was taken.

        Returns:
            Whether it could: not if the number of images has changed.
        """
        if not self.cycle.load_state(state["cycle"]):
            return False
        self._coverage.load_state(state["coverage"])
        self.batches = int(state["batches"])
        self._feed.forget()
        self._window_rays, self._window_steps, self._round = None, 0, self.cycle.round
        return True

    def close(self) -> None:
        """Stops background loading and releases the window."""
        self._flush()
        self._feed.close()
        self._window_rays = None

    def _current(self) -> LoadedWindow:
        """The window of the next step; a new one if the cycle says so."""
        window = self._feed.step()
        if self._window_rays is None:
            device = window.pixels.device
            if self._generator is None:
                self._generator = torch.Generator(device=device)
            self._window_rays = torch.zeros(len(window.images), dtype=torch.int64, device=device)
        if self._feed.begins:
            self._round = self.cycle.round
            self._coverage.add_windows(self._round)
        return window

    def _placed(self, window: LoadedWindow) -> LoadedWindow:
        return window.to(self.device) if self.pixels_on_device else window

    def _leave(self) -> None:
        self._flush()
        self._window_rays = None

    def _flush(self) -> None:
        """Adds the counts on the device to the coverage."""
        window = self._feed.window
        if window is not None and self._window_rays is not None and self._window_steps:
            self._coverage.add_steps(self._round, self._window_steps)
            self._coverage.add_rays(window.images, self._window_rays.cpu().numpy())
            self._window_rays.zero_()
        self._window_steps = 0

    def _load(self, images: tuple[int, ...], stopped: Callable[[], bool]) -> LoadedWindow:
        return load_window(self.dataset, self.source, images, stopped, self.masked)
