"""Bilinear sampling of patch features at pixel positions, from one map or from many maps of any sizes.

Positions are continuous pixel coordinates (y, x) with pixel centres at +0.5, as in
:class:`~f3rm_ext.features.base.PatchGrid`. Features are interpolated between patch centres; beyond the outermost
centres they equal those at the border.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float16, Float32, Int, Int64
from torch import Tensor

from f3rm_ext.features.base import FeatureMap


def sample_map(feature_map: FeatureMap, yx_px: Float[np.ndarray, "points 2"]) -> Float32[np.ndarray, "points feat"]:
    """Samples one map point by point: the readable reference for :class:`PackedMaps`.

    >>> from f3rm_ext.features.base import PatchGrid
    >>> grid = PatchGrid.covering(rows=1, cols=2, height_px=10, width_px=20)  # patch centres at x = 5 and x = 15
    >>> values = np.array([[[0.0], [1.0]]], dtype=np.float16)
    >>> sample_map(FeatureMap(values, grid), np.array([[5.0, 5.0], [5.0, 10.0], [5.0, 19.0]])).ravel().tolist()
    [0.0, 0.5, 1.0]
    """
    grid = feature_map.grid
    values = np.asarray(feature_map.values, dtype=np.float32)
    out = np.empty((len(yx_px), values.shape[2]), dtype=np.float32)
    for i, (y_px, x_px) in enumerate(yx_px):
        row = min(max((y_px - grid.origin_px[0]) / grid.stride_px[0], 0.0), grid.rows - 1.0)
        col = min(max((x_px - grid.origin_px[1]) / grid.stride_px[1], 0.0), grid.cols - 1.0)
        r0, c0 = int(row), int(col)
        r1, c1 = min(r0 + 1, grid.rows - 1), min(c0 + 1, grid.cols - 1)
        down, right = row - r0, col - c0
        above = (1 - right) * values[r0, c0] + right * values[r0, c1]
        below = (1 - right) * values[r1, c0] + right * values[r1, c1]
        out[i] = (1 - down) * above + down * below
    return out


def interpolate(
    corners: Iterable[tuple[Float16[Tensor, "rays feat"], Float32[Tensor, "rays"]]],
) -> Float32[Tensor, "rays feat"]:
    """Returns weighted sums of features and weights of the first patch of each ray, then of the second, and so on."""
    out: Tensor | None = None
    for features, weight in corners:
        term = features.float().mul_(weight[:, None])
        out = term if out is None else out.add_(term)
    assert out is not None
    return out


@dataclass(frozen=True)
class PackedMaps:
    """The feature maps of several images in one flat tensor, on any device.

    An image is identified by its slot, its position in the sequence given to :meth:`pack`.
    """

    values: Float16[Tensor, "patches feat"]
    """All patches, image after image, each row by row."""
    offset: Int64[Tensor, "cams"]
    """First patch of each image."""
    shape: Int64[Tensor, "cams 2"]
    origin_px: Float32[Tensor, "cams 2"]
    """Centre (y, x) of the first patch."""
    stride_px: Float32[Tensor, "cams 2"]
    """Distance (y, x) between patch centres."""

    @classmethod
    def pack(cls, maps: Sequence[FeatureMap], device: torch.device | str = "cpu") -> "PackedMaps":
        """Copies one or more maps of the same dimension and any sizes into one tensor."""
        grids = [feature_map.grid for feature_map in maps]
        sizes = [grid.rows * grid.cols for grid in grids]
        ends = np.cumsum(sizes)
        values = torch.empty((int(ends[-1]), maps[0].values.shape[2]), dtype=torch.float16)
        for feature_map, end, size in zip(maps, ends, sizes, strict=True):
            values[int(end) - size : int(end)].numpy().reshape(feature_map.values.shape)[...] = feature_map.values
        return cls(
            values=values,
            offset=torch.as_tensor(ends - np.asarray(sizes), dtype=torch.int64),
            shape=torch.tensor([[grid.rows, grid.cols] for grid in grids], dtype=torch.int64),
            origin_px=torch.tensor([grid.origin_px for grid in grids], dtype=torch.float32),
            stride_px=torch.tensor([grid.stride_px for grid in grids], dtype=torch.float32),
        ).to(device)

    def to(self, device: torch.device | str) -> "PackedMaps":
        return replace(self, **{name: value.to(device) for name, value in vars(self).items()})

    def sample(self, image_slot: Int[Tensor, "rays"], yx_px: Float[Tensor, "rays 2"]) -> Float32[Tensor, "rays feat"]:
        """Returns the features at positions (y, x) in pixels of the images in the given slots."""
        corners = zip(*self.corners(image_slot, yx_px), strict=True)
        return interpolate((self.values.index_select(0, patch), weight) for patch, weight in corners)

    def corners(
        self, image_slot: Int[Tensor, "rays"], yx_px: Float[Tensor, "rays 2"]
    ) -> tuple[Int64[Tensor, "corners rays"], Float32[Tensor, "corners rays"]]:
        """Returns the four patches around each of these positions and their weights, for :func:`interpolate`."""
        slot = image_slot.long()
        last = self.shape[slot] - 1
        position = (yx_px.float() - self.origin_px[slot]) / self.stride_px[slot]
        position = torch.minimum(position.clamp_min_(0.0), last.float())
        first = position.long()
        step = torch.minimum(first + 1, last) - first
        fraction = position - first
        cols = self.shape[slot, 1]
        corner = self.offset[slot] + first[:, 0] * cols + first[:, 1]
        down, right = step[:, 0] * cols, step[:, 1]
        (v, u) = fraction.unbind(1)
        patches = torch.stack([corner, corner + right, corner + down, corner + down + right])
        return patches, torch.stack([(1 - v) * (1 - u), (1 - v) * u, v * (1 - u), v * u])
