"""Whole images for evaluation, with their feature maps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.utils.misc import get_dict_to_torch
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext.data.image_reader import read_eval_batch
from f3rm_ext.data.ray_stream import MapSource
from f3rm_ext.errors import CaptureError

NO_EVAL_IMAGES = (
    "The capture has no evaluation images, so there is nothing to measure: "
    "list some in test_filenames in transforms.json, or train with a lower --train-split-fraction."
)

NOTHING_KEPT = (
    "The masks leave nothing of any evaluation image, so there is nothing to measure: check that white (non-zero) "
    "means keep, or remove mask_path from transforms.json."
)


class EvalLoader:
    """All images in order, or one by index, as nerfstudio's evaluation loaders give them."""

    def __init__(
        self,
        dataset: InputDataset | None,
        device: torch.device | str,
        source: Callable[[], MapSource | None],
        *,
        queries: Callable[[], Any] = lambda: None,
        required: bool = False,
    ) -> None:
        """Sets up; loads nothing.

        Args:
            dataset: the images, None for an empty loader.
            device: where batches are wanted (``image`` stays where it is, as nerfstudio has it).
            source: called when feature maps are needed; returns None where there are none.
            queries: gives the :class:`~f3rm_ext.query.during_eval.EvalQueries` of the capture, or None.
            required: whether going through no images at all is an error.
        """
        self.required = required
        self.input_dataset: InputDataset | None = dataset
        self.device = device
        self.cameras = None if dataset is None else dataset.cameras.to(device)
        self._source = source
        self._queries = queries

    def __len__(self) -> int:
        return 0 if self.input_dataset is None else len(self.input_dataset)

    def __iter__(self) -> Iterator[tuple[Cameras, dict[str, Any]]]:
        """Images in order; those of which a mask leaves nothing are passed over, and said.

        Raises:
            CaptureError: an image cannot be read, the masks leave nothing of any, or there are none though some are
                required.
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
        if empty and empty == len(self):
            raise CaptureError(NOTHING_KEPT)
        if empty:
            CONSOLE.log(
                f"{empty} of {len(self)} evaluation images are not measured: their masks leave nothing of them."
            )

    def get_camera(self, image_idx: int = 0) -> tuple[Cameras, dict[str, Any]]:
        """Camera (shape 1) and batch of an image.

        The batch has ``image`` Float[h w channels] in [0, 1], ``image_idx``, ``camera``, the mask if there is one, and
        ``feature_maps`` (by name) where there are features, ``queries`` and ``file`` where there are labels.

        Raises:
            CaptureError: there are no images, or this one cannot be read.
        """
        if self.input_dataset is None or self.cameras is None:
            raise CaptureError(NO_EVAL_IMAGES)
        batch = self.read(image_idx)
        camera = self.cameras[image_idx : image_idx + 1]
        batch["camera"] = camera
        source = self._source()
        if source is not None:
            batch["feature_maps"] = source.load(image_idx)
        queries = self._queries()
        if queries is not None:
            batch["queries"], batch["file"] = queries, Path(self.input_dataset.image_filenames[image_idx])
        return camera, batch

    def read(self, image_idx: int) -> dict[str, Any]:
        """What a batch has of the image file itself."""
        assert self.input_dataset is not None
        return get_dict_to_torch(read_eval_batch(self.input_dataset, image_idx), self.device, exclude=["image"])


class RandomEvalLoader(EvalLoader):
    """Images in random order, without end."""

    def __init__(
        self,
        dataset: InputDataset | None,
        device: torch.device | str,
        source: Callable[[], MapSource | None],
        draw: Callable[[], int],
    ) -> None:
        """As :class:`EvalLoader`; ``draw`` gives the index of the next image."""
        super().__init__(dataset, device, source)
        self._draw = draw

    def __iter__(self) -> Iterator[tuple[Cameras, dict[str, Any]]]:
        while len(self):
            yield self.get_camera(self._draw())
