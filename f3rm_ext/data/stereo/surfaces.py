"""What stereo of small photos tells of surfaces: their share of the pixels, and where training rays meet them."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from torch import Tensor

from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.stereo.agreement import DepthMaps, agreeing_depth
from f3rm_ext.data.stereo.points import MIN_VIEWS
from f3rm_ext.data.stereo.sweep import AGREEING, PhotoStereo, StereoOptions, nearby_views
from f3rm_ext.errors import CaptureError
from f3rm_ext.utils import threads
from f3rm_ext.utils.console import image_progress
from f3rm_ext.utils.pictures import pick_evenly

_SIDE_PX = 160
"""Longer side of the photos."""
_OPTIONS = StereoOptions(depths=64, neighbours=4, least_score=0.6)
_SHARE_VIEWS = 4
"""Photos in which the share of surfaces is measured."""
_RAY_VIEWS = 100
"""Photos whose rays get a depth, evenly among all: a tenth of a second of a core each."""


@dataclass(frozen=True)
class RayDepths:
    """Where the rays of some photos meet a surface."""

    viewmats: Float[Tensor, "views 4 4"]
    """Scene to camera, OpenCV axes."""
    Ks: Float[Tensor, "views 3 3"]
    """Intrinsics of the depth maps."""
    depths: Float[Tensor, "views h w"]
    """Depth along the camera's axis, scene units; 0 where nothing is known."""
    views: Int[Tensor, " photos"]
    """View of each photo; -1 if it has none."""

    def to(self, device: torch.device) -> "RayDepths":
        """Returns them on a device."""
        return RayDepths(*(part.to(device) for part in (self.viewmats, self.Ks, self.depths, self.views)))

    def along(self, photos: Int[Tensor, " rays"], directions: Float[Tensor, "rays 3"]) -> Float[Tensor, " rays"]:
        """Returns the distances at which rays meet a surface, in lengths of their directions; 0 where that is unknown.

        Args:
            photos: indices of the photos from whose centres the rays start.
            directions: scene frame.
        """
        view = self.views[photos]
        known, view = view >= 0, view.clamp_min(0)
        x, y, z = (self.viewmats[view, :3, :3] @ directions[:, :, None])[..., 0].unbind(-1)
        known &= z > 0
        z = torch.where(known, z, 1)
        K, (height, width) = self.Ks[view], self.depths.shape[1:]
        column, row = x / z * K[:, 0, 0] + K[:, 0, 2], y / z * K[:, 1, 1] + K[:, 1, 2]
        known &= (column >= 0) & (column < width) & (row >= 0) & (row < height)
        index = row.clamp(0, height - 1).long() * width + column.clamp(0, width - 1).long()
        depth = self.depths.flatten(1)[view, index]
        return torch.where(known, depth / z, 0)


def measure_ray_depths(outputs: DataparserOutputs) -> RayDepths | None:
    """Returns where the rays of a capture's photos meet a surface, see :func:`ray_depths`; None if the cameras have no
    pinhole view, such as those of panoramas.

    Raises:
        CaptureError: a photo cannot be read.
    """
    stereo = _open(outputs)
    return None if stereo is None else ray_depths(stereo)


def ray_depths(stereo: PhotoStereo, most_views: int = _RAY_VIEWS) -> RayDepths:
    """Returns where the rays of photos meet a surface on which two neighbours agree, and shows how far the search is.

    Args:
        most_views: photos whose depth is sought, evenly among all.
    """
    chosen = pick_evenly(len(stereo), most_views)
    shape = (len(chosen), int(stereo.cameras.heights.max()), int(stereo.cameras.widths.max()))
    depths, views = torch.zeros(shape), torch.full((len(stereo),), -1)
    with image_progress("photos") as progress:
        task = progress.add_task("Stereo", total=len(chosen))
        for number, depth in enumerate(_agreeing_depths(stereo, chosen)):
            depths[number, : depth.shape[0], : depth.shape[1]] = torch.from_numpy(depth)
            progress.advance(task)
    views[torch.tensor(chosen)] = torch.arange(len(chosen))
    cameras = stereo.cameras.take(torch.tensor(chosen))
    return RayDepths(cameras.viewmats.float(), cameras.Ks.float(), depths, views)


def measure_surface_share(outputs: DataparserOutputs) -> float:
    """Returns the share of surfaces in the photos of a capture, see :func:`surface_share`; 1 if the cameras have no
    pinhole view, such as those of panoramas.

    Raises:
        CaptureError: a photo cannot be read.
    """
    stereo = _open(outputs)
    return 1.0 if stereo is None else surface_share(stereo)


def surface_share(stereo: PhotoStereo) -> float:
    """Returns the share of the pixels, 0 to 1, on whose depth two neighbours agree, the median of a few photos.

    Masked pixels do not count, transparent ones have no depth. Nor has a backdrop that looks the same from everywhere,
    whatever its noise and shading: photos do not agree on the depth that stereo finds there.
    """
    chosen, shares = pick_evenly(len(stereo), _SHARE_VIEWS), []
    for index, depth in zip(chosen, _agreeing_depths(stereo, chosen), strict=True):
        sure, valid = depth > 0, stereo.photo(index).valid
        shares.append(float(sure.mean() if valid is None else sure.sum() / max(1, int(valid.sum()))))
    return float(np.median(shares))


def _open(outputs: DataparserOutputs) -> PhotoStereo | None:
    threads.settle(numba=True)
    try:
        return PhotoStereo.from_dataset(PinholeDataset.scale_to_side(outputs, _SIDE_PX), _OPTIONS)
    except CaptureError:
        return None


def _agreeing_depths(stereo: PhotoStereo, chosen: Sequence[int]) -> Iterator[Float32[np.ndarray, "h w"]]:
    """Yields the depth of photos where two neighbours agree with it, 0 elsewhere."""
    depth = functools.cache(stereo.depth)  # photos are neighbours of several others
    for index in chosen:
        views = [index, *nearby_views(stereo.cameras, index, MIN_VIEWS, stereo.cameras.radius())]
        maps = DepthMaps(stereo.cameras.take(torch.tensor(views)), [depth(view) for view in views])
        yield agreeing_depth(maps, 0, MIN_VIEWS, AGREEING)
