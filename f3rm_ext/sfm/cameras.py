"""Pinhole cameras in OpenCV's axes, and their form in PyTorch3D and in nerfstudio (OpenGL)."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

OPENGL_SIGNS = (1.0, -1.0, -1.0)
"""Factors of a camera's axes between OpenCV (x right, y down, z forward) and OpenGL (x right, y up, z backward)."""
PYTORCH3D_SIGNS = (-1.0, -1.0, 1.0)
"""Factors of a camera's axes between OpenCV and PyTorch3D (x left, y up, z forward)."""


@dataclass(frozen=True)
class PyTorch3DCameras:
    """Cameras as PyTorch3D's ``PerspectiveCameras`` have them. Points are rows: x_view = x_world @ R + T."""

    R: Float[Tensor, "cams 3 3"]
    """Rotations, for rows."""
    T: Float[Tensor, "cams 3"]
    focal_length: Float[Tensor, "cams 2"]
    """Focal lengths in NDC: the image's short side spans -1 to 1, x to the left, y up."""
    principal_point: Float[Tensor, "cams 2"]
    """Principal points in NDC; 0 is the middle of the image."""


@dataclass(frozen=True)
class CameraSet:
    """Cameras without distortion. Axes: x right, y down, z forward (OpenCV)."""

    rotations: Float[Tensor, "cams 3 3"]
    """Camera to world."""
    centers: Float[Tensor, "cams 3"]
    """Positions, world."""
    focals_px: Float[Tensor, "cams 2"]
    """Focal lengths in x and y."""
    principals_px: Float[Tensor, "cams 2"]
    """Principal points; the middle of the first pixel is (0.5, 0.5)."""
    sizes_px: Float[Tensor, "cams 2"]
    """Widths and heights."""

    def __len__(self) -> int:
        return len(self.centers)

    def __getitem__(self, index: slice | list[int]) -> "CameraSet":
        """Returns some of the cameras."""
        return CameraSet(**{name: values[index] for name, values in vars(self).items()})

    def directions(self, pixels: Float[Tensor, "cams *points 2"]) -> Float[Tensor, "cams *points 3"]:
        """Returns world directions through pixels, of length 1 along the optical axis."""
        flat = pixels.flatten(1, -2)
        plane = (flat - self.principals_px[:, None]) / self.focals_px[:, None]
        local = torch.nn.functional.pad(plane, (0, 1), value=1.0)
        return (local @ self.rotations.mT).reshape(*pixels.shape[:-1], 3)

    def project(
        self, points: Float[Tensor, "cams points 3"]
    ) -> tuple[Float[Tensor, "cams points 2"], Float[Tensor, "cams points"]]:
        """Returns the pixels and z-depths of world points; pixels mean nothing where the depth is not positive."""
        local = (points - self.centers[:, None]) @ self.rotations
        pixels = local[..., :2] / local[..., 2:] * self.focals_px[:, None] + self.principals_px[:, None]
        return pixels, local[..., 2]

    def transform(
        self, rotation: Float[Tensor, "3 3"], translation: Float[Tensor, "3"], scale: float | Tensor = 1.0
    ) -> "CameraSet":
        """Returns the cameras in another world frame: new = scale · (rotation · old + translation)."""
        return replace(
            self, rotations=rotation @ self.rotations, centers=scale * (self.centers @ rotation.T + translation)
        )

    def relative_to_first(self, scale: float | Tensor = 1.0) -> "CameraSet":
        """Returns the cameras in the frame of the first camera, its lengths times ``scale``."""
        rotation = self.rotations[0].T
        return self.transform(rotation, -rotation @ self.centers[0], scale)

    def crop(self, corners_px: Float[Tensor, "cams 2"], sides_px: Float[Tensor, " cams"], size_px: int) -> "CameraSet":
        """Returns the cameras of square crops that are resized."""
        scale = (size_px / sides_px)[:, None]
        return replace(
            self,
            focals_px=self.focals_px * scale,
            principals_px=(self.principals_px - corners_px) * scale,
            sizes_px=torch.full_like(self.sizes_px, size_px),
        )

    @classmethod
    def from_opengl(
        cls,
        c2w: Float[Tensor, "cams _ 4"],
        focals_px: Float[Tensor, "cams 2"],
        principals_px: Float[Tensor, "cams 2"],
        sizes_px: Float[Tensor, "cams 2"],
    ) -> "CameraSet":
        """Returns the cameras of nerfstudio's camera-to-world matrices (3 × 4 or 4 × 4)."""
        return cls(c2w[:, :3, :3] * c2w.new_tensor(OPENGL_SIGNS), c2w[:, :3, 3], focals_px, principals_px, sizes_px)

    def to_pytorch3d(self) -> PyTorch3DCameras:
        """Returns the cameras as PyTorch3D has them, with intrinsics in NDC."""
        rotation = self.rotations * self.rotations.new_tensor(PYTORCH3D_SIGNS)
        half = self.sizes_px.amin(dim=1, keepdim=True) / 2
        return PyTorch3DCameras(
            R=rotation,
            T=-(self.centers[:, None] @ rotation)[:, 0],
            focal_length=self.focals_px / half,
            principal_point=(self.sizes_px / 2 - self.principals_px) / half,
        )

    @classmethod
    def from_pytorch3d(cls, cameras: PyTorch3DCameras, sizes_px: Float[Tensor, "cams 2"]) -> "CameraSet":
        """Returns PyTorch3D's cameras of images of these sizes."""
        half = sizes_px.amin(dim=1, keepdim=True) / 2
        return cls(
            rotations=cameras.R * cameras.R.new_tensor(PYTORCH3D_SIGNS),
            centers=-(cameras.R @ cameras.T[..., None])[..., 0],
            focals_px=cameras.focal_length * half,
            principals_px=sizes_px / 2 - cameras.principal_point * half,
            sizes_px=sizes_px,
        )
