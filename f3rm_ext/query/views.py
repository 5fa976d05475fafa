"""Which views a query looks at: photos of the capture, or a camera path made in the viewer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.run import Photos

DEFAULT_FPS = 24.0


@dataclass(frozen=True)
class View:
    """A view to render."""

    name: str
    """Unique; used in file names."""
    camera: Cameras
    """One camera, scene frame."""
    photo: tuple[str, int] | None = None
    """Split and index of the photo taken there, where there is one."""


@dataclass(frozen=True)
class CameraPath:
    """A camera path of nerfstudio's viewer."""

    cameras: Cameras
    """In order, scene frame."""
    fps: float
    """Frames per second at which it lasts as long as its author wanted."""
    has_crop: bool
    """Whether it names a crop box, which queries do not know."""

    def views(self, scale: float = 1.0) -> list[View]:
        """One view per frame."""
        return [View(f"frame-{i:05d}", _camera(self.cameras, i, scale)) for i in range(len(self.cameras))]


def read_path(path: Path) -> CameraPath:
    """Reads a camera path as nerfstudio's viewer saves it.

    Raises:
        ConfigError: there is no such file, or it is no camera path.
    """
    from nerfstudio.cameras.camera_paths import get_path_from_json

    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"There is no camera path {path}: save one in the viewer's Render tab.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"The camera path {path} cannot be read ({error}): save it in the viewer again.") from error
    try:
        if not meta["camera_path"] or min(meta["render_width"], meta["render_height"]) < 1:
            raise ValueError("it has no cameras, or no size")
        cameras = get_path_from_json(meta)
        if not (cameras.camera_to_worlds.isfinite().all() and cameras.fx.isfinite().all() and (cameras.fx > 0).all()):
            raise ValueError("a pose or a focal length is not a usable number")
        seconds = float(meta.get("seconds") or 0.0)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise ConfigError(
            f"{path} is no camera path of nerfstudio's viewer ({type(error).__name__}: {error}): "
            "save one in the viewer's Render tab."
        ) from error
    fps = len(cameras) / seconds if seconds > 0 else float(meta.get("fps") or DEFAULT_FPS)
    return CameraPath(cameras, fps, bool(meta.get("crop")))


def photo_views(photos: Photos, which: str, scale: float = 1.0) -> list[View]:
    """Views of photos of the capture.

    Args:
        photos: of the capture.
        which: ``train``, ``test``, ``all``, or the name of a photo.
        scale: factor of the image size.

    Raises:
        ConfigError: there are none, or no such photo.
    """
    if which in ("train", "test"):
        found = [(which, index) for index in range(len(photos.files(which)))]
    elif which == "all":
        splits = ("train",) if photos.manager.eval_dataset is None else ("train", "test")
        found = [(split, index) for split in splits for index in range(len(photos.files(split)))]
    else:
        place = photos.find_photo(which)
        if place is None:
            raise ConfigError(
                f"There are no views {which!r}: give all, train, test, the name of a photo of the capture, "
                "or a camera path of the viewer (.json)."
            )
        found = [place]
    return [
        View(name, _camera(photos.cameras(split), index, scale), (split, index))
        for name, (split, index) in zip(_names(photos, found), found, strict=True)
    ]


def _names(photos: Photos, found: Sequence[tuple[str, int]]) -> list[str]:
    """Names of photos without their suffix; photos of the same name in several folders get numbers."""
    stems = [photos.files(split)[index].stem for split, index in found]
    counts = {stem: stems.count(stem) for stem in set(stems)}
    return [
        stem if counts[stem] == 1 else f"{stem}-{split}-{index:04d}"
        for stem, (split, index) in zip(stems, found, strict=True)
    ]


def _camera(cameras: Cameras, index: int, scale: float) -> Cameras:
    """One camera at another image size; the given ones stay as they are."""
    camera = cameras[index : index + 1].to(torch.device("cpu"))
    if scale != 1.0:
        if min(int(camera.width.item()), int(camera.height.item())) * scale < 1:
            raise ConfigError(f"The scale {scale} leaves nothing of the images: use a larger one.")
        camera.rescale_output_resolution(scale)
    return camera
