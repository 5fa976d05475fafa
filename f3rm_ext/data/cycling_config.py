"""The options that both datamanagers have: the size of images, and how many of them are in memory for how long."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.image_reader import MaskedPixelsOption
from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.devices import total_bytes
from f3rm_ext.memory.options import MemoryOption, QualityImpact
from f3rm_ext.utils.ranges import Count, Range, check_ranges

_PREFIX = "pipeline.datamanager."
_REPEAT = 100
"""Steps per window that :meth:`CyclingConfig.window_options` suggests."""
ALL_SHARE = {"train": 1 / 2, "eval": 1 / 8}
"""Share of main memory that all images of a split may take; of more, only a window is kept."""
WINDOW_SHARE = {"train": 1 / 8, "eval": 1 / 32}
"""Share of main memory that such a window takes; the next one is loaded beside it."""
STEPS_PER_IMAGE = 10
"""Steps per image of such a window. Decoding a photo of 12 megapixels takes about 0.2 s of a core, so a step pays for
0.02 s."""
_SMALLEST_SCALE = 0.125
"""Scale of the images below which no memory option goes."""


def flag(option: str) -> str:
    """The command line option of a datamanager's config field."""
    return _PREFIX + option.replace("_", "-")


def parse_count(value: int | float, option: str, *, unit: str) -> int | None:
    """Parses a count: a positive whole number, or None for -1 and inf (no limit).

    Raises:
        ConfigError: the value is neither.
    """
    if value == -1 or value == math.inf:
        return None
    if not math.isfinite(value) or value != int(value) or value < 1:
        raise ConfigError(
            f"--{option} is {value}, which is not a number of {unit}: give a whole number from 1 up, or -1 or inf "
            "for no limit."
        )
    return int(value)


@dataclass
class CyclingConfig:
    """Options of a datamanager whose training images come in windows that cycle through the data set."""

    camera_res_scale_factor: Annotated[
        float, tyro.conf.arg(aliases=["--resolution-scale"]), Range(0, 1, above=True)
    ] = 1.0
    """Scale of the images in training and evaluation, above 0 to 1; 0.5 halves each side."""
    masked_pixels: MaskedPixelsOption = "auto"
    """Treatment of masked pixels in training. ignore leaves them out, so fog may grow there. background trains them as
    empty, so that an object comes out clean; the background is random, or --pipeline.model.background-color if that is
    black or white. auto is background if the masks are silhouettes of one object in all photos, and ignore otherwise.
    Evaluation never counts masked pixels."""
    train_num_images_to_sample_from: int | float = -1
    """Number of training images in memory at a time, at least 1. -1 or inf keeps all; if they would take more than half
    of the main memory, as many as fit into an eighth of it."""
    train_num_times_to_repeat_images: int | float = -1
    """Steps with a set of training images before the next set is loaded, at least 1. -1 or inf never loads another, but
    takes 10 steps per image of the set if not all images fit into memory. Splats train on one image per step."""
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

    def image_cycle(
        self, split: Literal["train", "eval"], num_images: int, image_bytes: int, processes: int = 1, **place: int
    ) -> ImageCycle:
        """The image cycle of a split. If all images are wanted and do not fit into main memory, it deals windows.

        The memory that the machine has decides, not what is free, so that all processes, a resumed run and a plan have
        the same windows.

        Args:
            image_bytes: memory of the largest image with its features.
            processes: number of processes on this machine, each of which keeps images.
            place: ``seed``, ``shards`` and ``shard`` of the cycle.
        """
        window, repeat = self.window(split)
        memory = total_bytes(torch.device("cpu")) // processes
        if window is None and memory and num_images * image_bytes > ALL_SHARE[split] * memory:
            window = max(1, int(WINDOW_SHARE[split] * memory / image_bytes))
            repeat = repeat or STEPS_PER_IMAGE * window
        return ImageCycle(num_images, window, repeat, **place)

    def window_options(self, num_images: int, impact: QualityImpact) -> Iterator[MemoryOption]:
        """Suggests keeping fewer training images in memory, at a cost of some impact."""
        window, repeat = self.window("train")
        count = min(window or num_images, num_images)
        if count > 1:
            lower = f"{count // 2} --{flag('train_num_times_to_repeat_images')} {repeat or _REPEAT}"
            now = f"{count} of {num_images}, for {repeat or 'ever'}"
            yield MemoryOption(impact, flag("train_num_images_to_sample_from"), now, lower)

    def scale_options(self) -> Iterator[MemoryOption]:
        """Suggests smaller images."""
        scale = self.camera_res_scale_factor
        if scale / 2 >= _SMALLEST_SCALE:
            yield MemoryOption(QualityImpact.DETAIL, flag("camera_res_scale_factor"), scale, scale / 2)
