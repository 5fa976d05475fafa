"""Packs the pixels of a window of images and samples them uniformly."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from f3rm_ext.errors import CaptureError


def batch_seed(*parts: int | str) -> int:
    """A 63-bit seed from the parts that identify a batch, such as (seed, split, rank, batch number)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def no_valid_pixel() -> CaptureError:
    """The error for a window that is masked out entirely."""
    return CaptureError(
        "The masks leave no pixel of a whole window of images to train on: "
        "check that white (non-zero) means keep, or remove mask_path from transforms.json."
    )


@dataclass(frozen=True)
class ImagePixels:
    """One decoded image."""

    pixels: UInt8[Tensor, "h w channels"]
    """RGB or RGBA."""
    valid: Bool[Tensor, "h w"] | None = None
    """Pixels that may be sampled; None means all."""

    @property
    def nbytes(self) -> int:
        """Memory of the image and its mask, in bytes."""
        return self.pixels.nbytes + (0 if self.valid is None else self.valid.nbytes)


@dataclass(frozen=True)
class PixelDraw:
    """Which pixels were drawn from a window."""

    places: Int[Tensor, "rays"]
    """Index into :attr:`PackedPixels.pixels`."""
    slots: Int[Tensor, "rays"]
    """Index of the image within the window."""
    indices: Int[Tensor, "rays 3"]
    """Image in the data set, row and column."""


def colors_of(pixels: UInt8[Tensor, "rays channels"]) -> Float[Tensor, "rays channels"]:
    """Colours in [0, 1]; the same numbers on every device."""
    # CUDA would multiply by the rounded reciprocal of a plain number.
    return pixels.float().div_(torch.full((), 255.0, device=pixels.device))


@dataclass(frozen=True)
class PackedPixels:
    """Images of any sizes in one flat tensor, which may be on a GPU.

    Everything else is on the CPU, and pixels are drawn there, so that the same are drawn wherever the images are.
    """

    images: tuple[int, ...]
    """Indices of the images in the data set; the position in this tuple is the image's slot."""
    pixels: UInt8[Tensor, "points channels"]
    """Pixels of all images, row by row, one image after another."""
    image_of: Int[Tensor, "cams"]
    """``images`` as a tensor."""
    starts: Int[Tensor, "cams"]
    """Where each image begins in ``pixels``."""
    widths: Int[Tensor, "cams"]
    """Width of each image, px."""
    valid: Int[Tensor, "valid"] | None
    """Indices into ``pixels`` that may be sampled; None means all."""

    @classmethod
    def pack(cls, images: Sequence[int], decoded: Iterable[ImagePixels]) -> "PackedPixels":
        """Packs decoded images. If one of them has an alpha channel, the others get an opaque one.

        Raises:
            CaptureError: all pixels are masked out.
        """
        parts = list(decoded)
        channels = max(part.pixels.shape[-1] for part in parts)
        sizes = torch.tensor([part.pixels.shape[0] * part.pixels.shape[1] for part in parts])
        starts = torch.cumsum(sizes, 0) - sizes
        pixels = torch.empty((int(sizes.sum()), channels), dtype=torch.uint8)
        for part, start, size in zip(parts, starts.tolist(), sizes.tolist(), strict=True):
            depth = part.pixels.shape[-1]
            pixels[start : start + size, :depth] = part.pixels.reshape(size, depth)
            pixels[start : start + size, depth:] = 255
        valid = None
        if any(part.valid is not None for part in parts):
            small = pixels.shape[0] < 2**31
            valid = torch.cat(
                [_valid_indices(part, start, small) for part, start in zip(parts, starts.tolist(), strict=True)]
            )
            if not len(valid):
                raise no_valid_pixel()
        return cls(
            images=tuple(images),
            pixels=pixels,
            image_of=torch.tensor(list(images), dtype=torch.int64),
            starts=starts,
            widths=torch.tensor([part.pixels.shape[1] for part in parts]),
            valid=valid,
        )

    @property
    def num_pixels(self) -> int:
        """Number of pixels that can be sampled."""
        return len(self.pixels if self.valid is None else self.valid)

    def to(self, device: torch.device | str) -> "PackedPixels":
        """Returns the same images with their pixels on a device."""
        return replace(self, pixels=self.pixels.to(device))

    def draw(self, num_rays: int, generator: torch.Generator, part: slice = slice(None)) -> PixelDraw:
        """Draws pixels uniformly over the window, with replacement.

        Args:
            num_rays: number of pixels.
            generator: random number generator of the CPU.
            part: of these pixels to return; all by default.
        """
        places = torch.randint(self.num_pixels, (num_rays,), generator=generator)[part].contiguous()
        if self.valid is not None:
            places = self.valid[places].long()
        slots = torch.searchsorted(self.starts, places, right=True) - 1
        within = places - self.starts[slots]
        width = self.widths[slots]
        rows = torch.div(within, width, rounding_mode="floor")
        indices = torch.stack([self.image_of[slots], rows, within - rows * width], dim=-1)
        return PixelDraw(places, slots, indices)


def _valid_indices(part: ImagePixels, start: int, small: bool) -> Int[Tensor, "_"]:
    count = part.pixels.shape[0] * part.pixels.shape[1]
    local = torch.arange(count) if part.valid is None else part.valid.reshape(-1).nonzero().squeeze(-1)
    return (local + start).to(torch.int32 if small else torch.int64)
