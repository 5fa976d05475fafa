"""Views of a trained scene: rendered colours and depth, kept on disk, and the pixels on which views agree."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, UInt8
from nerfstudio.cameras.cameras import Cameras, CameraType
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.queryable import Queryable
from f3rm_ext.splat.cameras import PinholeCameras
from f3rm_ext.utils.pictures import to_bytes

MIN_ACCUMULATION = 0.5
"""Pixels with less accumulation have no depth."""
NEIGHBOURS = 8
"""Views that each view is compared with."""
_PROBES = 400
"""Pixels of a view from which its neighbours are chosen."""


Depth = Literal["median", "mean", "planes"]
"""Where a surface is along a ray: where half of the weight is reached, at the mean of all weights, or on the planes of
the Gaussians at which the ray stops."""


class RenderedView(NamedTuple):
    """A rendered view."""

    color: UInt8[np.ndarray, "h w 3"]
    """Colours."""
    depth: Float32[np.ndarray, "h w"]
    """Depth along the camera's axis, scene units; 0 where there is no surface."""


@dataclass
class SceneViews:
    """The views of a trained scene from which a mesh is extracted."""

    cameras: PinholeCameras
    """On the CPU, scene frame."""
    render: Callable[[int], RenderedView]
    """Renders a view by its index."""

    def __len__(self) -> int:
        return len(self.cameras.widths)

    @classmethod
    def of_field(cls, model: Queryable, cameras: Cameras, scale: float = 1.0, depth: Depth = "median") -> "SceneViews":
        """Returns the views of a field, as pinhole cameras without distortion.

        Args:
            model: renders ``rgb``, ``accumulation``, and ``depth`` (median) and ``expected_depth`` along the rays.
            cameras: the training cameras, scene frame.
            scale: factor on the width and height of the pictures.
            depth: where the surface is along a ray.

        Raises:
            ConfigError: a field has no such depth.
        """
        if depth == "planes":
            raise ConfigError("--depth planes is that of Gaussians, and this run is a field: use median or mean.")
        cameras = pinhole(cameras, scale)
        views = PinholeCameras.of(cameras)
        output = {"median": "depth", "mean": "expected_depth"}[depth]

        @torch.inference_mode()
        def render(index: int) -> RenderedView:
            outputs = model.render_camera(cameras[index : index + 1].to(model.device), {})
            return rendered_view(outputs, outputs[output].cpu() / _ray_lengths(views, index)[..., None])

        return cls(views, render)


def rendered_view(outputs: Mapping[str, Tensor], depth: Float[Tensor, "h w 1"]) -> RenderedView:
    """Returns a view from the outputs of a model; pixels that are hardly opaque get no depth.

    Args:
        outputs: ``rgb`` and ``accumulation``, (h, w, channels).
        depth: along the camera's axis.
    """
    depth = depth.cpu()
    solid = (outputs["accumulation"].cpu() >= MIN_ACCUMULATION) & depth.isfinite() & (depth > 0)
    depth = torch.where(solid, depth, 0)[..., 0]
    return RenderedView(to_bytes(outputs["rgb"].cpu().numpy()), depth.float().numpy())


class StoredViews:
    """Rendered views in files, so that memory holds one at a time."""

    def __init__(self, cameras: PinholeCameras, folder: Path) -> None:
        self.cameras = cameras
        self._folder = folder

    def __len__(self) -> int:
        return len(self.cameras.widths)

    def color(self, index: int) -> UInt8[np.ndarray, "h w 3"]:
        """Returns the colours of a view."""
        return np.load(self._folder / f"color{index}.npy", mmap_mode="r")

    def depth(self, index: int) -> Float32[np.ndarray, "h w"]:
        """Returns the depth of a view as it was set last; 0 where there is none."""
        path = self._folder / f"depth{index}.npy"
        return np.load(path, mmap_mode="r") if path.exists() else self.rendered_depth(index)

    def rendered_depth(self, index: int) -> Float32[np.ndarray, "h w"]:
        """Returns the depth of a view as it was rendered; 0 where there is none."""
        return np.load(self._folder / f"rendered{index}.npy", mmap_mode="r")

    def put(self, index: int, view: RenderedView) -> None:
        """Stores a view."""
        np.save(self._folder / f"color{index}.npy", view.color)
        np.save(self._folder / f"rendered{index}.npy", view.depth)

    def set_depth(self, index: int, depth: Float32[np.ndarray, "h w"]) -> None:
        """Replaces the depth of a view; those that have read the old one keep it."""
        path = self._folder / f"depth{index}.npy"
        path.unlink(missing_ok=True)
        np.save(path, depth)

    def points(self, index: int) -> tuple[Float[Tensor, "points 3"], Int[Tensor, " points"]]:
        """Returns where the pixels with depth are, scene frame, float64, and their indices in the flattened picture."""
        depth = torch.from_numpy(np.array(self.depth(index)))
        pixels = (depth.flatten() > 0).nonzero().squeeze(1)
        return unproject(self.cameras, index, depth.flatten()[pixels].double(), pixels), pixels


@contextlib.contextmanager
def stored_views(views: SceneViews, on_progress: Callable[[int], None] = lambda done: None) -> Iterator[StoredViews]:
    """Renders all views into a temporary folder, which is deleted at the end.

    Args:
        views: what to render.
        on_progress: called with the number of views done.
    """
    with tempfile.TemporaryDirectory(prefix="f3rm-ext-views-") as folder:
        stored = StoredViews(views.cameras, Path(folder))
        for index in range(len(views)):
            stored.put(index, views.render(index))
            on_progress(index + 1)
        yield stored


def pinhole(cameras: Cameras, scale: float) -> Cameras:
    """Returns cameras on the CPU without distortion, resized; they need not be those of the photos."""
    names = ("camera_to_worlds", "fx", "fy", "cx", "cy", "width", "height")
    made = Cameras(**{name: getattr(cameras, name).cpu().clone() for name in names}, camera_type=CameraType.PERSPECTIVE)
    if scale != 1.0:
        made.rescale_output_resolution(scale)
    return made


def unproject(
    cameras: PinholeCameras, index: int, depth: Float[Tensor, " points"], pixels: Int[Tensor, " points"]
) -> Float[Tensor, "points 3"]:
    """Returns where pixels lie at some depth, scene frame, float64.

    Args:
        cameras: all cameras.
        index: the camera.
        depth: along the camera's axis.
        pixels: indices in the flattened picture; a pixel's centre is at its half.
    """
    K, viewmat, width = cameras.Ks[index].double(), cameras.viewmats[index].double(), int(cameras.widths[index])
    x = (pixels % width + 0.5 - K[0, 2]) / K[0, 0]
    y = (pixels // width + 0.5 - K[1, 2]) / K[1, 1]
    at = torch.stack([x * depth, y * depth, depth.double()], dim=1)
    return (at - viewmat[:3, 3]) @ viewmat[:3, :3]


def project(
    cameras: PinholeCameras, index: int, points: Float[Tensor, "points 3"]
) -> tuple[Int[Tensor, " points"], Float[Tensor, " points"], Bool[Tensor, " points"]]:
    """Returns the pixels (in the flattened picture) and depths of points, and which are in the picture."""
    K, viewmat = cameras.Ks[index].double(), cameras.viewmats[index].double()
    width, height = int(cameras.widths[index]), int(cameras.heights[index])
    x, y, z = (points @ viewmat[:3, :3].T + viewmat[:3, 3]).unbind(1)
    safe = z.clamp_min(1e-9)
    col, row = (K[0, 0] * x / safe + K[0, 2]).floor(), (K[1, 1] * y / safe + K[1, 2]).floor()
    inside = (z > 0) & (col >= 0) & (col < width) & (row >= 0) & (row < height)
    return torch.where(inside, row * width + col, 0).long(), z, inside


def agreeing_depth(stored: StoredViews, index: int, min_views: int, tolerance: float) -> Float32[np.ndarray, "h w"]:
    """Returns the depth of a view, 0 where too few views agree with it.

    A view agrees where its depth is the same; it objects where it looks through the point at something farther away.
    A pixel stays where enough views agree, itself included, and no more object. A view that the point is hidden from
    says nothing.

    Args:
        stored: all views.
        index: the view.
        min_views: views that must agree, itself included.
        tolerance: largest difference, as a share of the depth.
    """
    depth = np.array(stored.depth(index))
    if min_views <= 1:
        return depth
    points, pixels = stored.points(index)
    agree, object_ = torch.ones(len(points), dtype=torch.int16), torch.zeros(len(points), dtype=torch.int16)
    for other in _neighbours(stored, index, points):
        place, z, inside = project(stored.cameras, other, points)
        seen = torch.from_numpy(np.array(stored.depth(other))).flatten()[place].double()
        inside &= seen > 0
        gap = (seen - z) / z.clamp_min(1e-9)
        agree += inside & (gap.abs() <= tolerance)
        object_ += inside & (gap > 3 * tolerance)
    dropped = pixels[(agree < min_views) | (object_ >= agree)]
    depth.reshape(-1)[dropped.numpy()] = 0
    return depth


def pixel_size(stored: StoredViews) -> float:
    """Returns the median width of a pixel on the surface, scene units; 0 if no view has depth."""
    medians = []
    for index in range(len(stored)):
        depth = np.asarray(stored.depth(index))
        if (depth > 0).any():
            medians.append(float(np.median(depth[depth > 0])) / float(stored.cameras.Ks[index, 0, 0]))
    return float(np.median(medians)) if medians else 0.0


def _neighbours(stored: StoredViews, index: int, points: Tensor) -> list[int]:
    """The views that see most of a view's points."""
    probes = points[torch.linspace(0, len(points) - 1, _PROBES).long()] if len(points) > _PROBES else points
    counts = []
    for other in range(len(stored)):
        if other == index:
            continue
        place, z, inside = project(stored.cameras, other, probes)
        seen = torch.from_numpy(np.asarray(stored.depth(other)).reshape(-1)[place.numpy()]).double()
        counts.append((int((inside & ((seen - z).abs() < 0.1 * z)).sum()), other))
    return [other for count, other in sorted(counts, reverse=True)[:NEIGHBOURS] if count]


def _ray_lengths(views: PinholeCameras, index: int) -> Float[Tensor, "h w"]:
    """Length of each pixel's ray per unit of depth."""
    width, height, K = int(views.widths[index]), int(views.heights[index]), views.Ks[index]
    x, y = (torch.arange(width) + 0.5 - K[0, 2]) / K[0, 0], (torch.arange(height) + 0.5 - K[1, 2]) / K[1, 1]
    return (1 + x.square() + y[:, None].square()).sqrt()
