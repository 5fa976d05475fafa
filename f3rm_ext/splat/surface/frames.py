"""Rotations of many vectors in full precision.

These are not matrix products: nerfstudio's commands allow TF32, whose relative error of 1/1000 in depth exceeds the
thickness of the Gaussians that the depth is compared with.
"""

from jaxtyping import Float
from torch import Tensor


def rotate(vectors: Float[Tensor, "*#batch 3"], matrices: Float[Tensor, "*#batch 3 3"]) -> Float[Tensor, "*#batch 3"]:
    """Multiplies vectors by matrices; a single matrix broadcasts to all vectors."""
    return (matrices * vectors[..., None, :]).sum(-1)


def to_camera(points: Float[Tensor, "points 3"], viewmat: Float[Tensor, "4 4"]) -> Float[Tensor, "points 3"]:
    """Transforms points to the frame of a camera (OpenCV axes: x right, y down, z forward)."""
    return rotate(points, viewmat[:3, :3]) + viewmat[:3, 3]
