"""Nerfstudio's cameras in the form that rasterisers take."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from f3rm_ext.data.uploads import upload

_SAMPLE_POINTS, _SAMPLE_CAMERAS = 10_000, 100
_MEETS = (0.1, 4.0)
"""Depths at which optical axes may meet in what they look at, in median depths of the scene: an object may stand far
before its background."""


class PinholeCameras(NamedTuple):
    """Pinhole cameras in OpenCV axes."""

    viewmats: Float[Tensor, "cams 4 4"]
    """Scene to camera; z forward, y down."""
    Ks: Float[Tensor, "cams 3 3"]
    """Intrinsics, pixels."""
    widths: Int[Tensor, " cams"]
    """Pixels."""
    heights: Int[Tensor, " cams"]
    """Pixels."""

    @classmethod
    def of(cls, cameras: Cameras) -> "PinholeCameras":
        """Converts nerfstudio's cameras, shape (cams,) and OpenGL axes; distortion is ignored."""
        c2w = cameras.camera_to_worlds
        turned = torch.cat([c2w[:, :3, :1], -c2w[:, :3, 1:3]], dim=2)
        inverse = turned.transpose(1, 2)
        viewmats = torch.eye(4, device=c2w.device, dtype=c2w.dtype).repeat(len(c2w), 1, 1)
        viewmats[:, :3, :3] = inverse
        viewmats[:, :3, 3:] = -inverse @ c2w[:, :3, 3:]
        Ks = torch.zeros(len(c2w), 3, 3, device=c2w.device, dtype=c2w.dtype)
        Ks[:, 0, 0], Ks[:, 1, 1] = cameras.fx[:, 0], cameras.fy[:, 0]
        Ks[:, 0, 2], Ks[:, 1, 2] = cameras.cx[:, 0], cameras.cy[:, 0]
        Ks[:, 2, 2] = 1.0
        return cls(viewmats, Ks, cameras.width[:, 0].int(), cameras.height[:, 0].int())

    @classmethod
    def to_render(cls, camera: Cameras, device: torch.device) -> "PinholeCameras":
        """Converts one camera, shape (1,), to render it on a device.

        Image sizes stay where they are. The host reads them, and would wait for a GPU if it had to ask it. It does not
        wait for the matrices of a camera on the CPU to arrive.
        """
        result = cls.of(camera)
        matrices = upload(torch.cat([result.viewmats.flatten(1), result.Ks.flatten(1)], dim=1), device)
        viewmats, Ks = matrices.split((16, 9), dim=1)
        return cls(viewmats.reshape(-1, 4, 4), Ks.reshape(-1, 3, 3), result.widths, result.heights)

    def to(self, device: torch.device | str) -> "PinholeCameras":
        """Moves all tensors to a device."""
        return PinholeCameras(*(part.to(device) for part in self))

    def take(self, rows: Int[Tensor, " chosen"] | slice) -> "PinholeCameras":
        """Returns some of the cameras."""
        return PinholeCameras(*(part[rows] for part in self))

    def shrink(self, longest_px: int) -> "PinholeCameras":
        """Returns the cameras with pictures whose longer side has at most so many pixels."""
        sizes = torch.stack([self.widths, self.heights], dim=1)
        factor = (longest_px / sizes.amax(dim=1, keepdim=True)).clamp(max=1)
        smaller = (sizes * factor).round().clamp_min(1).int()
        scale = torch.cat([smaller / sizes, torch.ones_like(factor)], dim=1)
        return self._replace(Ks=scale.to(self.Ks)[:, :, None] * self.Ks, widths=smaller[:, 0], heights=smaller[:, 1])

    @property
    def positions(self) -> Float[Tensor, "cams 3"]:
        """Positions of the cameras, scene frame."""
        return -(self.viewmats[:, :3, :3].transpose(1, 2) @ self.viewmats[:, :3, 3:])[..., 0]

    @property
    def forward(self) -> Float[Tensor, "cams 3"]:
        """Viewing directions, scene frame, length 1."""
        return self.viewmats[:, 2, :3]

    def focus(self) -> Float[Tensor, "3"]:
        """Returns the centre of the scene: the point with the least sum of squared distances from the optical axes."""
        away = torch.eye(3) - self.forward[:, :, None] * self.forward[:, None, :]
        matrix = away.sum(dim=0) + 1e-6 * len(away) * torch.eye(3)  # Parallel axes: near the cameras.
        mean = self.positions.mean(dim=0)
        right = (away @ (self.positions - mean)[..., None]).sum(dim=0)[:, 0]
        return mean + torch.linalg.solve(matrix, right)

    def radius(self) -> float:
        """Returns the distance of the farthest camera from :meth:`focus`, scene units, at least 1e-3."""
        return float((self.positions - self.focus()).norm(dim=1).max().clamp_min(1e-3))

    def orbit(self, points: Float[Tensor, "points 3"]) -> tuple[Float[Tensor, " cams"], float]:
        """Returns how deep before each camera the point lies that a view turns about, and the scene's radius; scene
        units.

        That is as deep as :meth:`focus`, except where this is far from the depth of the points: axes that are parallel
        or point outwards (a slider, a drone that looks down, a panorama) meet at the cameras, or nowhere.
        """
        depth = self.median_depth(points) or self.radius()
        to_focus = ((self.focus() - self.positions) * self.forward).sum(dim=1)
        near, far = (factor * depth for factor in _MEETS)
        has_focus = bool(near < to_focus.median() < far)
        reach = torch.where((near < to_focus) & (to_focus < far), to_focus, torch.full_like(to_focus, depth))
        return reach, self.radius() if has_focus else depth

    def extent(self, depth: float = 0.0) -> float:
        """Returns the extent of the scene, scene units: 1.1 times the largest distance of a camera from their mean.

        This is 3DGS's unit of length for learning rates and thresholds. It is at least 1e-3, for captures from a
        single position.

        Args:
            depth: that of the scene, scene units. Half of it is the least extent: cameras that look one way from nearly
                one place lie in a small part of the scene.
        """
        apart = self.positions - self.positions.mean(dim=0)
        return max(1.1 * float(apart.norm(dim=1).max()), 0.5 * depth, 1e-3)

    def median_depth(self, points: Float[Tensor, "points 3"]) -> float:
        """Returns the median depth of points of the scene frame before the cameras, scene units; 0 without any."""
        if not len(points):
            return 0.0
        # Some of many points and cameras suffice.
        points = points[:: max(1, len(points) // _SAMPLE_POINTS)]
        every = slice(None, None, max(1, len(self.positions) // _SAMPLE_CAMERAS))
        forward, positions = self.forward[every].to(points), self.positions[every].to(points)
        depths = points @ forward.T - (positions * forward).sum(dim=1)
        depth = torch.where(depths > 0, depths, torch.nan).nanmedian(dim=0).values.nanmedian()
        return float(depth.nan_to_num())
