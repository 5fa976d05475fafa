"""Ray maps: for every cell of an image, where its ray begins and where it ends, as homogeneous unit 4-vectors.

A point (x, y, z) is [x, y, z, 1] divided by its norm (DiffusionSfM, Zhao et al. 2025, arXiv 2505.05473): points far
away stay bounded, and a vector and its negative mean the same point. A map has eight channels: origin, then endpoint.
Maps are in the frame of the first camera with PyTorch3D's axes (x left, y up, z forward), as the published model has
them; :class:`~f3rm_ext.sfm.cameras.CameraSet` has OpenCV's axes, so that x and y change their signs in between.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from f3rm_ext.sfm.cameras import PYTORCH3D_SIGNS, CameraSet

CHANNELS = 8
"""Numbers for each ray: origin and endpoint, four each."""
SMALLEST_WEIGHT = 1e-6
"""Fourth coordinates nearer to zero count as this: points at infinity become very far ones."""
_SMALLEST_DISTANCE = 1e-3
"""Scenes nearer to the first camera than this, units of the capture, keep their scale, as published."""


def to_homogeneous(points: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 4"]:
    """Returns points as homogeneous unit vectors with a positive fourth coordinate.

    >>> to_homogeneous(torch.tensor([2.0, 0.0, 2.0])).tolist()  # doctest: +ELLIPSIS
    [0.666..., 0.0, 0.666..., 0.333...]
    """
    return torch.nn.functional.normalize(torch.cat([points, torch.ones_like(points[..., :1])], dim=-1), dim=-1)


def from_homogeneous(vectors: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 3"]:
    """Returns the points of homogeneous vectors of any length and sign."""
    weight = vectors[..., 3:]
    weight = torch.where(weight.abs() < SMALLEST_WEIGHT, torch.where(weight < 0, -1.0, 1.0) * SMALLEST_WEIGHT, weight)
    return vectors[..., :3] / weight


def normalize_maps(maps: Float[Tensor, "*batch 8 rows cols"]) -> Float[Tensor, "*batch 8 rows cols"]:
    """Returns maps whose 4-vectors have length 1."""
    vectors = maps.unflatten(-3, (2, 4))
    return torch.nn.functional.normalize(vectors, dim=-3).flatten(-4, -3)


def cell_centers(sizes_px: Float[Tensor, "cams 2"], rows: int, cols: int) -> Float[Tensor, "cams rows cols 2"]:
    """Returns the pixels (x, y) at the centres of a grid of cells over each image."""
    y = (torch.arange(rows, dtype=sizes_px.dtype, device=sizes_px.device) + 0.5) / rows
    x = (torch.arange(cols, dtype=sizes_px.dtype, device=sizes_px.device) + 0.5) / cols
    grid = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], dim=-1)
    return grid * sizes_px[:, None, None]


def cell_ndc(rows: int, cols: int, like: Tensor) -> Float[Tensor, "2 rows cols"]:
    """Returns x and y of the cells in PyTorch3D's NDC of a square crop: (1, 1) is its upper left corner."""
    sizes = torch.full((1, 2), 2.0, dtype=like.dtype, device=like.device)
    return 1 - cell_centers(sizes, rows, cols)[0].permute(2, 0, 1)


def fill_holes(depth: Float[np.ndarray, "h w"]) -> tuple[Float[np.ndarray, "h w"], Bool[np.ndarray, "h w"]]:
    """Fills pixels without depth (not finite, or not above 0) with the nearest depth there is.

    Returns:
        The depth, 1 everywhere if there is none at all, and where it was known.

    >>> filled, known = fill_holes(np.array([[0.0, 2.0, np.nan]]))
    >>> filled.tolist(), known.tolist()
    ([[2.0, 2.0, 2.0]], [[False, True, False]])
    """
    from scipy.ndimage import distance_transform_edt

    known = np.isfinite(depth) & (depth > 0)
    if not known.any():
        return np.ones_like(depth), known
    _, nearest = distance_transform_edt(~known, return_indices=True)  # type: ignore[misc]
    return depth[tuple(nearest)], known


def scene_scale(cameras: CameraSet, depth: Float[Tensor, "cams rows cols"]) -> float:
    """Returns the factor that brings the median point of the first camera to distance 1.

    The median is taken coordinate by coordinate over all cells of the first camera, holes included, after they were
    filled (published as ``first_cam_mediod``). Coordinates are those of the camera, so that the frame of the capture
    does not matter; the released code takes those of the world.
    """
    rows, cols = depth.shape[1:]
    first = cameras[:1].relative_to_first()
    rays = first.directions(cell_centers(first.sizes_px, rows, cols))[0] * depth[0, ..., None]
    distance = float(rays.reshape(-1, 3).median(dim=0).values.norm())
    return 1.0 if distance < _SMALLEST_DISTANCE else 1 / distance


def render_maps(
    cameras: CameraSet, depth: Float[Tensor, "cams rows cols"], scale: float = 1.0
) -> Float[Tensor, "cams 8 rows cols"]:
    """Renders the ray maps of cameras, in the frame of the first camera.

    Args:
        depth: z-depth of each cell, in the units of the cameras.
        scale: factor on all lengths, such as :func:`scene_scale`.
    """
    local = cameras.relative_to_first(scale)
    rows, cols = depth.shape[1:]
    origins = local.centers[:, None, None].expand(-1, rows, cols, -1)
    rays = local.directions(cell_centers(local.sizes_px, rows, cols))
    endpoints = origins + rays * (scale * depth)[..., None]
    signs = depth.new_tensor(PYTORCH3D_SIGNS)
    maps = torch.cat([to_homogeneous(origins * signs), to_homogeneous(endpoints * signs)], dim=-1)
    return maps.permute(0, 3, 1, 2)


def map_points(
    maps: Float[Tensor, "*batch 8 rows cols"],
) -> tuple[Float[Tensor, "*batch rows cols 3"], Float[Tensor, "*batch rows cols 3"]]:
    """Returns the origins and endpoints of ray maps, with OpenCV's axes."""
    vectors = maps.movedim(-3, -1)
    signs = maps.new_tensor(PYTORCH3D_SIGNS)
    return from_homogeneous(vectors[..., :4]) * signs, from_homogeneous(vectors[..., 4:]) * signs
