"""Views of a trained scene: rendered colours and depth, kept on disk, and the pixels on which views agree."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from nerfstudio.cameras.cameras import Cameras, CameraType
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.stereo.agreement import DepthMaps
from f3rm_ext.errors import ConfigError, MeshError, reason_of
from f3rm_ext.mesh.camera import Camera
from f3rm_ext.query.queryable import Queryable
from f3rm_ext.utils.pictures import to_bytes

MIN_ACCUMULATION = 0.5
"""Pixels with less accumulation have no depth."""
NO_DEPTH = (
    "No depth is left to fuse: the views show no surface on which enough of them agree, so lower --min-views, raise "
    "--tolerance, or train longer."
)
"""Error where no view has depth."""


Depth = Literal["median", "mean", "planes"]
"""Where a surface is along a ray: where half of the weight is reached, at the mean of all weights, or on the planes of
the Gaussians at which the ray stops."""


class RenderedView(NamedTuple):
    """A rendered view."""

    color: UInt8[np.ndarray, "h w 3"]
    depth: Float32[np.ndarray, "h w"]
    """Depth along the camera's axis, scene units; 0 where there is no surface."""


@dataclass
class SceneViews:
    """The views of a trained scene from which a mesh is extracted."""

    cameras: PinholeCameras
    """Cameras of the views, on the CPU, in the frame of the scene."""
    render: Callable[[int], RenderedView]

    def __len__(self) -> int:
        return len(self.cameras.widths)

    @classmethod
    def from_field(cls, model: Queryable, cameras: Cameras, scale: float, depth: Depth) -> "SceneViews":
        """Returns the views of a field, as pinhole cameras without distortion.

        Args:
            model: renders ``rgb``, ``accumulation``, and ``depth`` (median) and ``expected_depth`` along the rays.
            cameras: the training cameras, scene frame.
            scale: factor on the width and height of the pictures.

        Raises:
            ConfigError: a field has no such depth, or pictures would have no pixel.
        """
        if depth == "planes":
            raise ConfigError("--depth planes is that of Gaussians, and this run is a field: use median or mean.")
        cameras = pinhole(cameras, scale)
        views = PinholeCameras.of(cameras)
        output = {"median": "depth", "mean": "expected_depth"}[depth]

        @torch.inference_mode()
        def render(index: int) -> RenderedView:
            outputs = model.render_camera(cameras[index : index + 1].to(model.device), {})
            _, directions = Camera.of(views, index).pixel_rays()
            per_depth = torch.from_numpy(np.linalg.norm(directions, axis=-1, keepdims=True)).float()
            return rendered_view(outputs, outputs[output].cpu() / per_depth)

        return cls(views, render)


def rendered_view(outputs: Mapping[str, Tensor], depth: Float[Tensor, "h w 1"]) -> RenderedView:
    """Returns a view from a model's ``rgb`` and ``accumulation``, (h, w, channels), and its depth.

    Pixels that are hardly opaque get no depth.
    """
    depth = depth.cpu()
    solid = (outputs["accumulation"].cpu() >= MIN_ACCUMULATION) & depth.isfinite() & (depth > 0)
    depth = torch.where(solid, depth, 0)[..., 0]
    return RenderedView(to_bytes(outputs["rgb"].cpu().numpy()), depth.float().numpy())


class StoredViews(DepthMaps):
    """Rendered views in files, so that memory holds one at a time."""

    def __init__(self, cameras: PinholeCameras, folder: Path) -> None:
        super().__init__(cameras)
        self._folder = folder

    def color(self, index: int) -> UInt8[np.ndarray, "h w 3"]:
        """Returns the colours of a view."""
        return self._read(f"color{index}", index, np.uint8, 3)

    def depth(self, index: int) -> Float32[np.ndarray, "h w"]:
        """Returns the depth of a view as it was set last; 0 where there is none."""
        if (self._folder / f"depth{index}").exists():
            return self._read(f"depth{index}", index, np.float32)
        return self.rendered_depth(index)

    def rendered_depth(self, index: int) -> Float32[np.ndarray, "h w"]:
        """Returns the depth of a view as it was rendered; 0 where there is none."""
        return self._read(f"rendered{index}", index, np.float32)

    def put(self, index: int, view: RenderedView) -> None:
        """Stores a view. Raises MeshError where the disk is full."""
        write_values(self._folder / f"color{index}", view.color)
        write_values(self._folder / f"rendered{index}", view.depth)

    def set_depth(self, index: int, depth: Float32[np.ndarray, "h w"]) -> None:
        """Replaces the depth of a view; those that have read the old one keep it. Raises MeshError as :meth:`put`."""
        (self._folder / f"depth{index}").unlink(missing_ok=True)
        write_values(self._folder / f"depth{index}", depth)

    def _read(self, name: str, index: int, dtype: type, *channels: int) -> np.ndarray:
        """Maps a file without a header, whose parsing would take most of the time where each view reads all others."""
        size = (int(self.cameras.heights[index]), int(self.cameras.widths[index]))
        return np.memmap(self._folder / name, dtype, "r", shape=(*size, *channels))


def write_values(path: Path, values: np.ndarray) -> None:
    """Writes values of a view to a file without a header in a temporary folder. Raises MeshError where the disk is
    full."""
    try:
        values.tofile(path)
    except OSError as error:
        raise MeshError(
            f"Rendered views cannot be kept in {path.parent.parent} ({reason_of(error)}): free space there, set TMPDIR "
            "to a folder with more, or lower --resolution-scale."
        ) from error


@contextlib.contextmanager
def stored_views(views: SceneViews, on_progress: Callable[[int], None] = lambda done: None) -> Iterator[StoredViews]:
    """Renders all views into a temporary folder, which is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="f3rm-ext-views-") as folder:
        stored = StoredViews(views.cameras, Path(folder))
        for index in range(len(views)):
            stored.put(index, views.render(index))
            on_progress(index + 1)
        yield stored


def pinhole(cameras: Cameras, scale: float) -> Cameras:
    """Returns cameras on the CPU without distortion, resized; they need not be those of the photos. Raises ConfigError
    where pictures would have no pixel."""
    shortest = int(torch.minimum(cameras.width, cameras.height).min())
    if not shortest * scale >= 1:
        raise ConfigError(
            f"--resolution-scale is {scale:g}, which leaves nothing of a side of {shortest} pixels: raise it."
        )
    names = ("camera_to_worlds", "fx", "fy", "cx", "cy", "width", "height")
    copy = Cameras(**{name: getattr(cameras, name).cpu().clone() for name in names}, camera_type=CameraType.PERSPECTIVE)
    if scale != 1.0:
        copy.rescale_output_resolution(scale)
    return copy


def pixel_size(stored: StoredViews) -> float:
    """Returns the median width of a pixel on the surface, scene units. Raises MeshError where no view has depth."""
    known = (depth[depth > 0] for depth in map(stored.depth, range(len(stored))))
    focal = stored.cameras.Ks[:, 0, 0].tolist()
    medians = [float(np.median(depth)) / px for depth, px in zip(known, focal, strict=True) if len(depth)]
    if not medians:
        raise MeshError(NO_DEPTH)
    return float(np.median(medians))
