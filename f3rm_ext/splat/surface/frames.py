"""Small rotations of many vectors in full precision.

Not matrix products: nerfstudio's commands allow TF32, in which depth would be off by a thousandth on a GPU, more than
the thickness of the Gaussians it is compared with.
"""

from jaxtyping import Float
from torch import Tensor


def rotate(vectors: Float[Tensor, "*#batch 3"], matrices: Float[Tensor, "*#batch 3 3"]) -> Float[Tensor, "*#batch 3"]:
    """Matrices times vectors; one matrix may serve all vectors."""
    return (matrices * vectors[..., None, :]).sum(-1)


def to_camera(points: Float[Tensor, "points 3"], viewmat: Float[Tensor, "4 4"]) -> Float[Tensor, "points 3"]:
    """Points in the frame of a camera (OpenCV axes: x right, y down, z ahead)."""
    return rotate(points, viewmat[:3, :3]) + viewmat[:3, 3]
