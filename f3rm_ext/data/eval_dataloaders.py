"""Whole images for evaluation, with their feature maps."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.utils.misc import get_dict_to_torch
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext import events
from f3rm_ext.capture.exposures import exposure_stops
from f3rm_ext.data.image_reader import read_eval_batch
from f3rm_ext.errors import CaptureError
from f3rm_ext.features.source import FeatureSource

NO_EVAL_IMAGES = (
    "The capture has no evaluation images, so there is nothing to measure: "
    "list some in test_filenames in transforms.json, or train with a lower --train-split-fraction."
)

NOTHING_KEPT = (
    "The masks leave nothing of any evaluation image, so there is nothing to measure: check that white (non-zero) "
    "means keep, or remove mask_path from transforms.json."
)


class EvalLoader:
    """Gives all images in order, or one by index, as nerfstudio's evaluation loaders do. Loads nothing beforehand.

    Args:
        dataset: the images; None for an empty loader.
        device: device of the batches; ``image`` stays on the CPU, as in nerfstudio.
        source: returns the source of feature maps, or None; called when the first maps are needed.
        required: whether iterating over no images is an error.
    """

    def __init__(
        self,
        dataset: InputDataset | None,
        device: torch.device | str,
        source: Callable[[], FeatureSource | None],
        *,
        required: bool = False,
    ) -> None:
        self.required = required
        self.input_dataset: InputDataset | None = dataset
        self.device = device
        self.cameras = None if dataset is None else dataset.cameras.to(device)
        self._source = source

    def __len__(self) -> int:
        return 0 if self.input_dataset is None else len(self.input_dataset)

    def __iter__(self) -> Iterator[tuple[Cameras, dict[str, Any]]]:
        """Yields the images in order. Images that are masked out entirely are skipped, and the log counts them.

        Raises:
            CaptureError: an image cannot be read, all images are masked out entirely, or there are no images though
                some are required.
        """
        if self.required and self.input_dataset is None:
            raise CaptureError(NO_EVAL_IMAGES)
        empty = 0
        for image_idx in range(len(self)):
            camera, batch = self.get_camera(image_idx)
            if "mask" in batch and not batch["mask"].any():
                empty += 1
            else:
                yield camera, batch
            events.progress("Views", image_idx + 1, len(self))
        if empty and empty == len(self):
            raise CaptureError(NOTHING_KEPT)
        if empty:
            CONSOLE.log(
                f"{empty} of {len(self)} evaluation images are not measured: their masks leave nothing of them."
            )

    def get_camera(self, image_idx: int = 0) -> tuple[Cameras, dict[str, Any]]:
        """Returns the camera (shape 1) and the batch of an image.

        The batch has ``image`` Float[h w channels] in [0, 1], ``image_idx``, ``camera``, ``mask`` if there is one,
        ``exif_stops`` (float, see :func:`~f3rm_ext.capture.exposures.exposure_stops`) if EXIF tells the exposure, and
        ``feature_maps`` by name if there are features.

        Raises:
            CaptureError: there are no images, or this one cannot be read.
        """
        if self.input_dataset is None or self.cameras is None:
            raise CaptureError(NO_EVAL_IMAGES)
        batch = self.read(image_idx)
        camera = self.cameras[image_idx : image_idx + 1]
        batch["camera"] = camera
        if (stops := self._exif_stops[image_idx]) is not None:
            batch["exif_stops"] = stops
        source = self._source()
        if source is not None:
            batch["feature_maps"] = source.load(image_idx)
        return camera, batch

    @cached_property
    def _exif_stops(self) -> list[float | None]:
        assert self.input_dataset is not None
        return exposure_stops(self.input_dataset.image_filenames)

    def read(self, image_idx: int) -> dict[str, Any]:
        """Reads the part of a batch that comes from the image file."""
        assert self.input_dataset is not None
        return get_dict_to_torch(read_eval_batch(self.input_dataset, image_idx), self.device, exclude=["image"])
