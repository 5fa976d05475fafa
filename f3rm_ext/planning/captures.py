"""Sizes of a capture's images, without their pixels."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.engine.trainer import TrainerConfig

from f3rm_ext.data.stereo import DenseMode
from f3rm_ext.data.stereo.points import missing_points
from f3rm_ext.data.undistort import shrunk_size
from f3rm_ext.errors import CaptureError, ConfigError, reason_of
from f3rm_ext.planning.request import CaptureSizes
from f3rm_ext.utils.console import messages_to_stderr

ASSUMED_IMAGES, ASSUMED_SIDE_PX = 100, 1024
"""What is planned with where neither a capture nor sizes are given."""


@dataclass(frozen=True)
class ImageSizes:
    """Sizes of all images of a capture, as they are trained on."""

    heights_px: Int64[np.ndarray, "cams"]
    """Of the training images."""
    widths_px: Int64[np.ndarray, "cams"]
    """Of the training images."""
    eval_images: int
    """Number of evaluation images."""
    points: int = 0
    """Number of points that splats start from; 0 if the capture has none."""
    source: str = ""
    """Where the sizes are from, for people."""
    parsed: tuple[Path, DataparserOutputs] | None = field(default=None, repr=False, compare=False)
    """The capture, and what its dataparser says of the training images; None where only numbers are known."""

    @classmethod
    def of_numbers(
        cls, config: TrainerConfig, images: int, width_px: int, height_px: int, points: int = 0, source: str = ""
    ) -> "ImageSizes":
        """Makes equal sizes, scaled as the options say.

        Args:
            config: options of the run.
            images: number of training images.
            width_px: of each file.
            height_px: of each file.
            points: that splats start from.
            source: where the numbers are from.

        Raises:
            ConfigError: a number is below 1.
        """
        for name, value in (("images", images), ("width-px", width_px), ("height-px", height_px)):
            if value < 1:
                raise ConfigError(f"--{name} is {value}, but has to be at least 1.")
        scale = getattr(config.pipeline.datamanager, "camera_res_scale_factor", 1.0)
        height, width = shrunk_size(height_px, width_px, scale)
        source = source or f"{images} training images of {width_px} × {height_px} pixels, given by hand"
        return cls(np.full(images, height), np.full(images, width), 0, points, source)

    @classmethod
    def of_capture(cls, config: TrainerConfig) -> "ImageSizes":
        """Reads the sizes of the capture that the options name; opens no image beyond its header.

        Args:
            config: options of the run; not changed.

        Raises:
            UserError: the capture cannot be used.
        """
        options: Any = copy.deepcopy(config.pipeline.datamanager)
        options.features.extractors = ()  # or they would be extracted
        mode: DenseMode = getattr(options, "stereo_points", "never")
        options.stereo_points = "never"  # or they would be sought
        with messages_to_stderr():
            try:
                manager = _without_batches(options._target)(options, device="cpu", test_mode="val")
            except (OSError, AssertionError) as error:  # of nerfstudio's own dataparsers
                raise CaptureError(
                    f"The capture {options.dataparser.data} cannot be read ({reason_of(error)}): check the path and "
                    "the dataparser."
                ) from error
        cameras = manager.train_dataset.cameras
        points = len(manager.train_dataset.metadata.get("points3D_xyz", ()))
        points += missing_points(points, mode)
        heights, widths = (getattr(cameras, name).reshape(-1).numpy().astype(np.int64) for name in ("height", "width"))
        return cls(
            heights,
            widths,
            0 if manager.eval_dataset is None else len(manager.eval_dataset),
            points,
            f"{len(heights)} training images of {_size(heights, widths)} in {manager.config.dataparser.data}",
            (Path(manager.config.dataparser.data), manager.train_dataparser_outputs),
        )

    @classmethod
    def assumed(cls, config: TrainerConfig) -> "ImageSizes":
        """Makes sizes where none are given; :attr:`source` says so."""
        side = ASSUMED_SIDE_PX
        source = (
            f"{ASSUMED_IMAGES} training images of {side} × {side} pixels, assumed: give --data, or --images, "
            "--width-px and --height-px"
        )
        return cls.of_numbers(config, ASSUMED_IMAGES, side, side, source=source)

    @property
    def pixels(self) -> Int64[np.ndarray, "cams"]:
        """Pixels of each training image."""
        return self.heights_px * self.widths_px

    def summary(self) -> CaptureSizes:
        """Returns what the memory of a run depends on."""
        largest = int(self.pixels.argmax())
        return CaptureSizes(
            train_images=len(self.pixels),
            eval_images=self.eval_images,
            width_px=int(self.widths_px[largest]),
            height_px=int(self.heights_px[largest]),
            points=self.points,
        )


def _without_batches(manager: type) -> type:
    """A datamanager that reads the capture and prepares nothing to train on it."""

    def nothing(self: object) -> None:
        pass

    return type(manager.__name__, (manager,), {"setup_train": nothing, "setup_eval": nothing})


def _size(heights_px: np.ndarray, widths_px: np.ndarray) -> str:
    largest = int((heights_px * widths_px).argmax())
    size = f"{widths_px[largest]} × {heights_px[largest]} pixels"
    same = np.ptp(heights_px) == 0 == np.ptp(widths_px)
    return size if same else f"up to {size}"
