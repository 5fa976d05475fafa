"""What is planned: a method with its options, the sizes of a capture's images, and a device."""

import copy
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.engine.trainer import TrainerConfig

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.capture.points import XYZ
from f3rm_ext.data.cycling_config import CyclingConfig
from f3rm_ext.data.stereo import DenseMode
from f3rm_ext.data.stereo.points import missing_points
from f3rm_ext.data.undistort import shrunk_size
from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.errors import CaptureError, reason_of
from f3rm_ext.memory.devices import Device
from f3rm_ext.mesh.bound.start import read_start_mesh
from f3rm_ext.mesh.bound.subdivision import add_detail
from f3rm_ext.splat.start_from import read_start
from f3rm_ext.utils.console import messages_to_stderr

Options = tuple[tuple[str, str], ...]
"""Options of ns-train: names without dashes, and values."""
ASSUMED_IMAGES, ASSUMED_SIDE_PX = 100, 1024
"""What is planned with where neither a capture nor sizes are given."""


@dataclass(frozen=True)
class CaptureSizes:
    """What the memory of a run depends on of a capture: sizes only, no pixels."""

    train_images: int
    eval_images: int
    width_px: int
    """Width of the largest training image, at the resolution of training."""
    height_px: int
    """Height of the largest training image, at the resolution of training."""
    points: int = 0
    """Number of initial points for splats; 0 if the capture has none."""


@dataclass(frozen=True)
class RefinementStart:
    """Sizes of the mesh and the splats that a refinement starts from."""

    vertices: int
    """Number of vertices, including those that dividing triangles adds."""
    triangles: int
    """Number of triangles; a divided one counts as its parts."""
    free: int = 0
    """Gaussians that belong to no triangle."""

    @classmethod
    def from_options(cls, model: Any, data: Path, outputs: DataparserOutputs) -> "RefinementStart":
        """Counts what a run that starts from splats begins with, as the run itself does.

        Args:
            model: options of the refinement, with a mesh and splats.

        Raises:
            MeshError: the mesh cannot be read.
            UserError: the splats cannot be read.
        """
        with messages_to_stderr():
            splats = read_start(model.start_from, model.start_iteration).to_scene(outputs, model.start_frame)
            mesh = read_start_mesh(model.mesh, model.mesh_frame, lambda: CaptureFrame.from_outputs(outputs, data))
        centres = splats.gaussians.means.detach().float().cpu()
        cameras = outputs.cameras.camera_to_worlds[:, :3, 3].float()
        mesh, far = add_detail(mesh, centres, cameras, model.free_beyond, model.gaussians_per_triangle)
        return cls(len(mesh.vertices), len(mesh.faces), int(far.sum()))

    @staticmethod
    @functools.cache
    def from_mesh(path: Path) -> "RefinementStart":
        """Counts a mesh as it is, without splats to start from.

        Raises:
            MeshError: the mesh cannot be read.
        """
        mesh = read_start_mesh(path, "scene", None)  # the numbers are the same in both frames
        return RefinementStart(len(mesh.vertices), len(mesh.faces))


@dataclass(frozen=True)
class PlanRequest:
    """A run to be planned."""

    config: F3rmTrainerConfig
    """The run as ``ns-train`` would start it with the same arguments."""
    capture: CaptureSizes
    device: Device
    """The device; with several, each of them."""
    processes: int = 1
    """Number of devices on all machines."""
    gaussians: int | None = None
    """Gaussians at the end of training, for splats; None for what the options and the capture suggest."""
    pictures: bool = True
    """Whether evaluation pictures and queries are planned as well as training steps."""
    start: RefinementStart | None = None
    """What a refinement starts from, if its mesh, splats and capture are given; None for the mesh as it is."""


@dataclass(frozen=True)
class ImageSizes:
    """Sizes of all images of a capture, at the resolution of training."""

    heights_px: Int64[np.ndarray, "cams"]
    """Heights of the training images."""
    widths_px: Int64[np.ndarray, "cams"]
    """Widths of the training images."""
    eval_images: int
    points: int = 0
    """Number of initial points for splats; 0 if the capture has none."""
    source: str = ""
    """The origin of the sizes, as the plan prints it."""
    parsed: tuple[Path, DataparserOutputs] | None = field(default=None, repr=False, compare=False)
    """The capture, and the dataparser's outputs for its training images; None where only numbers are known."""
    scale: float = 1.0
    """Scale of the images, which the options may leave open."""

    @classmethod
    def from_numbers(
        cls, config: TrainerConfig, images: int, width_px: int, height_px: int, points: int = 0, source: str = ""
    ) -> "ImageSizes":
        """Makes equal sizes, scaled as the options say."""
        manager: Any = config.pipeline.datamanager
        scale = (
            manager.resolve_scale(*map(torch.tensor, (width_px, height_px)))
            if isinstance(manager, CyclingConfig)
            else 1.0
        )
        height, width = shrunk_size(height_px, width_px, scale)
        source = source or f"{images} training images of {width_px} × {height_px} pixels, as given"
        return cls(np.full(images, height), np.full(images, width), 0, points, source, scale=scale)

    @classmethod
    def from_capture(cls, config: TrainerConfig) -> "ImageSizes":
        """Reads the sizes of the capture that the options name; opens no image beyond its header.

        Raises:
            UserError: the capture cannot be used.
        """
        options: Any = copy.deepcopy(config.pipeline.datamanager)
        options.features.extractors = ()  # or they would be extracted
        mode: DenseMode = getattr(options, "stereo_points", "never")
        options.stereo_points = "never"  # or they would be computed
        with messages_to_stderr():
            try:
                manager = _strip_batches(options._target)(options, device="cpu", test_mode="val")
            except (OSError, AssertionError) as error:  # raised by nerfstudio's own dataparsers
                raise CaptureError(
                    f"The capture {options.dataparser.data} cannot be read ({reason_of(error)}): check the path and "
                    "the dataparser."
                ) from error
        cameras = manager.train_dataset.cameras
        metadata = manager.train_dataset.metadata
        points = len(metadata.get(XYZ, ())) + missing_points(metadata, mode)
        heights, widths = (getattr(cameras, name).reshape(-1).numpy().astype(np.int64) for name in ("height", "width"))
        return cls(
            heights,
            widths,
            0 if manager.eval_dataset is None else len(manager.eval_dataset),
            points,
            f"{len(heights)} training images of {_largest_size(heights, widths)} in {manager.config.dataparser.data}",
            (Path(manager.config.dataparser.data), manager.train_dataparser_outputs),
            manager.config.camera_res_scale_factor,
        )

    @classmethod
    def from_assumption(cls, config: TrainerConfig) -> "ImageSizes":
        """Makes sizes where none are given; :attr:`source` says so."""
        side = ASSUMED_SIDE_PX
        source = (
            f"{ASSUMED_IMAGES} training images of {side} × {side} pixels, assumed: give --data, or --images, "
            "--width-px and --height-px"
        )
        return cls.from_numbers(config, ASSUMED_IMAGES, side, side, source=source)

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


def _strip_batches(manager: type) -> type:
    """A datamanager that reads the capture and prepares nothing to train on it."""
    return type(manager.__name__, (manager,), dict.fromkeys(("setup_train", "setup_eval"), lambda self: None))


def _largest_size(heights_px: np.ndarray, widths_px: np.ndarray) -> str:
    largest = int((heights_px * widths_px).argmax())
    size = f"{widths_px[largest]} × {heights_px[largest]} pixels"
    same = np.ptp(heights_px) == 0 == np.ptp(widths_px)
    return size if same else f"up to {size}"
