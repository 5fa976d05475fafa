"""Consistency of depth between views: a point seen by one training camera is where a nearby one sees it too."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.undistort import shrunk_size
from f3rm_ext.splat.regularization.frames import pixel_rays, rotate, to_camera
from f3rm_ext.splat.regularization.kernel_functions import VIEWS, MultiviewConsistency
from f3rm_ext.splat.triton_kernels import choose_kernels

NEIGHBOURS = 8
"""Neighbours of each view, of which a step takes one."""
MOST_ERROR_PX = 1.0
"""Pixels that miss themselves by more are occluded in the other view, or seen by it in another place."""
MOST_TURN_DEG = 70.0
"""Views whose axes differ by more are no neighbours: they hardly see the same surfaces."""
LEAST_BASELINE = 0.02
"""Views nearer than this share of the cameras' extent are no neighbours: their rays are almost parallel."""


class DepthView(NamedTuple):
    """A depth map and its camera."""

    depth: Float[Tensor, "h w"]
    """Along the camera's axis, scene units; 0 where there is none."""
    viewmat: Float[Tensor, "4 4"]
    """Scene to camera, OpenCV axes."""
    K: Float[Tensor, "3 3"]
    """Intrinsics, pixels."""

    def fit(self, picture: Float[Tensor, "h2 w2 channels"]) -> "DepthView":
        """Returns the view with the intrinsics of a picture of it, which may be of another size than its depth."""
        (h, w), (h2, w2) = self.depth.shape, picture.shape[:2]
        return self._replace(K=_scale_intrinsics(self.K, w2 / w, h2 / h))


def _scale_intrinsics(K: Float[Tensor, "3 3"], across: float, down: float) -> Float[Tensor, "3 3"]:
    x, y, last = K.unbind(0)
    return torch.stack([x * across, y * down, last])


def neighbour_views(views: PinholeCameras, extent: float, most: int) -> list[list[int]]:
    """Returns for each camera the nearest others that look in a similar direction, at most ``most``, nearest first."""
    positions, forward = views.positions, views.forward
    apart = torch.cdist(positions, positions, compute_mode="donot_use_mm_for_euclid_dist")
    turn = (forward @ forward.T).clamp(-1, 1).acos().rad2deg()
    near = (turn <= MOST_TURN_DEG) & (apart >= LEAST_BASELINE * extent)
    order = torch.where(near, apart, torch.inf).argsort(dim=1, stable=True)[:, :most]
    return [[int(j) for j in row if near[i, j]] for i, row in enumerate(order)]


class NeighbourViews:
    """Training cameras, given for images at full size and on the CPU, and which of them are near each other."""

    def __init__(self, cameras: PinholeCameras, device: torch.device) -> None:
        self.nearest = neighbour_views(cameras, cameras.extent(), NEIGHBOURS)
        self._sizes = [(int(h), int(w)) for h, w in zip(cameras.heights, cameras.widths, strict=True)]
        self._cameras = cameras.to(device)

    def draw(self, index: int, seed: int) -> int | None:
        """Returns a random neighbour of a training camera, the same for the same seed; None if it has none."""
        candidates = self.nearest[index]
        if not candidates:
            return None
        return candidates[int(torch.randint(len(candidates), (1,), generator=torch.Generator().manual_seed(seed)))]

    def camera(self, index: int, size: tuple[int, int]) -> PinholeCameras:
        """Returns a training camera, scaled to an image of another height and width."""
        h, w = self._sizes[index]
        K = _scale_intrinsics(self._cameras.Ks[index], size[1] / w, size[0] / h)
        viewmat = self._cameras.viewmats[index]
        return PinholeCameras(viewmat[None], K[None], torch.tensor(size[1:]), torch.tensor(size[:1]))

    def size_like(self, index: int, other: int, width: int) -> tuple[int, int]:
        """Returns height and width of an image that is shrunk as much as another one is."""
        return shrunk_size(*self._sizes[index], width / self._sizes[other][1])


def sample_depth(
    depth: Float[Tensor, "h w"], pixels: Float[Tensor, "points 2"]
) -> tuple[Float[Tensor, " points"], Bool[Tensor, " points"]]:
    """Interpolates a depth map where it is smooth; differentiable in the places.

    The inverse of depth is interpolated, bilinearly, because it is linear on a plane. Pixel centres lie at +½.

    Returns:
        Depths, and a mask of places between four pixels that all have a depth. Others are 0.
    """
    h, w = depth.shape
    x, y = 2 * pixels[:, 0] / w - 1, 2 * pixels[:, 1] / h - 1
    with torch.no_grad():
        known = depth > 0
        inside = (x.abs() <= 1 - 1 / w) & (y.abs() <= 1 - 1 / h)
    where = torch.where(inside[:, None], torch.stack([x, y], dim=-1), 0)
    maps = torch.stack([1 / torch.where(known, depth, 1), known.to(depth.dtype)])[None]
    samples = functional.grid_sample(maps, where[None, None], "bilinear", "border", align_corners=False)[0, :, 0]
    # The mask is 1, up to rounding, where every pixel that counts has a depth.
    usable = inside & (samples[1].detach() > 1 - 1e-3)
    return torch.where(usable, 1 / samples[0], 0), usable


def reprojection_errors(view: DepthView, other: DepthView) -> tuple[Float[Tensor, "h w"], Bool[Tensor, "h w"]]:
    """Computes how far each pixel is from itself after a round trip: to its depth, into the other view, to the depth
    found there, and back (Chen et al. 2024, PGSR). Differentiable in the depth of ``view``.

    Returns:
        Distances in pixels, and a mask of pixels that have one: with a depth in both views, and in front of both
        cameras. Others are 0.
    """
    h, w = view.depth.shape
    x, y = pixel_rays((h, w), view.K)
    with torch.no_grad():
        known = (view.depth > 0).flatten()
    depth = torch.where(known, view.depth.flatten(), 1)
    rays = torch.stack([x.expand(h, w), y[:, None].expand(h, w), torch.ones_like(view.depth)], dim=-1).reshape(-1, 3)
    points = rotate(rays * depth[:, None] - view.viewmat[:3, 3], view.viewmat[:3, :3].T)
    there = to_camera(points, other.viewmat)
    with torch.no_grad():
        # A point beside or behind the other camera has no place in its picture; the margin bounds the division.
        known = known & (there[:, 2] > 1e-3 * depth)
    there = torch.where(known[:, None], there, torch.ones_like(there))
    ray = there / there[:, 2:]
    focal, middle = other.K.diagonal()[:2], other.K[:2, 2]
    depth_there, usable = sample_depth(other.depth, ray[:, :2] * focal + middle)
    met = rotate(ray * depth_there[:, None] - other.viewmat[:3, 3], other.viewmat[:3, :3].T)
    back = to_camera(met, view.viewmat)
    with torch.no_grad():
        known = known & usable & (back[:, 2] > 1e-3 * depth)
    back = torch.where(known[:, None], back, rays)
    miss = (back[:, :2] / back[:, 2:] - rays[:, :2]) * view.K.diagonal()[:2]
    # The root has no gradient at 0.
    errors = torch.where(known, (miss.square().sum(-1) + 1e-12).sqrt(), 0)
    return errors.reshape(h, w), known.reshape(h, w)


def multiview_consistency(view: DepthView, other: DepthView) -> tuple[Float[Tensor, ""], Float[Tensor, "h w"]]:
    """Computes the mean over all pixels of their :func:`reprojection_errors` times trust, and the trust.

    The trust exp(−φ) of an error φ, without gradient, is largest where views agree already. It is 0 where the error is
    :data:`MOST_ERROR_PX` or more, or where there is none. No gradient flows to the depth of the other view.
    """
    kernels = choose_kernels(VIEWS, view.depth, other.depth)
    if kernels is not None:
        return MultiviewConsistency.apply(view.depth, view, other, MOST_ERROR_PX, kernels)  # type: ignore[return-value]
    errors, known = reprojection_errors(view, other._replace(depth=other.depth.detach()))
    with torch.no_grad():
        trust = torch.where(known & (errors < MOST_ERROR_PX), (-errors).exp(), 0)
    return (trust * errors).sum() / max(1, errors.numel()), trust
