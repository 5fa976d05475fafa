"""From photos to network input: resizing to whole patches (never cropping), normalising, batches of equal size."""

from collections.abc import Callable, Sequence

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
    """Raises :class:`ExtractorError` for images too small to have dense features."""
    if min(height_px, width_px) < MIN_SIDE_PX:
        raise ExtractorError(
            f"An image of {height_px}x{width_px} px is too small for dense features: "
            f"both sides need at least {MIN_SIDE_PX} px."
        )


def whole_patches(height_px: int, width_px: int, short_side_px: int, patch_px: int) -> tuple[int, int]:
    """The size (height, width) to resize to: the short side near `short_side_px`, both sides whole patches.

    The aspect ratio is kept up to the rounding of each side to the nearest multiple of `patch_px`; nothing is
    cropped, so the patches tile the whole image.
    """
    check_image_size(height_px, width_px)
    scale = short_side_px / min(height_px, width_px)

    def rounded(side_px: int) -> int:
        return max(1, int(side_px * scale / patch_px + 0.5)) * patch_px

    return rounded(height_px), rounded(width_px)


def resize(image: UInt8[np.ndarray, "h w 3"], size: tuple[int, int], device: torch.device) -> Float[Tensor, "3 _ _"]:
    """The image in [0, 1] at `size` (height, width), bicubic with anti-aliasing."""
    writable = np.require(image, requirements=("C", "W"))  # Torch warns of read-only memory.
    pixels = torch.from_numpy(writable).to(device).permute(2, 0, 1)[None].float() / 255
    if pixels.shape[-2:] != size:
        pixels = functional.interpolate(pixels, size=size, mode="bicubic", align_corners=False, antialias=True)
    return pixels[0].clamp(0, 1)


def normalise(pixels: Float[Tensor, "*batch 3 h w"], mean: RGB, std: RGB) -> Float[Tensor, "*batch 3 h w"]:
    """(pixels - mean) / std per colour channel."""
    shift = torch.tensor(mean, device=pixels.device)[:, None, None]
    scale = torch.tensor(std, device=pixels.device)[:, None, None]
    return (pixels - shift) / scale


def extract_in_batches(
    images: Sequence[UInt8[np.ndarray, "_ _ 3"]],
    size_of: Callable[[int, int], tuple[int, int]],
    forward: Callable[[Float[Tensor, "batch 3 h w"]], Float[Tensor, "batch rows cols feat"]],
    *,
    batch_size: int,
    device: torch.device,
) -> list[Float[Tensor, "_ _ feat"]]:
    """Runs a network over images of any sizes, those of one input size together.

    Args:
        images: Photos, 8-bit RGB.
        size_of: Input size (height, width) for a photo of the given height and width.
        forward: The network, from pixels in [0, 1] to dense features.
        batch_size: Most images per call of `forward`.
        device: Where `forward` wants its input.

    Returns:
        Features of each image in the order given, float32 on the CPU.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, image in enumerate(images):
        groups.setdefault(size_of(image.shape[0], image.shape[1]), []).append(index)

    found: dict[int, Tensor] = {}
    with torch.inference_mode():
        for size, members in groups.items():
            for start in range(0, len(members), batch_size):
                batch = members[start : start + batch_size]
                features = forward(torch.stack([resize(images[index], size, device) for index in batch]))
                found.update(zip(batch, features.float().cpu(), strict=True))
    # Inference tensors may not enter autograd later on; copies made out here may.
    return [found[index].clone() for index in range(len(images))]
