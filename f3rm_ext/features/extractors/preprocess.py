"""Turns photos into network input: resizes to whole patches without cropping, normalises, batches equal sizes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from f3rm_ext.errors import ExtractorError

RGB = tuple[float, float, float]
IMAGENET_MEAN: RGB = (0.485, 0.456, 0.406)
IMAGENET_STD: RGB = (0.229, 0.224, 0.225)

MIN_SIDE_PX = 32


def check_image_size(height_px: int, width_px: int) -> None:
    """Raises :class:`ExtractorError` if an image is too small for dense features."""
    if min(height_px, width_px) < MIN_SIDE_PX:
        raise ExtractorError(
            f"An image of {height_px}x{width_px} px is too small for dense features: "
            f"both sides need at least {MIN_SIDE_PX} px."
        )


def check_short_side(short_side_px: int) -> None:
    """Raises :class:`ExtractorError` if images would be resized to too small a size."""
    if short_side_px < MIN_SIDE_PX:
        raise ExtractorError(
            f"short_side_px is {short_side_px}, below {MIN_SIDE_PX}: choose about the size that the network was "
            "trained at, such as 224 or 448."
        )


def whole_patches(height_px: int, width_px: int, short_side_px: int, patch_px: int) -> tuple[int, int]:
    """Returns the size (height, width) to resize to: the short side near `short_side_px`, both sides whole patches.

    The aspect ratio is kept except that each side is rounded to the nearest multiple of `patch_px`. Nothing is
    cropped, so the patches tile the whole image.

    >>> whole_patches(540, 960, short_side_px=336, patch_px=14)
    (336, 602)
    """
    check_image_size(height_px, width_px)
    scale = short_side_px / min(height_px, width_px)

    def round_to_patch(side_px: int) -> int:
        return max(1, int(side_px * scale / patch_px + 0.5)) * patch_px

    return round_to_patch(height_px), round_to_patch(width_px)


def resize(image: UInt8[np.ndarray, "h w 3"], size: tuple[int, int], device: torch.device) -> Float[Tensor, "3 _ _"]:
    """Returns the image in [0, 1] at `size` (height, width), resized bicubically with anti-aliasing."""
    writable = np.require(image, requirements=("C", "W"))  # Torch warns about read-only memory.
    pixels = torch.from_numpy(writable).to(device).permute(2, 0, 1)[None].float() / 255
    if pixels.shape[-2:] != size:
        pixels = functional.interpolate(pixels, size=size, mode="bicubic", align_corners=False, antialias=True)
    return pixels[0].clamp(0, 1)


def normalise(pixels: Float[Tensor, "*batch 3 h w"], mean: RGB, std: RGB) -> Float[Tensor, "*batch 3 h w"]:
    """Returns (pixels - mean) / std for each colour channel."""
    # The numbers are made where they are needed: for a copy from the host, the host would wait for a GPU.
    shift, scale = (
        torch.stack([torch.full((1, 1), value, device=pixels.device) for value in values]) for values in (mean, std)
    )
    return (pixels - shift) / scale


def extract_in_batches(
    images: Sequence[UInt8[np.ndarray, "_ _ 3"]],
    size_of: Callable[[int, int], tuple[int, int]],
    forward: Callable[[Float[Tensor, "batch 3 h w"]], Float[Tensor, "batch rows cols feat"]],
    *,
    batch_size: int,
    device: torch.device,
) -> list[Float[Tensor, "_ _ feat"]]:
    """Runs a network over images of any sizes, with images of the same input size in one batch; float32 on the CPU.

    Args:
        size_of: Returns the input size (height, width) for a photo of the given height and width.
        forward: The network, from pixels in [0, 1] to dense features.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, image in enumerate(images):
        groups.setdefault(size_of(image.shape[0], image.shape[1]), []).append(index)

    results: dict[int, Tensor] = {}
    with torch.inference_mode():
        for size, members in groups.items():
            for start in range(0, len(members), batch_size):
                batch = members[start : start + batch_size]
                features = forward(torch.stack([resize(images[index], size, device) for index in batch]))
                results.update(zip(batch, features.float().cpu(), strict=True))
    # Inference tensors must not enter autograd later; copies made outside of inference mode may.
    return [results[index].clone() for index in range(len(images))]


class PatchExtractor(ABC):
    """The common part of extractors whose network divides images into patches."""

    config: Any
    """Options, among them ``short_side_px``."""
    device: torch.device
    gpu_batch_size = 16
    resizes = True
    """Images are resized to ``short_side_px``, so it is given the photos at full size, whatever size is trained on."""

    @property
    def batch_size(self) -> int:
        """Small on the CPU, where larger batches bring nothing."""
        return 2 if self.device.type == "cpu" else self.gpu_batch_size

    @property
    @abstractmethod
    def patch_px(self) -> int:
        """Side of a patch; the sides of images are resized to multiples of it."""

    def extract(self, images: Sequence[UInt8[np.ndarray, "_ _ 3"]]) -> list[Float[Tensor, "_ _ feat"]]:
        return extract_in_batches(
            images, self._input_size, self._forward, batch_size=self.batch_size, device=self.device
        )

    def _input_size(self, height_px: int, width_px: int) -> tuple[int, int]:
        return whole_patches(height_px, width_px, self.config.short_side_px, self.patch_px)

    @abstractmethod
    def _forward(self, pixels: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch rows cols feat"]:
        """The network, from pixels in [0, 1]."""
