"""Batches of pixels and features from a cycling window of images."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from nerfstudio.data.datasets.base_dataset import InputDataset
from torch import Tensor

from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.image_reader import MaskedPixels, read_pixels
from f3rm_ext.data.pixel_sampler import ImagePixels, PackedPixels, PixelDraw, batch_seed
from f3rm_ext.data.pixel_window import Draft, LoadedWindow, draft_batch, finish_batch
from f3rm_ext.data.placement import Placement
from f3rm_ext.data.prefetch import Prefetcher, read_each
from f3rm_ext.data.uploads import Uploader
from f3rm_ext.data.window_stream import WindowStream
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.features.sampling import PackedMaps
from f3rm_ext.features.source import FeatureSource
from f3rm_ext.memory.shortage import is_out_of_memory


class PixelStream(WindowStream[LoadedWindow]):
    """Endless batches from one data set. Loads nothing before the first batch.

    A batch depends only on the window and on (seed, split, rank, batch number). After a resume the same batches follow,
    whatever else has drawn random numbers, and wherever the window is.

    With a placement, the host's part of each batch is made one batch ahead in a background thread, and nothing in
    :meth:`next` waits for the device. The next window is copied there in the background too, if it fits beside the
    present one. Without a placement, batches are made on the CPU when they are due.

    Args:
        feature_ray_fraction: fraction of each batch's rays that get features, (0, 1].
        stride: distance of the rows and columns of pixels that are kept of each image, px.
        divided_rays: rays of the batch that all processes share; None if each draws a batch of its own. Where all of
            them hold all images, every process draws this batch and takes each n-th ray of it, so that any number of
            processes trains on the same rays.
    """

    def __init__(
        self,
        dataset: InputDataset,
        cycle: ImageCycle,
        *,
        num_rays: int,
        split: str,
        device: torch.device | str = "cpu",
        placement: Placement | None = None,
        source: FeatureSource | None = None,
        feature_ray_fraction: float = 1.0,
        masked: MaskedPixels = "ignore",
        divided_rays: int | None = None,
        stride: int = 1,
    ) -> None:
        super().__init__(dataset.cameras, cycle, split=split, device=device, masked=masked, placement=placement)
        self.dataset = dataset
        self.num_rays_per_batch = num_rays
        self.source = source
        self.feature_ray_fraction = feature_ray_fraction
        self.stride = stride
        together = divided_rays is not None and not cycle.changes and cycle.window_size == cycle.num_images
        self._drawn_together = divided_rays if together else None
        self.batches = 0
        self._drafts: Prefetcher[Draft] = Prefetcher(self._draft, "f3rm-ext-batch")
        self._uploader = Uploader(self.device)
        self._window_rays: Tensor | None = None
        self._generator = torch.Generator()

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
        window = self._step()
        if self._window_rays is None or self._begins:
            self._window_rays = torch.zeros(len(window.images), dtype=torch.int64)
        key = (self.batches, self.num_rays_per_batch)
        draft = self._draft(key, lambda: False) if self.placement is None else self._drafts.take(key)
        self.batches += 1
        if self.placement is not None and not self.cycle.ends:
            self._drafts.request((self.batches, self.num_rays_per_batch))
        self._window_rays += draft.rays_of_slots
        batch = finish_batch(window, draft)
        self._steps += 1
        if self.masked == "background" and batch["image"].shape[1] == 4:
            batch["kept"] = batch["image"][:, 3:] > 0
        return batch

    def state(self) -> dict[str, Any]:
        return {**super().state(), "batches": self.batches}

    def load_state(self, state: Mapping[str, Any]) -> bool:
        if not super().load_state(state):
            return False
        self.batches = int(state["batches"])
        return True

    def _draw(self, window: LoadedWindow, number: int, rays: int) -> tuple[PixelDraw, int]:
        """The pixels of a batch, given its number and number of rays, and how many of them, the first, get features."""
        shard, part, seeded = self.cycle.shard, slice(None), self.cycle.shard
        if self._drawn_together is not None:
            # The first rays of the batch of all processes have features: here, the first ones of this process.
            rays, part, seeded = self._drawn_together, slice(shard, None, self.cycle.shards), 0
        generator = self._generator.manual_seed(batch_seed(self.cycle.seed, self.split, seeded, number))
        featured = len(range(math.ceil(self.feature_ray_fraction * rays))[part])
        return window.pixels.draw(rays, generator, part), featured

    def _draft(self, key: tuple[int, ...], stopped: Callable[[], bool]) -> Draft:
        """The host's part of a batch, given its number and number of rays."""
        window, (number, rays) = self._window, key
        assert window is not None
        drawn, featured = self._draw(window, number, rays)
        return draft_batch(window, drawn, featured, self._uploader)

    def _place(self, window: LoadedWindow) -> LoadedWindow:
        if window.on_device:
            return window.receive()
        # A run may begin with fewer images than it will have.
        needed = window.nbytes * self.cycle.window_size // len(window.images)
        if self.placement is None or not self.placement.decide(needed):
            return window
        try:
            return window.to(self.device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.placement.give_up()
            return window

    def _flush(self) -> None:
        window = self._window
        if window is not None and self._window_rays is not None and self._steps:
            self._coverage.add_rays(window.images, self._window_rays.numpy())
            self._window_rays.zero_()
        super()._flush()

    def _forget(self) -> None:
        self._drafts.close()
        self._window_rays = None

    def _load(self, images: tuple[int, ...], stopped: Callable[[], bool]) -> LoadedWindow:
        window = self._read(images, stopped)
        if self.placement is None or not self.placement.has_room(window.nbytes):
            return window
        try:
            return window.upload(self._uploader)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return window  # it is copied when the present one is gone

    def _read(self, images: tuple[int, ...], stopped: Callable[[], bool]) -> LoadedWindow:
        """Reads the pixels of a window that are kept, and the features."""
        maps: list[dict[str, FeatureMap]] = []
        seed = self.cycle.seed  # which a resume may change meanwhile

        def read(image: int) -> tuple[ImagePixels, dict[str, FeatureMap]]:
            picture = read_pixels(self.dataset, image, self.masked)
            if self.stride > 1:
                picture = picture.thin(self.stride, batch_seed(seed, self.split, "pixels", image))
            return picture, {} if self.source is None else self.source.load(image)

        def pictures() -> Iterator[ImagePixels]:
            for picture, of_image in read_each(images, read, stopped):
                maps.append(of_image)
                yield picture

        cameras = self.dataset.cameras
        sizes = (cameras.height[list(images)], cameras.width[list(images)])
        rows, columns = ((size + self.stride - 1) // self.stride for size in sizes)
        pixels = PackedPixels.pack(images, pictures(), stride=self.stride, most=int((rows * columns).sum()))
        features = {name: PackedMaps.pack([one[name] for one in maps]) for name in maps[0]}
        return LoadedWindow(pixels, features)
