"""Packs the pixels of a window of images and samples them uniformly."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64, UInt8
from torch import Tensor

from f3rm_ext.errors import CaptureError

CHANNELS = 3
"""Bytes per pixel: images are kept as RGB bytes. Alpha, which sizes do not tell, would add one more."""
EMPTY_SHARE = 0.25
"""Largest share of a batch's rays for masked pixels that are trained as empty: the object needs the others. After 600
steps a chair before white, with masks, has 21.6 dB with it, and 18.0 dB with rays in proportion to areas."""
_BLOCK_BYTES = 64
_BYTES = np.arange(256, dtype=np.uint8)
_MEMBERS = np.unpackbits(_BYTES[:, None], axis=1, bitorder="little")
_COUNTS = torch.from_numpy(_MEMBERS.sum(axis=1).astype(np.int16))
"""Number of bits set in a byte."""
_PLACES = torch.from_numpy(np.argsort(1 - _MEMBERS, axis=1, kind="stable"))
"""Places of the bits set in a byte, in order; then those of the others."""


def batch_seed(*parts: int | str) -> int:
    """A 63-bit seed from the parts that identify a batch, such as (seed, split, rank, batch number)."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def no_valid_pixel() -> CaptureError:
    """The error for a window that is masked out entirely."""
    return CaptureError(
        "The masks leave no pixel of a whole window of images to train on: "
        "check that white (non-zero) means keep, or remove mask_path from transforms.json."
    )


@dataclass(frozen=True)
class PixelSet:
    """Numbers of pixels as a bit each, and a count for every 512 of them: 1/7 of a byte per pixel.

    A list of the same numbers takes up to 4 or 8 bytes for each. The counts make the n-th member quick to find
    (Jacobson 1989, "Space-efficient static trees and graphs": select).
    """

    bits: UInt8[Tensor, "blocks 64"]
    """Whether a pixel is in the set: bit ``number % 8`` of byte ``number // 8``."""
    before: Int64[Tensor, "blocks"]
    """Number of members before each block."""
    size: int
    """Number of members."""

    def __len__(self) -> int:
        return self.size

    def select(self, ranks: Int64[Tensor, "rays"]) -> Int64[Tensor, "rays"]:
        """Returns the n-th members, counted from 0 in the order of their numbers; each n below the size."""
        block = torch.searchsorted(self.before, ranks, right=True) - 1
        rest = ranks - self.before[block]
        bits = self.bits[block].int()
        ends = torch.cumsum(_COUNTS[bits], dim=1)
        byte = torch.searchsorted(ends, rest[:, None], right=True)
        value = bits.gather(1, byte)
        first = ends.gather(1, byte) - _COUNTS[value]
        bit = _PLACES[value.squeeze(1).long(), (rest - first.squeeze(1))]
        return 8 * (_BLOCK_BYTES * block + byte.squeeze(1)) + bit


class PixelSetBuilder:
    """Packs a set part by part, so that no part has to be in memory with the others as a byte per pixel."""

    def __init__(self) -> None:
        self._bits: list[UInt8[np.ndarray, "blocks 64"]] = []
        self._counts: list[Int64[np.ndarray, "blocks"]] = []
        self._rest = np.zeros(0, bool)

    def add(self, members: Bool[np.ndarray, "pixels"]) -> None:
        """Adds pixels, given by whether each is a member."""
        members = np.concatenate([self._rest, members])
        whole = len(members) - len(members) % (8 * _BLOCK_BYTES)
        self._rest = members[whole:].copy()
        self._add_blocks(members[:whole])

    def finish(self) -> PixelSet:
        """Returns the set of all pixels that were added."""
        self._add_blocks(np.pad(self._rest, (0, -len(self._rest) % (8 * _BLOCK_BYTES))))
        counts = np.concatenate(self._counts)
        before = torch.from_numpy(np.cumsum(counts) - counts)
        return PixelSet(torch.from_numpy(np.concatenate(self._bits)), before, int(counts.sum()))

    def _add_blocks(self, members: Bool[np.ndarray, "pixels"]) -> None:
        bits = np.packbits(members, bitorder="little").reshape(-1, _BLOCK_BYTES)
        self._bits.append(bits)
        self._counts.append(_COUNTS.numpy()[bits].sum(axis=1, dtype=np.int64))


@dataclass(frozen=True)
class ImagePixels:
    """One decoded image."""

    pixels: UInt8[Tensor, "h w channels"]
    """RGB or RGBA."""
    valid: Bool[Tensor, "h w"] | None = None
    """Pixels that may be sampled; None means all."""
    empty: Bool[Tensor, "h w"] | None = None
    """Masked pixels that are trained as empty, and transparent therefore; None means that there are none."""
    first_px: tuple[int, int] = (0, 0)
    """Row and column of the first pixel in the image."""

    def thin(self, stride: int, draw: int) -> "ImagePixels":
        """Returns the pixels of every stride-th row and column, from one of the stride² first pixels, by a number."""
        height, width = self.pixels.shape[:2]
        row, column = min(draw // stride % stride, height - 1), min(draw % stride, width - 1)

        def take(values: Tensor | None) -> Any:
            return None if values is None else values[row::stride, column::stride].clone()

        return ImagePixels(take(self.pixels), take(self.valid), take(self.empty), (row, column))


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
    stride: int = 1
    """Distance of the rows and columns that are kept, px."""
    firsts: Int[Tensor, "cams 2"] | None = None
    """Row and column of each image's first pixel that is kept; None if all pixels are."""

    @classmethod
    def pack(
        cls, images: Sequence[int], parts: Iterable[ImagePixels], *, stride: int = 1, most: int | None = None
    ) -> "PackedPixels":
        """Packs decoded images. If one of them has an alpha channel, the others get an opaque one.

        Args:
            parts: the images, one after another, so that they need not be in memory together.
            stride: distance of their rows and columns in the photos, px.
            most: number of pixels of all images at most; None to count them beforehand.

        Raises:
            CaptureError: all pixels are masked out.
        """
        if most is None:
            parts = list(parts)
            most = sum(part.pixels.shape[0] * part.pixels.shape[1] for part in parts)
        pixels = torch.empty((most, CHANNELS), dtype=torch.uint8)  # takes memory where it is written to
        drawn, empties = PixelSetBuilder(), PixelSetBuilder()
        starts, widths, firsts, total = [], [], [], 0
        for part in parts:
            height, width, depth = part.pixels.shape
            if depth > pixels.shape[1]:
                wider = torch.empty((most, depth), dtype=torch.uint8)
                wider[:total, :CHANNELS], wider[:total, CHANNELS:] = pixels[:total], 255
                pixels = wider
            place = pixels[total : total + height * width]
            place[:, :depth], place[:, depth:] = part.pixels.reshape(-1, depth), 255
            valid, empty = _members(part)
            drawn.add(valid)
            empties.add(empty)
            starts.append(total)
            widths.append(width)
            firsts.append(part.first_px)
            total += height * width
        valid_set, empty_set = drawn.finish(), empties.finish()
        if not len(valid_set) + len(empty_set):
            raise no_valid_pixel()
        return cls(
            images=tuple(images),
            pixels=pixels[:total],
            image_of=torch.tensor(list(images), dtype=torch.int64),
            starts=torch.tensor(starts),
            widths=torch.tensor(widths),
            valid=None if len(valid_set) == total else valid_set,
            empty=empty_set if len(empty_set) else None,
            stride=stride,
            firsts=None if stride == 1 else torch.tensor(firsts),
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
        # Windows may have no pixels but empty ones, which are drawn below. The part is made contiguous, since
        # torch.searchsorted copies other values and warns of it.
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
        yx = torch.stack([rows, within - rows * width], dim=-1)
        if self.firsts is not None:
            yx = self.firsts[slots] + self.stride * yx
        return PixelDraw(places, slots, torch.cat([self.image_of[slots, None], yx], dim=-1))


def _members(part: ImagePixels) -> tuple[Bool[np.ndarray, "pixels"], Bool[np.ndarray, "pixels"]]:
    """Which pixels of an image are drawn, and which are trained as empty."""
    count = part.pixels.shape[0] * part.pixels.shape[1]
    valid = np.ones(count, bool) if part.valid is None else part.valid.reshape(-1).numpy()
    if part.empty is None:
        return valid, np.zeros(count, bool)
    empty = part.empty.reshape(-1).numpy()
    return valid & ~empty, valid & empty
