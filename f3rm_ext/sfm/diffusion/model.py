"""DiffusionSfM's network, sparse (one ray per patch) and dense (256 rays per patch)."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.sfm.diffusion.dense_head import UPSAMPLING, DenseHead
from f3rm_ext.sfm.diffusion.encoder import EncodedImages, ImageEncoder
from f3rm_ext.sfm.diffusion.transformer import RayTransformer
from f3rm_ext.sfm.rays import CHANNELS

Stage = Literal["sparse", "dense"]
IMAGE_SIDE_PX = 224
"""Side of the images that the published model sees: 16 patches of 14 pixels."""


@dataclass(frozen=True)
class ModelSize:
    """Widths and depths."""

    width: int
    """Width of the transformer."""
    depth: int
    """Number of its blocks, a multiple of 4."""
    heads: int
    """Attention heads of the transformer."""
    head_width: int
    """Channels of the dense head."""


SIZES = {
    "published": ModelSize(width=1152, depth=16, heads=16, head_width=256),
    "tiny": ModelSize(width=256, depth=4, heads=4, head_width=64),
}
"""The published size, and one that trains on a CPU."""


class RayDiffuser(nn.Module):
    """Predicts clean ray maps from noisy ones and images.

    Args:
        stage: sparse predicts one ray per patch; dense 16 × 16, with the dense head.
        residual: the dense head predicts what is added to the sparse prediction, see :func:`upsample`, and its last
            layer begins at 0. The published models have no such sum.
    """

    residual: Tensor | None
    """Weight of the sparse prediction in the dense one; None where the head predicts alone. It is kept with the
    weights, so that a checkpoint tells what its head predicts."""

    def __init__(self, vit: VisionTransformer, size: ModelSize, stage: Stage, residual: bool = False) -> None:
        super().__init__()
        self.size, self.stage = size, stage
        self.encoder = ImageEncoder(vit)
        feat = self.encoder.width
        # A ray and whether its depth is known become as many channels as a patch token has.
        if stage == "sparse":
            self.rays: nn.Module = nn.Conv2d(CHANNELS + 1, feat, 1)
            self.head = None
            self.register_buffer("residual", None)
        else:
            self.rays = nn.Conv2d(CHANNELS + 1, feat, UPSAMPLING, stride=UPSAMPLING)
            self.head = DenseHead(feat, size.width, size.head_width, CHANNELS, residual)
            self.register_buffer("residual", torch.ones(()) if residual else None)
        self.transformer = RayTransformer(2 * feat + 2, CHANNELS, size.width, size.depth, size.heads)

    @property
    def cells(self) -> int:
        """Cells of the maps along each side of a patch."""
        return 1 if self.stage == "sparse" else UPSAMPLING

    def forward(
        self,
        noisy: Float[Tensor, "batch images 8 h w"],
        steps: Int64[Tensor, " batch"],
        encoded: EncodedImages,
        ndc: Float[Tensor, "batch images 2 rows cols"],
        known: Float[Tensor, "batch images h w"] | None = None,
    ) -> Float[Tensor, "batch images 8 h w"]:
        """Predicts clean maps.

        Args:
            ndc: x and y of the patches in PyTorch3D's NDC of the uncropped image.
            known: 1 where the depth is known; by default everywhere.
        """
        batch, images = noisy.shape[:2]
        if known is None:
            known = torch.ones_like(noisy[:, :, 0])
        rays = self.rays(torch.cat([noisy, known[:, :, None]], dim=2).flatten(0, 1)).unflatten(0, (batch, images))
        patches = torch.cat([encoded.patches, rays, ndc], dim=2)
        sparse, taps = self.transformer(patches, steps)
        if self.head is None:
            return sparse
        dense = self.head(encoded, taps, steps)
        return dense if self.residual is None else dense + self.residual * upsample(sparse.float())


def upsample(maps: Float[Tensor, "batch images 8 rows cols"]) -> Float[Tensor, "batch images 8 h w"]:
    """Returns maps with 16 × 16 cells for each one, interpolated linearly; beyond the outer ones' centres they are
    constant.

    Homogeneous vectors between two points lie on the segment between them, so planes stay planes.
    """
    larger = functional.interpolate(maps.flatten(0, 1), scale_factor=UPSAMPLING, mode="bilinear", align_corners=False)
    return larger.unflatten(0, maps.shape[:2])


def masked_loss(
    predicted: Float[Tensor, "batch images 8 h w"],
    clean: Float[Tensor, "batch images 8 h w"],
    known: Float[Tensor, "batch images h w"],
    absolute: bool = False,
) -> Float[Tensor, ""]:
    """Returns the mean of (M · predicted - M · clean)² over all elements, known (M = 1) or not, as published."""
    difference = known[:, :, None] * (predicted - clean)
    return difference.abs().mean() if absolute else difference.square().mean()
