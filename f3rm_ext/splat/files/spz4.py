"""Splats as ``.spz`` version 4: the values of the earlier versions, each kind in a zstd stream of its own.

A header of 32 bytes is followed by extension records, by a table of the sizes of the streams, and by the streams
(github.com/nianticlabs/spz). The format has no place for comments, so they are an extension record, which other
programs skip.
"""

import io
import struct
from io import BufferedIOBase
from pathlib import Path

import zstandard

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import spz
from f3rm_ext.splat.files.info import SplatInfo, tag_comments
from f3rm_ext.splat.gaussians import Gaussians

VERSION = 4
HEADER = struct.Struct("<4sIIBBBBI12x")
COMMENTS = 0xF3E00001
"""Type of the extension that holds comments, one in a line."""
_SIZES = struct.Struct("<QQ")
_LEVEL = 12
_LONGEST_EXTENSIONS = 1 << 20
_HIGHEST_RATIO, _BYTES_OF_POSITION = 1024, 9
"""zstd compresses no more than that, so that the size of a file limits the number of its positions."""


def read_spz4(path: Path, axes: spz.Axes = "rub") -> tuple[Gaussians, SplatInfo]:
    """Reads splats; float32, on the CPU, values not checked, in the axes of PLY.

    Raises:
        SplatFileError: the file is of another version, damaged or cut short, or has axes of its own.
    """
    try:
        with path.open("rb") as stream:
            header, extensions, streams = _read_container(path, stream)
            values = io.BytesIO(b"".join(_unpack_stream(stream, *sizes) for sizes in streams))
    except (EOFError, zstandard.ZstdError) as error:
        raise SplatFileError(f"{path} is damaged or cut short ({error}): copy or export it again.") from error
    gaussians = spz.unpack_values(header, values.read, axes)
    notices = header.notices(path)
    unknown = [kind for kind, _ in extensions if kind != COMMENTS]
    if unknown:
        notices.append(f"{path.name} has extensions ({', '.join(f'0x{kind:08x}' for kind in unknown)}), left out.")
    return gaussians, spz.describe(header, _comments(extensions), notices)


def write_spz4(stream: BufferedIOBase, gaussians: Gaussians, info: SplatInfo, axes: spz.Axes = "rub") -> None:
    """Writes splats. Positions get the fraction bits of :func:`spz.choose_fraction_bits`.

    Args:
        info: its render mode goes into the header; its tags and comments go into an extension.

    Raises:
        SplatFileError: a position is too large for the format.
    """
    arrays = gaussians.arrays()
    bits = spz.choose_fraction_bits(gaussians)
    streams = []
    for pieces in spz.pack_values(arrays, bits, axes):
        whole = b"".join(pieces)  # the frame says how large it becomes, as readers ask before they unpack
        streams.append((zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(whole), len(whole)))
    comments = "\n".join(tag_comments(info)).encode(errors="backslashreplace")[: _LONGEST_EXTENSIONS - spz.RECORD.size]
    extension = spz.RECORD.pack(COMMENTS, len(comments)) + comments if comments else b""
    flags = (spz.ANTIALIASED if info.render_mode == "mip" else 0) | (spz.EXTENSIONS if extension else 0)
    start = HEADER.size + len(extension)
    head = (spz.MAGIC, VERSION, len(gaussians), gaussians.sh_degree, bits, flags, len(streams), start)
    stream.write(HEADER.pack(*head) + extension)
    for packed, size in streams:
        stream.write(_SIZES.pack(len(packed), size))
    for packed, _ in streams:
        stream.write(packed)


def read_comments(path: Path) -> list[str]:
    """Returns the comments of a file; raises EOFError or SplatFileError if it is of another kind."""
    with path.open("rb") as stream:
        return _comments(_read_container(path, stream)[1])


def _comments(extensions: list[tuple[int, bytes]]) -> list[str]:
    return [
        line for kind, text in extensions if kind == COMMENTS for line in text.decode("utf-8", "replace").split("\n")
    ]


def _read_container(
    path: Path, stream: BufferedIOBase
) -> tuple[spz.SpzHeader, list[tuple[int, bytes]], list[tuple[int, int]]]:
    """Returns the header, the extensions, and the compressed size and the size of each stream.

    Reads up to the first stream, and checks that everything adds up to the size of the file.
    """
    size = path.stat().st_size
    head = stream.read(HEADER.size)
    if len(head) < HEADER.size or head[:4] != spz.MAGIC:
        raise EOFError("its header is incomplete")
    _, version, count, degree, bits, flags, stream_count, table_start = HEADER.unpack(head)
    if version != VERSION:
        raise spz.other_version(path, version)
    header = spz.SpzHeader(version, count, degree, bits, flags)
    header.require_possible(path)
    if count > size * _HIGHEST_RATIO // _BYTES_OF_POSITION:
        raise EOFError(f"{size} bytes cannot hold the {count} Gaussians of its header")
    sizes = [width * count for width in header.widths if width * count]
    if stream_count != len(sizes):
        raise EOFError(f"it has {stream_count} streams where its Gaussians need {len(sizes)}")
    if not HEADER.size <= table_start <= min(size, HEADER.size + _LONGEST_EXTENSIONS):
        raise EOFError(f"its table of streams begins at byte {table_start} of {size}")
    between = stream.read(table_start - HEADER.size)
    extensions = spz.read_extensions(between) if flags & spz.EXTENSIONS else []
    spz.require_known_axes(path, [kind for kind, _ in extensions])
    table = stream.read(stream_count * _SIZES.size)
    if len(table) < stream_count * _SIZES.size:
        raise EOFError("its table of streams is incomplete")
    streams = list(_SIZES.iter_unpack(table))
    if [unpacked for _, unpacked in streams] != sizes:
        raise EOFError(f"its streams are not of the sizes that {count} Gaussians of SH degree {degree} need")
    end = table_start + len(table) + sum(packed for packed, _ in streams)
    if end != size:
        raise EOFError(f"its streams end at byte {end} of {size}")
    return header, extensions, streams


def _unpack_stream(stream: BufferedIOBase, packed: int, size: int) -> bytes:
    """Unpacks a stream into no more memory than it should need, whatever its frames claim."""
    frames = zstandard.ZstdDecompressor().stream_reader(stream.read(packed), read_across_frames=True)
    values = frames.read(size + 1)
    if len(values) != size:
        raise EOFError(f"a stream has not the {size} bytes that it should have")
    return values
