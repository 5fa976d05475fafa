"""The photos that colour a mesh: pinhole cameras in the mesh's own frame, and pictures read one at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError
from f3rm_ext.mesh.camera import Camera

if TYPE_CHECKING:
    from f3rm_ext.data.pinhole_dataset import PinholeDataset

UNSEEN = (
    "No training photo sees the mesh: it is of another capture or in another frame, so try --frame scene or --frame "
    "capture."
)
_OPAQUE = 250
"""Alpha below which a pixel shows more than its own surface."""


class Photo(NamedTuple):
    """An undistorted photo."""

    colors: UInt8[np.ndarray, "h w 3"]
    valid: Bool[np.ndarray, "h w"] | None
    """Pixels that are neither masked nor transparent; None if that is all."""


@dataclass
class Photos:
    """Photos of a capture with their cameras."""

    cameras: list[Camera]
    """Cameras in the frame of the mesh."""
    read: Callable[[int], Photo]

    def __len__(self) -> int:
        return len(self.cameras)


@dataclass(frozen=True)
class PhotoSource:
    """A capture, or that of a run."""

    parser: Any
    """nerfstudio's dataparser."""
    data: Path

    def photos(self, split: Literal["train", "test"], mesh: Path, frame: Literal["auto", "capture", "scene"]) -> Photos:
        """Returns the photos of a split, undistorted, with cameras in the frame of a mesh.

        Raises:
            CaptureError: the capture cannot be used.
            ConfigError: there are no such photos.
            MeshError: the mesh is in the scene frame of another capture.
        """
        from f3rm_ext.data.pinhole_dataset import PinholeDataset
        from f3rm_ext.mesh.mesh_files import find_frame

        outputs = self.parser.get_dataparser_outputs(split)
        if not outputs.image_filenames:
            raise ConfigError(f"{self.data} has no held-out photos: add test_filenames to its transforms.json.")
        capture = CaptureFrame.from_outputs(outputs, self.data)
        is_scene = find_frame(mesh, frame, lambda: capture) == "scene"
        return dataset_photos(PinholeDataset(outputs), None if is_scene else capture)


def dataset_photos(dataset: "PinholeDataset", frame: CaptureFrame | None) -> Photos:
    """Returns the photos of a data set, with cameras in the frame of the capture, or in the scene frame for None."""
    views = PinholeCameras.of(dataset.cameras)
    cameras = [Camera.of(views, index, frame) for index in range(len(views.widths))]

    def read(index: int) -> Photo:
        picture = dataset.picture(index)
        pixels = picture.pixels.numpy()
        valid = None if picture.valid is None else picture.valid.numpy()
        if pixels.shape[2] == 4:
            opaque = pixels[..., 3] >= _OPAQUE
            valid = opaque if valid is None else valid & opaque
        return Photo(pixels[..., :3], valid)

    return Photos(cameras, read)


def open_capture(data: Path) -> PhotoSource:
    """Returns the photos of a capture. Raises CaptureError where it cannot be read."""
    from f3rm_ext.capture.dataparser import CaptureDataParserConfig

    return PhotoSource(CaptureDataParserConfig(data=data).setup(), data)


def open_run_capture(load_config: Path) -> PhotoSource:
    """Returns the photos of a run's capture, as its dataparser reads them. No checkpoint is needed.

    Raises:
        ConfigError: there is no such file, or it cannot be understood.
        CaptureError: the capture cannot be read.
    """
    from f3rm_ext.engine.config_file import read_config

    manager: Any = read_config(load_config).pipeline.datamanager
    parser, data = manager.dataparser, Path(manager.data or manager.dataparser.data)
    parser.data = data
    return PhotoSource(parser.setup(), data)
