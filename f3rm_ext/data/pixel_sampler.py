"""Packs the pixels of a window of images and samples them uniformly."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from f3rm_ext.data.pixel_set import PixelSet
from f3rm_ext.errors import CaptureError

CHANNELS = 3
"""Bytes per pixel: images are kept as RGB bytes. Alpha, which sizes do not tell, would add to them."""
EMPTY_SHARE = 0.25
"""Largest share of a batch's rays for masked pixels that are trained as empty: the object needs the others. After 600
steps the chair of benchmarks/masked_pixels.py has 21.6 dB with it, and 18.0 dB with rays in proportion to areas."""


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
    empty: Bool[Tensor, "h w"] | None = None
    """Masked pixels that are trained as empty, and transparent therefore; None means that there are none."""

    @property
    def nbytes(self) -> int:
        """Memory of the image and its mask, in bytes."""
        return self.pixels.nbytes + (0 if self.valid is None else self.valid.nbytes)


@dataclass(frozen=True)
class PixelDraw:
    """Pixels that were drawn from a window, one for each ray."""

    places: Int[Tensor, "rays"]
    """Index into :attr:`PackedPixels.pixels`."""
    slots: Int[Tensor, "rays"]
    """Index of the image within the window."""
    indices: Int[Tensor, "rays 3"]
    """Image in the data set, row and column."""


def to_colors(pixels: UInt8[Tensor, "rays channels"]) -> Float[Tensor, "rays channels"]:
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
    """Index in ``pixels`` of the first pixel of each image."""
    widths: Int[Tensor, "cams"]
    """Width of each image, px."""
    valid: PixelSet | None
    """Indices into ``pixels`` that may be sampled; None means all."""
    empty: PixelSet | None = None
    """Indices of masked pixels that are sampled besides, see :data:`EMPTY_SHARE`; None means that there are none."""

    @classmethod
    def pack(cls, images: Sequence[int], parts: list[ImagePixels]) -> "PackedPixels":
        """Packs decoded images. If one of them has an alpha channel, the others get an opaque one.

        Takes the images out of the list one by one, so that they are not in memory twice.

        Raises:
            CaptureError: all pixels are masked out.
        """
        channels = max(part.pixels.shape[-1] for part in parts)
        sizes = torch.tensor([part.pixels.shape[0] * part.pixels.shape[1] for part in parts])
        starts, total = torch.cumsum(sizes, 0) - sizes, int(sizes.sum())
        widths = torch.tensor([part.pixels.shape[1] for part in parts])
        pixels = torch.empty((total, channels), dtype=torch.uint8)
        valid = np.ones(total, bool) if any(part.valid is not None for part in parts) else None
        empty = np.zeros(total, bool) if any(part.empty is not None for part in parts) else None
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            part = parts.pop(0)
            depth, place = part.pixels.shape[-1], slice(start, start + size)
            pixels[place, :depth] = part.pixels.reshape(size, depth)
            pixels[place, depth:] = 255
            if valid is not None and part.valid is not None:
                valid[place] = part.valid.reshape(-1).numpy()
            if empty is not None and part.empty is not None:
                empty[place] = part.empty.reshape(-1).numpy()
        if empty is not None:
            empty &= True if valid is None else valid
            valid = ~empty if valid is None else valid & ~empty
        drawn, empties = (None if members is None else PixelSet.of(members) for members in (valid, empty))
        if drawn is not None and not len(drawn) + len(empties or ()):
            raise no_valid_pixel()
        return cls(
            images=tuple(images),
            pixels=pixels,
            image_of=torch.tensor(list(images), dtype=torch.int64),
            starts=starts,
            widths=widths,
            valid=drawn,
            empty=empties if empties is not None and len(empties) else None,
        )

    @property
    def num_pixels(self) -> int:
        """Number of pixels that can be sampled, besides empty ones."""
        return len(self.pixels if self.valid is None else self.valid)

    def to(self, device: torch.device | str) -> "PackedPixels":
        """Returns the same images with their pixels on a device."""
        return replace(self, pixels=self.pixels.to(device))

    def draw(self, num_rays: int, generator: torch.Generator, part: slice = slice(None)) -> PixelDraw:
        """Draws pixels uniformly over the window, with replacement; fewer of those that are trained as empty.

        Returns only the given part of them.
        """
        places = torch.randint(max(1, self.num_pixels), (num_rays,), generator=generator)[part].contiguous()
        if self.valid is not None and len(self.valid):
            places = self.valid.select(places)
        if self.empty is not None:
            share = len(self.empty) / (len(self.empty) + self.num_pixels)
            chosen = torch.rand(num_rays, generator=generator)[part] < (min(EMPTY_SHARE, share) if share < 1 else 1)
            others = torch.randint(len(self.empty), (num_rays,), generator=generator)[part]
            places = torch.where(chosen, self.empty.select(others), places)
        slots = torch.searchsorted(self.starts, places, right=True) - 1
        within = places - self.starts[slots]
        width = self.widths[slots]
        rows = torch.div(within, width, rounding_mode="floor")
        indices = torch.stack([self.image_of[slots], rows, within - rows * width], dim=-1)
        return PixelDraw(places, slots, indices)
