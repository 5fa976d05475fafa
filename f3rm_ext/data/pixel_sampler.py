"""Packs the pixels of a window of images and samples them uniformly."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from f3rm_ext.errors import CaptureError

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
    valid: Int[Tensor, "valid"] | None
    """Indices into ``pixels`` that may be sampled; None means all."""
    empty: Int[Tensor, "empty"] | None = None
    """Indices of masked pixels that are sampled besides, see :data:`EMPTY_SHARE`; None means that there are none."""

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
        valid = empty = None
        if any(part.valid is not None or part.empty is not None for part in parts):
            dtype = torch.int32 if pixels.shape[0] < 2**31 else torch.int64
            valid, empty = (
                torch.cat([indices.to(dtype) + start for indices, start in zip(each, starts.tolist(), strict=True)])
                for each in zip(*map(_sampled_indices, parts), strict=True)
            )
            if not len(valid) + len(empty):
                raise no_valid_pixel()
        return cls(
            images=tuple(images),
            pixels=pixels,
            image_of=torch.tensor(list(images), dtype=torch.int64),
            starts=starts,
            widths=torch.tensor([part.pixels.shape[1] for part in parts]),
            valid=valid,
            empty=empty if empty is not None and len(empty) else None,
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
            places = self.valid[places].long()
        if self.empty is not None:
            share = len(self.empty) / (len(self.empty) + self.num_pixels)
            chosen = torch.rand(num_rays, generator=generator)[part] < (min(EMPTY_SHARE, share) if share < 1 else 1)
            others = torch.randint(len(self.empty), (num_rays,), generator=generator)[part]
            places = torch.where(chosen, self.empty[others].long(), places)
        slots = torch.searchsorted(self.starts, places, right=True) - 1
        within = places - self.starts[slots]
        width = self.widths[slots]
        rows = torch.div(within, width, rounding_mode="floor")
        indices = torch.stack([self.image_of[slots], rows, within - rows * width], dim=-1)
        return PixelDraw(places, slots, indices)


def _sampled_indices(part: ImagePixels) -> tuple[Int[Tensor, "_"], Int[Tensor, "_"]]:
    """Returns the pixels of an image to sample: those that are kept, and those that are empty."""
    valid = torch.ones(part.pixels.shape[:2], dtype=torch.bool) if part.valid is None else part.valid
    empty = torch.zeros_like(valid) if part.empty is None else part.empty & valid
    return (valid & ~empty).reshape(-1).nonzero().squeeze(-1), empty.reshape(-1).nonzero().squeeze(-1)
