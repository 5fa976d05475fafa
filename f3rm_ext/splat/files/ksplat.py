"""Reads splats as ``.ksplat``, the format of mkkellogg's viewer GaussianSplats3D (version 0.1).

A header of 4096 bytes is followed by one of 1024 bytes for each section, and by the sections. Compression level 0 has
float32 throughout; levels 1 and 2 have float16, and positions in 16 bits relative to the middle of a bucket of
neighbours; level 2 has SH coefficients in bytes. Colours and opacities are bytes, sizes are not logarithms, and axes
are those of PLY (github.com/mkkellogg/GaussianSplats3D, src/loaders/SplatBuffer.js).
"""

import struct
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import packing
from f3rm_ext.splat.files.info import SplatInfo
from f3rm_ext.splat.gaussians import SH_C0, Gaussians, sh_rest_count

HEADER = struct.Struct("<BBxxIIIIHxx3fff")
"""Version (major, minor), sections (most, loaded), Gaussians (most, loaded), compression level, middle of the scene,
least and greatest SH coefficient."""
SECTION = struct.Struct("<IIIIfHxxIIIIH")
"""Gaussians (loaded, most), Gaussians in a full bucket, buckets, side of a bucket, bytes per bucket, greatest offset,
bytes, full buckets, other buckets, SH degree."""
HEADER_SIZE, SECTION_SIZE, BUCKET_SIZE = 4096, 1024, 12
_REAL, _OFFSET, _COEFFICIENT = ("<f4", "<f2", "<f2"), ("<f4", "<u2", "<u2"), ("<f4", "<f2", "u1")
_GREATEST_OFFSET, _GREATEST_COEFFICIENT = 32767, 1.5
MAX_SH_DEGREE = 2
_SMALLEST_SIZE = 2.0**-25
"""Half of the smallest float16 above 0: what a size of 0 is taken for."""


@dataclass(frozen=True)
class _Section:
    count: int
    bucket_count: int
    """Gaussians in a full bucket."""
    buckets: int
    bucket_side: float
    greatest_offset: int
    full: int
    others: int
    """Buckets that are not full; the section begins with the numbers of their Gaussians."""
    sh_degree: int

    def row(self, level: int) -> np.dtype:
        """Layout of a Gaussian."""
        return np.dtype(
            [
                ("position", _OFFSET[level], 3),
                ("size", _REAL[level], 3),
                ("rotation", _REAL[level], 4),
                ("rgba", "u1", 4),
                ("sh", _COEFFICIENT[level], 3 * sh_rest_count(self.sh_degree)),
            ]
        )


def read_ksplat(path: Path) -> tuple[Gaussians, SplatInfo]:
    """Reads splats; float32, on the CPU, values not checked. Sections of a lower SH degree get zeros.

    Raises:
        SplatFileError: the file is of another kind or version, damaged, or cut short.
    """
    try:
        with path.open("rb") as stream:
            return _read(path, stream)
    except EOFError as error:
        raise SplatFileError(f"{path} is damaged, cut short or no .ksplat file ({error}): export it again.") from error


def _read(path: Path, stream: BufferedIOBase) -> tuple[Gaussians, SplatInfo]:
    size = path.stat().st_size
    head = stream.read(HEADER_SIZE)
    if len(head) < HEADER_SIZE:
        raise EOFError("its header is incomplete")
    major, minor, section_count, _, count, _, level, _, _, _, low, high = HEADER.unpack_from(head)
    if (major, minor) != (0, 1):
        raise SplatFileError(f"{path} has version {major}.{minor} of .ksplat, but only 0.1 is read: export it as PLY.")
    if level > 2:
        raise EOFError(f"it has compression level {level}, where there are 0 to 2")
    if HEADER_SIZE + section_count * SECTION_SIZE > size:
        raise EOFError(f"{size} bytes cannot hold the headers of {section_count} sections")
    sections = [_read_section(stream.read(SECTION_SIZE)) for _ in range(section_count)]
    if sum(section.count for section in sections) != count:
        raise EOFError(f"its sections do not have the {count} Gaussians of its header")
    needed = stream.tell() + sum(
        4 * section.others + BUCKET_SIZE * section.buckets + section.row(level).itemsize * section.count
        for section in sections
    )
    if needed > size:
        raise EOFError(f"its sections take {needed} bytes, but it has {size}")
    degree = max((section.sh_degree for section in sections), default=0)
    # The reference writes the limits as found, and reads 0 as the default.
    limits = (low or -_GREATEST_COEFFICIENT, high or _GREATEST_COEFFICIENT)
    parts = [_read_gaussians(stream, section, level, limits).to_sh_degree(degree) for section in sections]
    notices = []
    if needed < size:
        notices.append(f"{path.name} has {size - needed} bytes after its last Gaussian, which are left out.")
    if not parts:
        raise EOFError("it has no sections")
    joined = {name: torch.cat([part.tensors()[name] for part in parts]) for name in parts[0].tensors()}
    return Gaussians.from_tensors(joined), SplatInfo("ksplat", None, None, degree, count, (), tuple(notices))


def _read_section(head: bytes) -> _Section:
    _, count, bucket_count, buckets, side, bucket_size, greatest, _, full, others, degree = SECTION.unpack_from(head)
    if degree > MAX_SH_DEGREE:
        raise EOFError(f"it has SH degree {degree}, where there are 0 to {MAX_SH_DEGREE}")
    if buckets and bucket_size != BUCKET_SIZE:
        raise EOFError(f"its buckets take {bucket_size} bytes instead of {BUCKET_SIZE}")
    if full + others > buckets:
        raise EOFError(f"it has {full + others} filled buckets of {buckets}")
    return _Section(count, bucket_count, buckets, side, greatest or _GREATEST_OFFSET, full, others, degree)


def _read_gaussians(stream: BufferedIOBase, section: _Section, level: int, limits: tuple[float, float]) -> Gaussians:
    lengths = np.frombuffer(stream.read(4 * section.others), "<u4").astype(np.int64)
    middles = np.frombuffer(stream.read(BUCKET_SIZE * section.buckets), "<f4").reshape(-1, 3)
    dtype = section.row(level)
    rows = np.frombuffer(stream.read(dtype.itemsize * section.count), dtype)
    means = rows["position"].astype(np.float64)
    if level > 0:
        means = _place(means, section, lengths, middles)
    colors = rows["rgba"] / 255.0
    sizes = rows["size"].astype(np.float64)
    with np.errstate(invalid="ignore"):  # sizes below 0; a later check finds them
        scales = np.log(np.where(sizes == 0, _SMALLEST_SIZE, sizes))
    return Gaussians.from_arrays(
        means,
        scales,
        rows["rotation"].astype(np.float32),
        packing.alphas_to_logits(colors[:, 3]),
        (colors[:, :3] - 0.5) / SH_C0,
        _coefficients(rows["sh"], level, limits),
    )


def _place(
    offsets: Float[np.ndarray, "n 3"],
    section: _Section,
    lengths: Int[np.ndarray, " o"],
    middles: Float[np.ndarray, "m 3"],
) -> Float[np.ndarray, "n 3"]:
    """Returns positions. Gaussians lie bucket by bucket, the full ones first."""
    held = section.full * section.bucket_count + int(lengths.sum())
    if held != section.count:
        raise EOFError(f"its buckets hold {held} of the {section.count} Gaussians of a section")
    bucket = np.repeat(np.arange(section.full + section.others), [*[section.bucket_count] * section.full, *lengths])
    step = section.bucket_side / 2 / section.greatest_offset
    return (offsets - section.greatest_offset) * step + middles[bucket]


def _coefficients(
    stored: Shaped[np.ndarray, "n values"], level: int, limits: tuple[float, float]
) -> Float[np.ndarray, "n coeffs 3"]:
    """Returns SH coefficients. Those of each degree are stored colour by colour."""
    values = stored.astype(np.float32)
    if level == 2:
        values = values / np.float32(255) * np.float32(limits[1] - limits[0]) + np.float32(limits[0])
    parts = (values[:, :9], values[:, 9:24])
    return np.concatenate([p.reshape(len(p), 3, p.shape[1] // 3).transpose(0, 2, 1) for p in parts], axis=1)
