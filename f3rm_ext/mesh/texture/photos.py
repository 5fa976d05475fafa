"""The photos that colour a mesh: pinhole cameras in the mesh's own frame, and pictures read one at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, UInt8

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError

if TYPE_CHECKING:
    from f3rm_ext.data.pinhole_dataset import PinholeDataset

_OPAQUE = 250
"""Alpha below which a pixel shows more than its own surface."""


class Photo(NamedTuple):
    """An undistorted photo."""

    colors: UInt8[np.ndarray, "h w 3"]
    """Colours."""
    valid: Bool[np.ndarray, "h w"] | None
    """Pixels that are neither masked nor transparent; None if that is all."""


class Camera(NamedTuple):
    """A pinhole camera, OpenCV axes."""

    rotation: Float[np.ndarray, "3 3"]
    """World to camera."""
    center: Float[np.ndarray, "3"]
    """Where it is in the world."""
    focal: Float[np.ndarray, "2"]
    """Horizontal and vertical focal length, pixels."""
    middle: Float[np.ndarray, "2"]
    """Principal point, pixels."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""

    def project(self, points: Float[np.ndarray, "n 3"]) -> tuple[Float[np.ndarray, "n 2"], Float[np.ndarray, " n"]]:
        """Returns where points are in the picture, pixels, and their depth; behind the camera it is ≤ 0."""
        at = (points - self.center) @ self.rotation.T
        depth = at[:, 2]
        return at[:, :2] / np.maximum(depth, 1e-9)[:, None] * self.focal + self.middle, depth

    def rays(self, places: Float[np.ndarray, "*shape 2"]) -> Float[np.ndarray, "*shape 6"]:
        """Returns origins and directions of rays through places in the picture; directions have depth 1."""
        ahead = (places - self.middle) / self.focal
        ahead = np.concatenate([ahead, np.ones_like(ahead[..., :1])], axis=-1) @ self.rotation
        return np.concatenate([np.broadcast_to(self.center, ahead.shape), ahead], axis=-1).astype(np.float32)


@dataclass
class Photos:
    """Photos of a capture with their cameras."""

    cameras: list[Camera]
    """In the frame of the mesh."""
    read: Callable[[int], Photo]
    """Reads a photo by its index."""

    def __len__(self) -> int:
        return len(self.cameras)


@dataclass(frozen=True)
class PhotoSource:
    """A capture, or that of a run."""

    parser: Any
    """nerfstudio's dataparser."""
    data: Path
    """The capture."""

    def photos(self, split: Literal["train", "test"], frame: Literal["capture", "scene"]) -> Photos:
        """Returns the photos of a split, undistorted, with cameras in one of the two frames.

        Raises:
            CaptureError: the capture cannot be used.
            ConfigError: there are no such photos.
        """
        from f3rm_ext.data.pinhole_dataset import PinholeDataset

        outputs = self.parser.get_dataparser_outputs(split)
        if not outputs.image_filenames:
            raise ConfigError(f"{self.data} has no held-out photos: add test_filenames to its transforms.json.")
        frames = CaptureFrame.of_outputs(outputs, self.data) if frame == "capture" else None
        return photos_of(PinholeDataset(outputs), frames)


def photos_of(dataset: "PinholeDataset", frame: CaptureFrame | None) -> Photos:
    """Returns the photos of a data set.

    Args:
        dataset: the photos, undistorted.
        frame: frame of the capture, for cameras in it; None for the scene frame.
    """
    views = PinholeCameras.of(dataset.cameras)
    cameras = [_camera(views, index, frame) for index in range(len(views.widths))]

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
    """Returns the photos of a capture.

    Raises:
        CaptureError: it cannot be read.
    """
    from f3rm_ext.capture.dataparser import CaptureDataParserConfig

    return PhotoSource(CaptureDataParserConfig(data=data).setup(), data)


def open_run_capture(load_config: Path) -> PhotoSource:
    """Returns the photos of a run's capture, as its dataparser reads them. No checkpoint is needed.

    Raises:
        ConfigError: there is no such file, or it cannot be understood.
        CaptureError: the capture cannot be read.
    """
    from f3rm_ext.engine.config_file import read_config

    if not load_config.is_file():
        raise ConfigError(f"There is no file {load_config}: give the config.yml that ns-train wrote for a run.")
    manager = read_config(load_config).pipeline.datamanager
    parser = manager.dataparser  # type: ignore[attr-defined]
    data = Path(manager.data or parser.data)
    parser.data = data
    return PhotoSource(parser.setup(), data)


def _camera(views: PinholeCameras, index: int, frame: CaptureFrame | None) -> Camera:
    viewmat, K = views.viewmats[index].double().numpy(), views.Ks[index].double().numpy()
    rotation, center = viewmat[:3, :3], -viewmat[:3, :3].T @ viewmat[:3, 3]
    if frame is not None:
        rotation, center = rotation @ frame.rotation, frame.to_capture(center)
    return Camera(rotation, center, K[[0, 1], [0, 1]], K[:2, 2], int(views.widths[index]), int(views.heights[index]))
