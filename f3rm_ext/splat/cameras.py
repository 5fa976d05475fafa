"""Nerfstudio's cameras as rasterisers want them."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor


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
        """The views of cameras (of shape (cams,)), whose axes are OpenGL's; distortion is not looked at."""
        c2w = cameras.camera_to_worlds
        turned = c2w[:, :3, :3] * c2w.new_tensor([1.0, -1.0, -1.0])
        inverse = turned.transpose(1, 2)
        viewmats = torch.eye(4, device=c2w.device, dtype=c2w.dtype).repeat(len(c2w), 1, 1)
        viewmats[:, :3, :3] = inverse
        viewmats[:, :3, 3:] = -inverse @ c2w[:, :3, 3:]
        Ks = torch.zeros(len(c2w), 3, 3, device=c2w.device, dtype=c2w.dtype)
        Ks[:, 0, 0], Ks[:, 1, 1] = cameras.fx[:, 0], cameras.fy[:, 0]
        Ks[:, 0, 2], Ks[:, 1, 2] = cameras.cx[:, 0], cameras.cy[:, 0]
        Ks[:, 2, 2] = 1.0
        return cls(viewmats, Ks, cameras.width[:, 0].int(), cameras.height[:, 0].int())

    def to(self, device: torch.device | str) -> "PinholeCameras":
        """The same on another device."""
        return PinholeCameras(*(part.to(device) for part in self))

    @property
    def positions(self) -> Float[Tensor, "cams 3"]:
        """Where the cameras are, scene frame."""
        return -(self.viewmats[:, :3, :3].transpose(1, 2) @ self.viewmats[:, :3, 3:])[..., 0]

    @property
    def forward(self) -> Float[Tensor, "cams 3"]:
        """Where they look, scene frame, length 1."""
        return self.viewmats[:, 2, :3]

    def extent(self) -> float:
        """1.1 times the largest distance of a camera from their mean (3DGS's unit of size), scene units; at least 1e-3.

        A capture from one place has no extent of its own; its learning rates and thresholds then fit a tiny scene.
        """
        apart = self.positions - self.positions.mean(dim=0)
        return max(1.1 * float(apart.norm(dim=1).max()), 1e-3)
