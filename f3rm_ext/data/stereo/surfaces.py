"""Where training rays meet surfaces, by stereo of small photos."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from torch import Tensor
from torch.nn import functional

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.stereo.agreement import DepthMaps, agreeing_depth
from f3rm_ext.data.stereo.points import MIN_VIEWS
from f3rm_ext.data.stereo.sweep import AGREEING, PhotoStereo, StereoOptions, nearby_views
from f3rm_ext.utils import threads
from f3rm_ext.utils.console import image_progress
from f3rm_ext.utils.pictures import pick_evenly

_SIDE_PX = 160
"""Longer side of the photos."""
_OPTIONS = StereoOptions(depths=64, neighbours=4, least_score=0.6)
_LEAST_SHARE = 0.1
"""Share of the pixels below which their median depth says little: chance agreements are far away."""
_MOST_VIEWS = 100
"""Photos whose depth is sought, evenly among all: a tenth of a second of a core each."""


@dataclass(frozen=True)
class RayDepths:
    """Depth maps of some photos, in which the depth along rays of these photos is looked up."""

    projections: Float[Tensor, "photos 3 3"]
    """From a direction in the scene frame to its place in the depth map, whose corners are at ±1, times the depth of
    the direction; 0 for photos without a depth map."""
    views: Float[Tensor, " photos"]
    """Place of each photo's depth map among all, in the same way."""
    depths: Float[Tensor, "views h w"]
    """Depth along the camera's axis, scene units; 0 where nothing is known."""

    @classmethod
    def of(
        cls, cameras: PinholeCameras, depths: Sequence[Float32[np.ndarray, "_ _"]], photos: Sequence[int]
    ) -> "RayDepths":
        """Returns the depth of the photos with these indices; the cameras are those of all photos, at the size of the
        depth maps."""
        height, width = int(cameras.heights.max()), int(cameras.widths.max())
        padded = [np.pad(depth, ((0, height - depth.shape[0]), (0, width - depth.shape[1]))) for depth in depths]
        chosen, count = torch.tensor(photos), len(cameras.widths)
        to_corners = torch.tensor([[2 / width, 0, -1], [0, 2 / height, -1], [0, 0, 1]])
        projections, views = torch.zeros(count, 3, 3), torch.zeros(count)
        projections[chosen] = to_corners @ cameras.Ks[chosen].float() @ cameras.viewmats[chosen, :3, :3].float()
        views[chosen] = (2 * torch.arange(len(chosen)) + 1) / len(chosen) - 1
        return cls(projections, views, torch.from_numpy(np.stack(padded)))

    def median(self) -> float:
        """Returns the median depth of the pixels whose depth is known, scene units; 0 if these are too few."""
        known = self.depths[self.depths > 0]
        return float(known.median()) if len(known) >= _LEAST_SHARE * self.depths.numel() else 0.0

    def to(self, device: torch.device) -> "RayDepths":
        """Returns them on a device."""
        return RayDepths(self.projections.to(device), self.views.to(device), self.depths.to(device))

    def along(self, photos: Int[Tensor, " rays"], directions: Float[Tensor, "rays 3"]) -> Float[Tensor, " rays"]:
        """Returns the distances at which rays from the centres of photos, given by index, meet a surface, in lengths of
        their directions (scene frame); 0 where that is unknown."""
        x_y, z = (self.projections[photos] @ directions[:, :, None])[..., 0].split([2, 1], dim=1)
        places = torch.cat([x_y / z, self.views[photos, None]], dim=1)
        # Places beside the depth map get 0.
        depth = functional.grid_sample(
            self.depths[None, None], places[None, None, None], mode="nearest", align_corners=False
        )
        return torch.where(z > 0, depth.view(-1, 1) / z, 0)[:, 0]


def measure_ray_depths(outputs: DataparserOutputs) -> RayDepths | None:
    """Returns where the rays of a capture's photos meet a surface, see :func:`ray_depths`; None if the cameras have no
    pinhole view, such as those of panoramas. Raises CaptureError if a photo cannot be read."""
    threads.settle(numba=True)
    dataset = PinholeDataset.find_views(outputs, _SIDE_PX)
    return None if dataset is None else ray_depths(PhotoStereo.from_dataset(dataset, _OPTIONS))


def ray_depths(stereo: PhotoStereo, most_views: int = _MOST_VIEWS) -> RayDepths:
    """Returns where the rays of photos, some evenly among all, meet a surface on which two neighbours agree. Shows how
    far the search is."""
    chosen = pick_evenly(len(stereo), most_views)
    with image_progress("photos") as progress:
        depths = list(progress.track(_agreeing_depths(stereo, chosen), len(chosen), description="Stereo"))
    return RayDepths.of(stereo.cameras, depths, chosen)


def _agreeing_depths(stereo: PhotoStereo, chosen: Sequence[int]) -> Iterator[Float32[np.ndarray, "h w"]]:
    """Yields the depth of photos where two neighbours agree with it, 0 elsewhere."""
    depth = functools.cache(stereo.depth)  # photos are neighbours of several others
    for index in chosen:
        views = [index, *nearby_views(stereo.cameras, index, MIN_VIEWS, stereo.cameras.radius())]
        maps = DepthMaps(stereo.cameras.take(torch.tensor(views)), [depth(view) for view in views])
        yield agreeing_depth(maps, 0, MIN_VIEWS, AGREEING)
