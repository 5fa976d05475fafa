"""Whole training images, one at a time, from a cycling window."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.data.coverage import Coverage
from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.image_reader import MaskedPixels
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.pixel_sampler import ImagePixels, no_valid_pixel
from f3rm_ext.data.undistort import shrunk, shrunk_cameras, shrunk_size
from f3rm_ext.data.window_feed import WindowFeed, read_each


@dataclass
class PictureWindow:
    """The pictures of a window in memory (uint8, CPU), and smaller copies of those used at a lower resolution."""

    images: tuple[int, ...]
    """Their indices in the data set."""
    pictures: dict[int, ImagePixels]
    """By index."""
    _halvings: int = 0
    _small: dict[int, ImagePixels] = field(default_factory=dict)

    def picture(self, image_idx: int, halvings: int) -> ImagePixels:
        """A picture with its sides halved so many times; copies of one resolution are kept at a time."""
        picture = self.pictures[image_idx]
        if halvings != self._halvings:
            self._halvings, self._small = halvings, {}
        if halvings == 0:
            return picture
        if image_idx not in self._small:
            height, width = picture.pixels.shape[:2]
            self._small[image_idx] = shrunk(picture, *shrunk_size(height, width, 0.5**halvings))
        return self._small[image_idx]


def load_pictures(
    dataset: PinholeDataset, images: tuple[int, ...], stopped: Callable[[], bool], masked: MaskedPixels = "ignore"
) -> PictureWindow:
    """Reads the pictures of a window.

    Raises:
        LoadCancelled: ``stopped`` began to return True.
        CaptureError: an image cannot be read, or the masks leave nothing of any.
    """
    pictures = read_each(images, lambda image: dataset.picture(image, masked), stopped)
    if all(picture.valid is not None and not picture.valid.any() for picture in pictures):
        raise no_valid_pixel()
    return PictureWindow(images, dict(zip(images, pictures, strict=True)))


def picture_batch(picture: ImagePixels, image_idx: int, device: torch.device | str) -> dict[str, Any]:
    """A picture as the model gets it.

    Returns:
        ``image`` Float[h w 3] in [0, 1] (not multiplied by alpha) and ``image_idx``; ``alpha`` Float[h w 1] in [0, 1]
        where the file has alpha; ``mask`` Bool[h w 1], False where nothing is to be learned, where there is a mask.
    """
    pixels = picture.pixels.to(device).float().div_(255.0)  # bytes are moved, four times less than floats
    batch: dict[str, Any] = {"image": pixels[..., :3].contiguous(), "image_idx": image_idx}
    if pixels.shape[-1] == 4:
        batch["alpha"] = pixels[..., 3:].contiguous()
    if picture.valid is not None:
        batch["mask"] = picture.valid.to(device)[..., None]
    return batch


class ImageStream:
    """Endless images of one data set; nothing is loaded before the first.

    The images of a window take turns: each is used once before any is used again, in an order drawn anew for every
    turn. Where the window is left within a turn, those used least so far have gone first. Everything follows from the
    cycle's seed and the number of the batch.
    """

    def __init__(
        self,
        dataset: PinholeDataset,
        cycle: ImageCycle,
        *,
        split: str = "train",
        device: torch.device | str = "cpu",
        masked: MaskedPixels = "ignore",
    ) -> None:
        """Sets up.

        Args:
            dataset: images and cameras.
            cycle: which images are in memory when.
            split: name of the split, tells streams of one run apart.
            device: where batches are wanted; pictures stay on the CPU until then.
            masked: "background" makes masked pixels transparent.
        """
        self.dataset = dataset
        self.cycle = cycle
        self.split = split
        self.device = torch.device(device)
        self.masked: MaskedPixels = masked
        self.batches = 0
        self.uses = np.zeros(len(dataset), dtype=np.int64)
        """How often this process has used each image."""
        cameras = dataset.cameras
        self.pixels_per_batch = int(cameras.height[0]) * int(cameras.width[0])
        """Pixels of the image used last; before that, of the first image."""
        sizes = (cameras.height * cameras.width).reshape(-1).cpu().numpy().astype(np.int64)
        self._cameras = cameras.to(self.device)
        self._coverage = Coverage(sizes, cycle.shards, whole_images=True)
        self._feed: WindowFeed[PictureWindow] = WindowFeed(cycle, self._load, leave=self._flush)
        self._turn: list[int] = []
        self._steps = 0
        self._round: tuple[tuple[int, ...], ...] = ()

    @property
    def coverage(self) -> Coverage:
        """What has been seen up to now; its rays are pixels."""
        self._flush()
        return self._coverage

    def next(self, halvings: int = 0) -> tuple[Cameras, dict[str, Any]]:
        """The next image: its camera (shape 1) and its batch, see :func:`picture_batch`, on the device.

        Where masked pixels are transparent the batch also has ``kept`` Bool[h w 1], False for transparent pixels.

        Args:
            halvings: how many times both sides are halved; the camera goes with it.

        Raises:
            CaptureError: an image of the window cannot be read.
        """
        window = self._feed.step()
        if self._feed.begins:
            self._turn = []
            self._round = self.cycle.round
            self._coverage.add_windows(self._round)
        if not self._turn:
            self._turn = self._shuffled(window.images)
        image_idx = self._turn.pop(0)
        self.batches += 1
        self.uses[image_idx] += 1
        self._steps += 1
        picture = window.picture(image_idx, halvings)
        height, width = picture.pixels.shape[:2]
        self.pixels_per_batch = height * width
        self._coverage.add_rays((image_idx,), np.array([height * width]))
        camera = self._cameras[image_idx : image_idx + 1]
        if halvings:
            camera = shrunk_cameras(camera, height, width)
        camera.metadata = {**(camera.metadata or {}), "cam_idx": image_idx}
        batch = picture_batch(picture, image_idx, self.device)
        if self.masked == "background" and "alpha" in batch:
            batch["kept"] = batch["alpha"] > 0
        return camera, batch

    def state(self) -> dict[str, Any]:
        """What :meth:`load_state` needs to go on with the same images."""
        return {
            "cycle": self.cycle.state(),
            "batches": self.batches,
            "turn": list(self._turn),
            "uses": torch.from_numpy(self.uses.copy()),
            "coverage": self.coverage.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> bool:
        """Goes on where :meth:`state` was taken.

        Returns:
            Whether it could; not if the data set has another number of images now.
        """
        if not self.cycle.load_state(state["cycle"]):
            return False
        self._feed.forget()
        self._coverage.load_state(state["coverage"])
        self.batches = int(state["batches"])
        self.uses = np.array(state["uses"], dtype=np.int64)
        # Where the window is of another size now, its first step begins another turn.
        self._turn = [int(image) for image in state["turn"]]
        self._steps, self._round = 0, self.cycle.round
        return True

    def close(self) -> None:
        """Stops loading in the background and lets go of the window."""
        self._flush()
        self._feed.close()

    def _shuffled(self, images: tuple[int, ...]) -> list[int]:
        """An order of images, those used least first."""
        dice = random.Random(f"{self.cycle.seed}/{self.split}/turn/{self.cycle.shard}/{self.batches}")
        order = sorted(images)
        dice.shuffle(order)
        return sorted(order, key=lambda image: int(self.uses[image]))

    def _flush(self) -> None:
        if self._steps:
            self._coverage.add_steps(self._round, self._steps)
        self._steps = 0

    def _load(self, images: tuple[int, ...], stopped: Callable[[], bool]) -> PictureWindow:
        return load_pictures(self.dataset, images, stopped, self.masked)
