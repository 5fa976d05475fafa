"""The image encoder: DINOv2 patch tokens, and the token sequences that the dense head uses."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from f3rm_ext.features.extractors.preprocess import IMAGENET_MEAN, IMAGENET_STD, normalise
from f3rm_ext.features.extractors.vit import VisionTransformer

_POSITION_OFFSET = 0.1
"""DINOv2's own code stretches its position embedding by (n + 0.1) / n when it interpolates it."""


@dataclass(frozen=True)
class EncodedImages:
    """Codes of the patches of all images, as the network takes them."""

    patches: Float[Tensor, "batch images feat rows cols"]
    """Patch tokens of the last block, with the final norm."""
    middle: Float[Tensor, "batch images tokens feat"]
    """Class token and patch tokens after the middle block, without norm."""
    last: Float[Tensor, "batch images tokens feat"]
    """The same after the last block."""

    def select(self, images: list[int]) -> "EncodedImages":
        """Returns some of the images."""
        return EncodedImages(self.patches[:, images], self.middle[:, images], self.last[:, images])

    def patches_only(self) -> "EncodedImages":
        """Returns what a sparse model sees: no tokens of the middle and the last block."""
        return EncodedImages(self.patches, self.middle[:, :, :0], self.last[:, :, :0])


class ImageEncoder(nn.Module):
    """DINOv2 at patch resolution."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.vit = vit

    @property
    def width(self) -> int:
        """Length of a token."""
        return self.vit.width

    def _positions(self, rows: int, cols: int) -> Float[Tensor, "1 tokens feat"]:
        grid = self.vit.pos_embed[:, 1:]
        side = math.isqrt(grid.shape[1])
        if (rows, cols) != (side, side):
            image = grid.unflatten(1, (side, side)).permute(0, 3, 1, 2).float()
            scale = ((rows + _POSITION_OFFSET) / side, (cols + _POSITION_OFFSET) / side)
            image = functional.interpolate(image, scale_factor=scale, mode="bicubic", align_corners=False)
            grid = image.flatten(2).mT.to(grid.dtype)
        return torch.cat([self.vit.pos_embed[:, :1], grid], dim=1)

    def forward(self, images: Float[Tensor, "batch images 3 h w"]) -> EncodedImages:
        """Encodes images of values 0 to 1, whose sides are multiples of the patch size."""
        batch, count = images.shape[:2]
        pixels = normalise(images.flatten(0, 1), IMAGENET_MEAN, IMAGENET_STD)
        patches = self.vit.patch_embed(pixels, self.vit.patch_px)
        rows, cols = patches.shape[-2:]
        tokens = torch.cat([self.vit.cls_token.expand(len(patches), -1, -1), patches.flatten(2).mT], dim=1)
        x = tokens + self._positions(rows, cols)
        middle = x
        for index, block in enumerate(self.vit.blocks):
            x = block(x)
            if index == self.vit.depth // 2 - 1:
                middle = x
        final = self.vit.norm(x)[:, 1:].mT.unflatten(2, (rows, cols))
        layers = (tensor.unflatten(0, (batch, count)) for tensor in (final, middle, x))
        return EncodedImages(*layers)


class FeatureCache:
    """Features of images that are always cut alike, by a frozen encoder: each image is encoded once.

    Images are encoded one by one, so that their features do not depend on the others in a batch. Tokens of the middle
    and the last block are kept for dense models only.
    """

    def __init__(self, encoder: ImageEncoder, dense: bool) -> None:
        self.encoder, self.dense = encoder, dense
        self._known: dict[int, EncodedImages] = {}

    @staticmethod
    def bytes_per_image(width: int, patches: int, dense: bool) -> int:
        """Returns the memory of an image's features in float32."""
        tokens = patches**2 + (2 * (patches**2 + 1) if dense else 0)
        return 4 * width * tokens

    @torch.no_grad()
    def encode(
        self, images: Float[Tensor, "batch images 3 h w"], numbers: Int64[Tensor, "batch images"]
    ) -> EncodedImages:
        """Returns the features of images; those of a number that was seen before come from memory."""
        scenes = []
        for scene, of_scene in zip(images, numbers.tolist(), strict=True):
            for image, number in zip(scene, of_scene, strict=True):
                if number not in self._known:
                    encoded = self.encoder(image[None, None])
                    self._known[number] = encoded if self.dense else encoded.patches_only()
            parts = [self._known[number] for number in of_scene]
            scenes.append([torch.cat([getattr(part, name) for part in parts], dim=1) for name in vars(parts[0])])
        return EncodedImages(*(torch.cat(part) for part in zip(*scenes, strict=True)))
