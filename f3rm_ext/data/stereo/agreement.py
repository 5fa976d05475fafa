"""Depth maps of several views, and the pixels on which they agree."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras

NEIGHBOURS = 8
"""Views that each view is compared with."""
_PROBES = 400
"""Pixels of a view from which its neighbours are chosen."""


class DepthMaps:
    """Depth of several views along their cameras' axes, scene units, 0 where there is none; all on the CPU."""

    def __init__(self, cameras: PinholeCameras, depths: Sequence[Float32[np.ndarray, "_ _"]] = ()) -> None:
        self.cameras = cameras
        self._depths = depths

    def __len__(self) -> int:
        return len(self.cameras.widths)

    def depth(self, index: int) -> Float32[np.ndarray, "h w"]:
        """Returns the depth of a view."""
        return self._depths[index]

    def points(self, index: int) -> tuple[Float[Tensor, "points 3"], Int[Tensor, " points"]]:
        """Returns where the pixels with depth are, scene frame, float64, and their indices in the flattened picture."""
        depth = torch.from_numpy(np.array(self.depth(index)))
        pixels = (depth.flatten() > 0).nonzero().squeeze(1)
        return unproject(self.cameras, index, depth.flatten()[pixels].double(), pixels), pixels


def unproject(
    cameras: PinholeCameras, index: int, depth: Float[Tensor, " points"], pixels: Int[Tensor, " points"]
) -> Float[Tensor, "points 3"]:
    """Returns where pixels, indices in the flattened picture, lie at some depth, scene frame, float64."""
    K, viewmat, width = cameras.Ks[index].double(), cameras.viewmats[index].double(), int(cameras.widths[index])
    x = (pixels % width + 0.5 - K[0, 2]) / K[0, 0]
    y = (pixels // width + 0.5 - K[1, 2]) / K[1, 1]
    local = torch.stack([x * depth, y * depth, depth.double()], dim=1)
    return (local - viewmat[:3, 3]) @ viewmat[:3, :3]


def project(
    cameras: PinholeCameras, index: int | slice, points: Float[Tensor, "points 3"]
) -> tuple[Int[Tensor, "*cams points"], Float[Tensor, "*cams points"], Bool[Tensor, "*cams points"]]:
    """Returns the pixels (in the flattened picture) and depths of points in one camera, or in each of a slice, and
    which are in the picture."""
    viewmat, K = cameras.viewmats[index].double(), cameras.Ks[index].double()[..., None]
    width, height = cameras.widths[index][..., None], cameras.heights[index][..., None]
    x, y, z = (points @ viewmat[..., :3, :3].mT + viewmat[..., None, :3, 3]).unbind(-1)
    safe = z.clamp_min(1e-9)
    col = (K[..., 0, 0, :] * x / safe + K[..., 0, 2, :]).floor()
    row = (K[..., 1, 1, :] * y / safe + K[..., 1, 2, :]).floor()
    inside = (z > 0) & (col >= 0) & (col < width) & (row >= 0) & (row < height)
    return torch.where(inside, row * width + col, 0).long(), z, inside


def agreeing_depth(maps: DepthMaps, index: int, min_views: int, tolerance: float) -> Float32[np.ndarray, "h w"]:
    """Returns the depth of a view, 0 where too few views agree with it.

    A view agrees where its depth is the same; it objects where it looks through the point at something farther away.
    A pixel stays where enough views agree, itself included, and no more object. A view that the point is hidden from
    says nothing.

    Args:
        min_views: views that must agree, itself included.
        tolerance: largest difference, as a share of the depth.
    """
    depth = np.array(maps.depth(index))
    if min_views <= 1:
        return depth
    points, pixels = maps.points(index)
    agreements, objections = torch.ones(len(points), dtype=torch.int16), torch.zeros(len(points), dtype=torch.int16)
    for other in neighbours(maps, index, points, max(NEIGHBOURS, min_views - 1)):
        place, z, inside = project(maps.cameras, other, points)
        seen = torch.from_numpy(np.array(maps.depth(other))).flatten()[place].double()
        inside &= seen > 0
        gap = (seen - z) / z.clamp_min(1e-9)
        agreements += inside & (gap.abs() <= tolerance)
        objections += inside & (gap > 3 * tolerance)
    dropped = pixels[(agreements < min_views) | (objections >= agreements)]
    depth.reshape(-1)[dropped.numpy()] = 0
    return depth


def neighbours(maps: DepthMaps, index: int, points: Tensor, count: int = NEIGHBOURS) -> list[int]:
    """The views that see most of a view's points, at most `count`."""
    probes = points[torch.linspace(0, len(points) - 1, _PROBES).long()] if len(points) > _PROBES else points
    places, depths, inside = project(maps.cameras, slice(None), probes)
    inside[index] = False
    shown = np.zeros(inside.shape, np.float32)
    for other in inside.any(dim=1).nonzero().squeeze(1).tolist():
        shown[other] = np.asarray(maps.depth(other)).reshape(-1)[places[other].numpy()]
    near = inside & ((torch.from_numpy(shown).double() - depths).abs() < 0.1 * depths)
    seen = sorted(((number, other) for other, number in enumerate(near.sum(dim=1).tolist())), reverse=True)
    return [other for number, other in seen[:count] if number]
