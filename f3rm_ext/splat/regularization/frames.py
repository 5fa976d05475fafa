"""Rotations of many vectors in full precision, and the rays of pixels.

Rotations are not matrix products: users may allow TF32, whose relative error of 1/1000 in depth exceeds the
thickness of the Gaussians that the depth is compared with.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def rotate(vectors: Float[Tensor, "*#batch 3"], matrices: Float[Tensor, "*#batch 3 3"]) -> Float[Tensor, "*#batch 3"]:
    """Multiplies vectors by matrices; a single matrix broadcasts to all vectors."""
    return (matrices * vectors[..., None, :]).sum(-1)


def to_camera(points: Float[Tensor, "points 3"], viewmat: Float[Tensor, "4 4"]) -> Float[Tensor, "points 3"]:
    """Transforms points to the frame of a camera (OpenCV axes: x right, y down, z forward)."""
    return rotate(points, viewmat[:3, :3]) + viewmat[:3, 3]


def pixel_rays(size: Sequence[int], K: Float[Tensor, "3 3"]) -> tuple[Float[Tensor, " w"], Float[Tensor, " h"]]:
    """Returns x / z by column and y / z by row of the rays through pixel centres, which lie at +½, in pictures of a
    size (h, w)."""
    h, w = size
    x = (torch.arange(w, device=K.device, dtype=K.dtype) + 0.5 - K[0, 2]) / K[0, 0]
    y = (torch.arange(h, device=K.device, dtype=K.dtype) + 0.5 - K[1, 2]) / K[1, 1]
    return x, y
