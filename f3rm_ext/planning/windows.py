"""The windows of images and features that a datamanager holds, by formula."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from f3rm_ext.data.config_checks import flag, parse_count
from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.placement import fits
from f3rm_ext.features.base import FeatureSize
from f3rm_ext.features.extractors.registry import feature_size
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.features.source import head_names
from f3rm_ext.features.spec import DisplayBasis, FeatureSpec
from f3rm_ext.planning.request import CaptureSizes

CHANNELS = 3
"""Bytes per pixel: images are kept as RGB bytes. Alpha and masks, which sizes do not tell, would add to them."""
HALF = 2
"""Bytes of a number of a stored feature."""


@dataclass(frozen=True)
class Window:
    """Images of one process that are in memory at a time, with their features."""

    count: int
    """Number of images."""
    images: int
    """Bytes of their pixels."""
    features: int
    """Bytes of their features."""
    changes: bool
    """Whether another window will follow, which is loaded while this one is used."""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.images + self.features


def window_of(
    manager: Any, split: str, num_images: int, capture: CaptureSizes, features: Sequence[FeatureSize] = ()
) -> Window:
    """Returns the window of a split.

    Args:
        manager: configuration of the datamanager.
        split: ``"train"`` or ``"eval"``.
        num_images: number of images of the split.
        capture: their sizes.
        features: of the images that the window holds too.

    Raises:
        ConfigError: an option of the window is out of range.
    """
    wanted, repeat = f"{split}_num_images_to_sample_from", f"{split}_num_times_to_repeat_images"
    cycle = ImageCycle(
        max(1, num_images),
        parse_count(getattr(manager, wanted), flag(wanted), unit="images"),
        parse_count(getattr(manager, repeat), flag(repeat), unit="steps"),
    )
    count = cycle.window_size if num_images else 0
    pixels = count * capture.width_px * capture.height_px * CHANNELS
    return Window(count, pixels, count * HALF * sum(size.numbers for size in features), cycle.changes)


def stays_on_device(window: Window, wanted: bool, device_type: str, free_bytes: int) -> bool:
    """Returns whether a window is kept on the training device, as :class:`~f3rm_ext.data.placement.Placement` decides.

    Args:
        window: the window.
        wanted: the option.
        device_type: of the training device.
        free_bytes: memory that is free there when the first batch is made.
    """
    return device_type == "cuda" and wanted and fits(window.nbytes, free_bytes)


def feature_sizes(options: FeatureOptions, capture: CaptureSizes) -> list[FeatureSize]:
    """Returns the size of an image's features by extractor, with PCA codes if there are any.

    Raises:
        ExtractorError: an extractor is unknown, or an option of it is wrong.
    """
    sizes = [feature_size(text, capture.height_px, capture.width_px) for text in options.extractors]
    return [FeatureSize(size.rows, size.cols, options.codes or size.dim) for size in sizes]


def feature_specs(options: FeatureOptions, sizes: Sequence[FeatureSize]) -> tuple[FeatureSpec, ...]:
    """Returns what a model with these features is built of; the values mean nothing."""
    import torch

    found: list[FeatureSpec] = []
    for text, name, size in zip(options.extractors, head_names(options.extractors), sizes, strict=True):
        basis = DisplayBasis(torch.zeros(size.dim), torch.eye(3, size.dim), -torch.ones(3), torch.ones(3))
        found.append(FeatureSpec(name=name, dim=size.dim, extractor=text, identity={}, display=basis))
    return tuple(found)
