"""Nerfstudio's cameras in the form that rasterisers take."""

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
        """Converts nerfstudio's cameras, shape (cams,) and OpenGL axes; distortion is ignored."""
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
        """Moves all tensors to a device."""
        return PinholeCameras(*(part.to(device) for part in self))

    @property
    def positions(self) -> Float[Tensor, "cams 3"]:
        """Positions of the cameras, scene frame."""
        return -(self.viewmats[:, :3, :3].transpose(1, 2) @ self.viewmats[:, :3, 3:])[..., 0]

    @property
    def forward(self) -> Float[Tensor, "cams 3"]:
        """Viewing directions, scene frame, length 1."""
        return self.viewmats[:, 2, :3]

    def extent(self) -> float:
        """Returns the extent of the scene, scene units: 1.1 times the largest distance of a camera from their mean.

        This is 3DGS's unit of length for learning rates and thresholds. It is at least 1e-3, for captures from a
        single position.
        """
        apart = self.positions - self.positions.mean(dim=0)
        return max(1.1 * float(apart.norm(dim=1).max()), 1e-3)
