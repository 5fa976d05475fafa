"""The options that both datamanagers have: the size of images, and how many of them are in memory for how long."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
import tyro
from jaxtyping import Int
from torch import Tensor

from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.image_reader import MaskedPixelsOption
from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.devices import total_bytes
from f3rm_ext.memory.options import MemoryOption, QualityImpact, RunState
from f3rm_ext.utils.ranges import Count, Range, check_ranges

_PREFIX = "pipeline.datamanager."
_REPEAT = 100
"""Steps per window that :meth:`CyclingConfig.window_options` suggests."""
ALL_SHARE = {"train": 1 / 2, "eval": 1 / 8}
"""Share of main memory that all images of a split may take; of more, only a part is kept."""
PART_SHARE = {"train": 1 / 4, "eval": 1 / 16}
"""Share of main memory that this part takes: some pixels of all images, or a window of images and the next one."""
MAX_STRIDE = 16
"""Largest distance of the pixels that are kept of all images; where that is not enough, windows of images are."""
START = (64, 500)
"""Images with which training begins where it is to have some pixels of all, and steps until it has: the others are read
meanwhile."""
STEPS_PER_IMAGE = 10
"""Steps of rays per image of such a window. Decoding a photo of 12 megapixels takes about 0.2 s of a core, so a step
pays for 0.02 s."""
WHOLE_STEPS_PER_IMAGE = 2
"""The same for steps of whole images, each of which takes longer than decoding its image."""
AUTO_PX = 1024
"""Longest side of images at the scale ``auto``."""
_SMALLEST_SCALE = 0.125
"""Scale of the images below which no memory option goes."""


def flag(option: str) -> str:
    """The command line option of a datamanager's config field."""
    return _PREFIX + option.replace("_", "-")


def parse_count(value: int | float, option: str, *, unit: str) -> int | None:
    """Parses a count: a positive whole number, or None for -1 and inf (no limit). Raises ConfigError if the value is
    neither."""
    if value == -1 or value == math.inf:
        return None
    if not math.isfinite(value) or value != int(value) or value < 1:
        raise ConfigError(
            f"--{option} is {value}, which is not a number of {unit}: give a whole number from 1 up, or -1 or inf "
            "for no limit."
        )
    return int(value)


def choose_scale(
    scale: float | Literal["auto"], width_px: Int[Tensor, "*cams"], height_px: Int[Tensor, "*cams"]
) -> float:
    """Returns the factor on the size of a capture's images.

    >>> choose_scale("auto", torch.tensor([3000, 2000]), torch.tensor([2000, 4000]))
    0.256
    """
    return min(1.0, AUTO_PX / int(torch.maximum(width_px, height_px).max())) if scale == "auto" else scale


class ImageBytes(NamedTuple):
    """Memory of the largest image of a capture, bytes."""

    pixels: int
    features: int = 0


@dataclass
class CyclingConfig:
    """Options of a datamanager whose training images come in windows that cycle through the data set."""

    takes_whole_images: ClassVar[bool] = True
    """Whether a step needs all pixels of an image."""
    camera_res_scale_factor: Annotated[
        float | Literal["auto"], tyro.conf.arg(aliases=["--resolution-scale"]), Range(0, 1, above=True)
    ] = 1.0
    """Scale of the images in training and evaluation, above 0 to 1; 0.5 halves each side. auto, the default of the lite
    methods, reduces images to sides of at most 1024 pixels, which is as much as these methods resolve."""
    masked_pixels: MaskedPixelsOption = "auto"
    """Treatment of masked pixels in training. ignore leaves them out, so fog may grow there. background trains them as
    empty, so that an object comes out clean; the background is random, or --pipeline.model.background-color if that is
    black or white. auto is background if the masks are silhouettes of one object in all photos, and ignore otherwise.
    Evaluation never counts masked pixels."""
    train_num_images_to_sample_from: int | float = -1
    """Number of training images in memory at a time, at least 1. -1 or inf keeps all; if they would take more than half
    of the main memory, fields keep some pixels of all, and splats as many images as fit into an eighth of it."""
    train_num_times_to_repeat_images: int | float = -1
    """Steps with a set of training images before the next set is loaded, at least 1. -1 or inf never loads another, but
    takes 2 steps per image of the set if not all images of splats fit into memory. Splats train on one image per
    step."""
    steps_per_coverage: Count = 500
    """Steps between two records of the coverage (TensorBoard and coverage.json), at least 1."""

    def __post_init__(self) -> None:
        """Raises ConfigError if an option is out of range."""
        check_ranges(self, _PREFIX)
        for split in ("train", "eval"):
            self.window(split)

    def window(self, split: Literal["train", "eval"]) -> tuple[int | None, int | None]:
        """Returns how many images of a split are in memory and for how many steps; None for all, and for ever."""
        images, steps = f"{split}_num_images_to_sample_from", f"{split}_num_times_to_repeat_images"
        return (
            parse_count(getattr(self, images), flag(images), unit="images"),
            parse_count(getattr(self, steps), flag(steps), unit="steps"),
        )

    def resolve_scale(self, width_px: Int[Tensor, "*cams"], height_px: Int[Tensor, "*cams"]) -> float:
        """Returns the scale of images of these sizes, and keeps it where the option is auto."""
        self.camera_res_scale_factor = choose_scale(self.camera_res_scale_factor, width_px, height_px)
        return self.camera_res_scale_factor

    def image_cycle(
        self, split: Literal["train", "eval"], num_images: int, size: ImageBytes, processes: int = 1, **place: int
    ) -> ImageCycle:
        """The image cycle of a split. If all images are wanted and do not fit into main memory, it deals windows,
        unless some pixels of each image are enough.

        The memory that the machine has decides, not what is free, so that all processes, a resumed run and a plan have
        the same windows.

        Args:
            processes: number of processes on this machine, each of which keeps images.
            place: ``seed``, ``shards`` and ``shard`` of the cycle.
        """
        window, repeat = self.window(split)
        start = None
        if self._exceed(split, num_images, size, processes):
            if self.pixel_stride(split, num_images, size, processes) > 1:
                start = START
            else:
                # Half of the share, since the next window is read while the present one is used.
                window = max(1, int(PART_SHARE[split] / 2 * _memory(processes) / sum(size)))
                repeat = repeat or (WHOLE_STEPS_PER_IMAGE if self.takes_whole_images else STEPS_PER_IMAGE) * window
        return ImageCycle(num_images, window, repeat, start=start, **place)

    def pixel_stride(
        self, split: Literal["train", "eval"], num_images: int, size: ImageBytes, processes: int = 1
    ) -> int:
        """Returns the distance of the rows and columns of pixels that are kept of each image, see :meth:`image_cycle`.

        More than 1 if all images are wanted and do not fit, but so many of their pixels do beside their features.
        """
        if self.takes_whole_images or not self._exceed(split, num_images, size, processes):
            return 1
        room = PART_SHARE[split] * _memory(processes) - num_images * size.features
        stride = math.ceil(math.sqrt(num_images * size.pixels / room)) if room > 0 else math.inf
        return int(stride) if stride <= MAX_STRIDE else 1

    def _exceed(self, split: Literal["train", "eval"], num_images: int, size: ImageBytes, processes: int) -> bool:
        """Whether all images of a split are wanted, but do not fit."""
        return self.window(split)[0] is None and num_images * sum(size) > ALL_SHARE[split] * _memory(processes)

    def window_options(self, state: RunState, impact: QualityImpact) -> Iterator[MemoryOption]:
        """Suggests keeping fewer training images in memory, at a cost of some impact."""
        window, repeat = self.window("train")
        total = state.train_images
        count = min(window or total, total) if state.images_in_memory is None else state.images_in_memory
        if count > 1:
            lower = f"{count // 2} --{flag('train_num_times_to_repeat_images')} {repeat or _REPEAT}"
            now = f"{count} of {total}, for {repeat or 'ever'}"
            yield MemoryOption(impact, flag("train_num_images_to_sample_from"), now, lower)

    def scale_options(self) -> Iterator[MemoryOption]:
        """Suggests smaller images."""
        scale = self.camera_res_scale_factor
        if scale != "auto" and scale / 2 >= _SMALLEST_SCALE:
            yield MemoryOption(QualityImpact.DETAIL, flag("camera_res_scale_factor"), scale, scale / 2)


def _memory(processes: int) -> float:
    """Main memory for each process of this machine, bytes; inf if the system hides it."""
    return total_bytes(torch.device("cpu")) / processes or math.inf
