"""Splats as ``.spz``, Niantic's open format (versions 2 and 3): about a tenth of the size of PLY.

A file is a gzip stream with a header, followed by the values of all Gaussians: positions in 24 bits; opacities,
colours, log-scales and rotations in bytes; and SH coefficients from -1 to 1 in a byte each, whose lowest bits are 0 to
compress well. The axes of the format are x right, y up, z back. Those of PLY are x right, y down, z forward, half a
turn about x away. Version 4, in :mod:`~f3rm_ext.splat.files.spz4`, has the same values in another container.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float, UInt8, UInt32

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import packing
from f3rm_ext.splat.files.checks import is_plausible
from f3rm_ext.splat.files.info import SplatInfo, read_tags, tag_comments
from f3rm_ext.splat.gaussians import MAX_SH_DEGREE, Gaussians, sh_rest_count
from f3rm_ext.splat.rasterize.camera import MIN_ALPHA

Axes = Literal["rub", "ply"]
"""Axes of the coordinates in the file: ``rub`` as the format specifies (right, up, back), or ``ply`` for those of PLY
files, which some programs expect, such as version 3 of PlayCanvas' splat-transform."""
SpzVersion = Literal[3, 4]
"""Versions that are written: 3 (gzip), which all readers know, or 4 (zstd), which is smaller."""

MAGIC = b"NGSP"
GZIP = b"\x1f\x8b"
HEADER = struct.Struct("<4sIIBBBB")
RECORD = struct.Struct("<II")
"""Type and length of an extension."""
VERSIONS = (2, 3)
ANTIALIASED, EXTENSIONS = 1, 2
COORDINATE_SYSTEM = 0xADBE0003
"""Type of the extension SPZ_ADOBE_coordinate_system: the file has other axes than the format prescribes."""
COLOR_SCALE = 0.15
SH_STEPS = (8, 16)
"""Steps of SH coefficients of degree 1, and of higher ones, in units of 1/128."""
MAX_FRACTION_BITS = 23
_STEP_SHARE = 1 / 8
"""Largest step of positions, in sizes of small Gaussians. It cost .003 dB at most on the fox."""
_SMALL = 0.01
"""Share of the visible Gaussians that may be smaller than a small one."""
MAX_GAUSSIANS = 10_000_000
"""Niantic's library, on which most viewers build, refused files with more before version 4."""
_LIMIT = (1 << 23) - 1
_COMMENT = 0x10
_LONGEST_TAIL = 1 << 20
_BLOCK = 1 << 16
TO_RUB = np.array([1, -1, -1])
"""From the axes of PLY files to right, up, back: half a turn about x."""
_TURN_SH = np.array([-1, -1, 1, -1, 1, 1, -1, 1, -1, 1, -1, -1, 1, -1, 1])
"""Signs of SH coefficients beyond the first under half a turn about x."""


def read_spz(path: Path, axes: Axes = "rub") -> tuple[Gaussians, SplatInfo]:
    """Reads splats; float32, on the CPU, values not checked, in the axes of PLY.

    Raises:
        SplatFileError: the file is of another kind or version, damaged, or cut short.
    """
    try:
        comments = read_comments(path)
        with gzip.open(path, "rb") as stream:
            return _read(path, stream, comments, axes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = "cut short" if isinstance(error, EOFError) else "damaged"
        raise SplatFileError(f"{path} is {reason} ({error}): copy or export it again.") from error


@dataclass(frozen=True)
class SpzHeader:
    """Fields that the headers of all versions have."""

    version: int
    count: int
    """Number of Gaussians."""
    sh_degree: int
    fraction_bits: int
    """Bits of a position behind the point."""
    flags: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes per Gaussian of the positions, opacities, colours, sizes, rotations and SH coefficients."""
        return 9, 1, 3, 3, 3 if self.version == 2 else 4, 3 * sh_rest_count(self.sh_degree)

    def require_possible(self, path: Path) -> None:
        """Raises SplatFileError where the header cannot be right, or asks for what is not supported."""
        if self.sh_degree > MAX_SH_DEGREE:
            raise SplatFileError(
                f"{path} has spherical harmonics of degree {self.sh_degree}, but only degrees up to {MAX_SH_DEGREE} "
                "are supported: export it with a lower one."
            )
        if not is_plausible(self.count * sum(self.widths), path.stat().st_size):
            raise SplatFileError(
                f"{path} is cut short or damaged: its header claims {self.count} Gaussians, copy it again."
            )
        if self.fraction_bits > MAX_FRACTION_BITS:
            raise SplatFileError(
                f"{path} is damaged: its coordinates have {self.fraction_bits} fraction bits, and there are "
                f"{MAX_FRACTION_BITS} at most, so copy or export it again."
            )

    def notices(self, path: Path) -> list[str]:
        """Returns a sentence on flags that the format does not define."""
        unknown = self.flags & ~(ANTIALIASED | EXTENSIONS)
        return [f"{path.name} has unknown flags (0x{unknown:02x}), which are left out."] if unknown else []


def _read(path: Path, stream: gzip.GzipFile, comments: list[str], axes: Axes) -> tuple[Gaussians, SplatInfo]:
    head = stream.read(HEADER.size)
    if head[:4] != MAGIC or len(head) < HEADER.size:
        raise SplatFileError(f"{path} is a gzip file but no .spz file: give a file of splats.")
    header = SpzHeader(*HEADER.unpack(head)[1:6])
    if header.version not in VERSIONS:
        raise other_version(path, header.version)
    header.require_possible(path)
    gaussians = unpack_values(header, stream.read, axes)
    notices = header.notices(path)
    tail = stream.read(_LONGEST_TAIL)  # reading on also makes gzip compare its checksum
    if tail:
        what = "bytes after its last Gaussian"
        if header.flags & EXTENSIONS:
            require_known_axes(path, [kind for kind, _ in read_extensions(tail)])
            what = "extensions"
        notices.append(f"{path.name} has {what}, which are left out.")
    return gaussians, describe(header, comments, notices)


def describe(header: SpzHeader, comments: list[str], notices: list[str]) -> SplatInfo:
    """Returns the information about a file."""
    mode, fused, others = read_tags(comments)
    mode = "mip" if header.flags & ANTIALIASED else mode or "default"
    return SplatInfo("spz", mode, fused, header.sh_degree, header.count, others, tuple(notices), header.version)


def unpack_values(header: SpzHeader, read: Callable[[int], bytes], axes: Axes) -> Gaussians:
    """Returns the Gaussians, float32, in the axes of PLY.

    Args:
        read: returns the next so many bytes of the values, or fewer at their end.

    Raises:
        EOFError: values are missing.
    """
    count, widths = header.count, iter(header.widths)

    def take() -> UInt8[np.ndarray, "n columns"]:
        columns = next(widths)
        data = read(count * columns)
        if len(data) < count * columns:
            raise EOFError(f"some of its {count} Gaussians are missing")
        return np.frombuffer(data, np.uint8).reshape(count, columns)

    per_channel = sh_rest_count(header.sh_degree)
    turn, turn_sh = (TO_RUB, _TURN_SH) if axes == "rub" else (np.ones(3), np.ones(15))
    low, middle, high = take().reshape(-1, 3, 3).astype(np.int32).transpose(2, 0, 1)
    means = ((low << 8 | middle << 16 | high << 24) >> 8) / float(1 << header.fraction_bits) * turn
    opacities = packing.alphas_to_logits(take()[:, 0] / 255.0)
    dc = (take() / 255.0 - 0.5) / COLOR_SCALE
    scales = take() / 16.0 - 10.0
    xyzw = (_unpack_three if header.version == 2 else _unpack_smallest)(take())
    quats = np.concatenate([xyzw[:, 3:], xyzw[:, :3] * turn], axis=1)
    rest = np.empty((count, per_channel, 3), "f4")
    if per_channel:
        np.subtract(take().reshape(rest.shape), 128.0, out=rest, casting="same_kind")
        rest *= turn_sh[:per_channel, None].astype(np.float32) / 128
    return Gaussians.from_arrays(means, scales, quats, opacities, dc, rest)


def read_extensions(data: bytes) -> list[tuple[int, bytes]]:
    """Returns the type and the content of each extension record; the last may be cut short."""
    extensions, offset = [], 0
    while offset + RECORD.size <= len(data):
        kind, length = RECORD.unpack_from(data, offset)
        offset += RECORD.size + length
        extensions.append((kind, data[offset - length : offset]))
    return extensions


def require_known_axes(path: Path, extensions: list[int]) -> None:
    """Raises SplatFileError if an extension says that a file has axes of its own."""
    if COORDINATE_SYSTEM in extensions:
        raise SplatFileError(
            f"{path} has the extension SPZ_ADOBE_coordinate_system, so its scene would be turned: export it without "
            "that extension, or as PLY."
        )


def write_spz(stream: BufferedIOBase, gaussians: Gaussians, info: SplatInfo, axes: Axes = "rub") -> None:
    """Writes splats, version 3. Positions get the fraction bits of :func:`choose_fraction_bits`.

    Args:
        info: its render mode goes into the header; its tags and comments go into the comment of the gzip stream, which
            other programs skip.

    Raises:
        SplatFileError: a position is too large for the format.
    """
    arrays = gaussians.arrays()
    bits = choose_fraction_bits(gaussians)
    flags = ANTIALIASED if info.render_mode == "mip" else 0
    head = HEADER.pack(MAGIC, 3, len(gaussians), gaussians.sh_degree, bits, flags, 0)
    comment = "\n".join(tag_comments(info)).encode("ascii", "backslashreplace").replace(b"\0", b" ")
    # By hand, as Python's gzip module writes no comments; without a time, so that equal splats are equal files.
    stream.write(struct.pack("<2sBBIBB", GZIP, 8, _COMMENT, 0, 0, 255) + comment + b"\0")
    press = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    checksum = size = 0
    for pieces in ([head], *pack_values(arrays, bits, axes)):
        for piece in pieces:
            stream.write(press.compress(piece))
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    stream.write(press.flush() + struct.pack("<II", checksum, size & 0xFFFFFFFF))


def require_readable(path: Path, count: int) -> None:
    """Raises SplatFileError if a file of version 3 would have more Gaussians than readers accept."""
    if count > MAX_GAUSSIANS:
        raise SplatFileError(
            f"{path} would hold {count} Gaussians, but readers of .spz refuse more than {MAX_GAUSSIANS}: write .ply, "
            ".compressed.ply or --spz-version 4, or train with a lower --pipeline.model.densify.max-gaussians."
        )


def choose_fraction_bits(gaussians: Gaussians) -> int:
    """Returns the number of fraction bits of positions: enough for the picture, and no more than the largest allows.

    Fewer bits compress better. The step is at most an eighth of the size (the geometric mean of the standard
    deviations) that 99 of 100 Gaussians exceed, of those with an opacity that is drawn.

    Raises:
        SplatFileError: a coordinate is too large for the format.
    """
    largest = float(gaussians.means.detach().abs().max())
    if largest > _LIMIT:
        raise SplatFileError(
            f"A Gaussian has a coordinate of {largest:.3g}, but .spz allows at most {_LIMIT}: write PLY instead."
        )
    sizes = gaussians.scales.detach().double().mean(dim=1)
    visible = sizes[gaussians.alphas().detach() >= MIN_ALPHA]
    sizes = visible if len(visible) else sizes
    small = float(sizes.kthvalue(1 + int(_SMALL * len(sizes))).values)
    enough = math.ceil(-small / math.log(2) - math.log2(_STEP_SHARE))
    allowed = MAX_FRACTION_BITS if largest == 0 else math.floor(math.log2(_LIMIT / largest))
    return max(0, min(MAX_FRACTION_BITS, allowed, enough))


def read_comments(path: Path) -> list[str]:
    """Returns the lines of the comment of a gzip stream; an empty list if there is none."""
    with path.open("rb") as stream:
        head = stream.read(10)
        if len(head) < 10 or not head.startswith(GZIP) or head[3] != _COMMENT:
            return []
        return stream.read(1 << 16).partition(b"\0")[0].decode("latin-1").splitlines()


def other_version(path: Path, version: int) -> SplatFileError:
    """Returns the error for a version that is not read."""
    return SplatFileError(
        f"{path} has version {version} of .spz, but only versions 2 to 4 are supported: export it as one of those, or "
        "as PLY."
    )


def pack_values(arrays: dict[str, np.ndarray], bits: int, axes: Axes) -> Iterator[Iterator[bytes]]:
    """Yields the packed values of all Gaussians, kind by kind, each in blocks; kinds without values are left out."""
    turn, turn_sh = (TO_RUB, _TURN_SH) if axes == "rub" else (np.ones(3), np.ones(15))
    turn_sh = turn_sh[: arrays["features_rest"].shape[1], None]
    packers = {
        "means": lambda block: _pack_positions(block * turn, bits),
        "opacities": lambda block: packing.pack_unorm(packing.logits_to_alphas(block), 8),
        "features_dc": lambda block: np.clip(np.round(block * (COLOR_SCALE * 255) + 127.5), 0, 255),
        "scales": lambda block: np.clip(np.round((block + 10.0) * 16), 0, 255),
        "quats": lambda block: _pack_smallest(packing.unit_quats(np.roll(block, -1, axis=1)) * [*turn, 1]),
        "features_rest": lambda block: _pack_rest(block * turn_sh),
    }
    for name, pack in packers.items():
        if arrays[name].size:
            yield _pack_blocks(arrays[name], pack)


def _pack_blocks(values: np.ndarray, pack: Callable[[np.ndarray], np.ndarray]) -> Iterator[bytes]:
    for start in range(0, len(values), _BLOCK):
        yield pack(values[start : start + _BLOCK].astype(np.float64)).astype(np.uint8).tobytes()


def _pack_positions(positions: Float[np.ndarray, "n 3"], bits: int) -> UInt8[np.ndarray, "n 3 3"]:
    fixed = np.round(positions * (1 << bits)).astype(np.int32)
    return np.stack([fixed >> shift & 255 for shift in (0, 8, 16)], axis=-1).astype(np.uint8)


def _pack_smallest(xyzw: Float[np.ndarray, "n 4"]) -> UInt8[np.ndarray, "n 4"]:
    """Packs the index of the largest component in 2 bits, and the others with a sign and 9 bits each."""
    largest, others = packing.drop_largest(xyzw)
    size = packing.pack_unorm(np.abs(others) / packing.HALF_DIAGONAL, 9)
    a, b, c = (size | (others < 0).astype(np.uint32) << 9).T
    packed = largest.astype(np.uint32) << 30 | a << 20 | b << 10 | c
    return packed.astype("<u4").view(np.uint8).reshape(-1, 4)


def _unpack_smallest(data: UInt8[np.ndarray, "n 4"]) -> Float[np.ndarray, "n 4"]:
    packed: UInt32[np.ndarray, " n"] = np.ascontiguousarray(data).view("<u4")[:, 0].astype(np.uint32)
    size = np.stack([packing.unpack_unorm(packed, shift, 9) for shift in (20, 10, 0)], axis=1)
    negative = np.stack([packed >> np.uint32(shift + 9) & np.uint32(1) for shift in (20, 10, 0)], axis=1) > 0
    others = np.where(negative, -size, size) * packing.HALF_DIAGONAL
    return packing.insert_largest((packed >> np.uint32(30)).astype(np.int64), others)


def _unpack_three(data: UInt8[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 4"]:
    """Unpacks version 2: x, y and z of the quaternion whose w is not negative."""
    xyz = data / 127.5 - 1.0
    w = np.sqrt(np.maximum(0.0, 1.0 - (xyz**2).sum(axis=1, keepdims=True)))
    return np.concatenate([xyz, w], axis=1)


def _pack_rest(rest: Float[np.ndarray, "n coeffs 3"]) -> Float[np.ndarray, "n coeffs 3"]:
    steps = np.where(np.arange(rest.shape[1]) < 3, *SH_STEPS)[:, None]
    levels = np.round(rest * 128) + 128
    return np.clip((levels + steps // 2) // steps * steps, 0, 255)
