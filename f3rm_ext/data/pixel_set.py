"""A set of pixels as bits, from which the n-th member is found without a list of members."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

_BLOCK_BYTES = 64
_BYTES = np.arange(256, dtype=np.uint8)
_MEMBERS = np.unpackbits(_BYTES[:, None], axis=1, bitorder="little")
_COUNTS = torch.from_numpy(_MEMBERS.sum(axis=1).astype(np.int16))
"""Number of bits set in a byte."""
_PLACES = torch.from_numpy(np.argsort(1 - _MEMBERS, axis=1, kind="stable"))
"""Places of the bits set in a byte, in order; then those of the others."""


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

    @property
    def nbytes(self) -> int:
        """Memory that the set takes, in bytes."""
        return self.bits.nbytes + self.before.nbytes

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
        """Begins with no pixels."""
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
