"""``.spz`` version 4: the container, and files that lie. The values are those of version 3."""

import gzip
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import SplatInfo, convert_splats, read_splats, write_splats
from f3rm_ext.splat.files.spz import COORDINATE_SYSTEM
from f3rm_ext.splat.files.spz4 import COMMENTS
from f3rm_ext.splat.gaussians import Gaussians

Make = Callable[..., Gaussians]
VALUES = (
    bytes([0x00, 0x18, 0x00, 0x00, 0xFC, 0xFF, 0xFF, 0xFF, 0x7F]),
    bytes([128]),
    bytes([255, 0, 128]),
    bytes([160, 0, 255]),
    struct.pack("<I", 3 << 30 | 146),
    bytes([192, 128, 0, 128, 160, 128, 129, 127, 255]),
)
"""Position, opacity, colour, scale, rotation, SH of one Gaussian."""


def packed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def spz4(
    frames: list[bytes] | None = None,
    sizes: list[tuple[int, int]] | None = None,
    count: int = 1,
    degree: int = 1,
    bits: int = 12,
    flags: int = 0,
    streams: int | None = None,
    table: int | None = None,
    extensions: bytes = b"",
    version: int = 4,
) -> bytes:
    """A file of one Gaussian, or of lies."""
    frames = [packed(value) for value in VALUES] if frames is None else frames
    sizes = [(len(frame), len(value)) for frame, value in zip(frames, VALUES, strict=False)] if sizes is None else sizes
    number = len(frames) if streams is None else streams
    start = 32 + len(extensions) if table is None else table
    head = struct.pack("<4sIIBBBBI12x", b"NGSP", version, count, degree, bits, flags, number, start)
    return head + extensions + b"".join(struct.pack("<QQ", *pair) for pair in sizes) + b"".join(frames)


def record(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content


def test_bytes_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.spz").write_bytes(spz4(flags=1))
    gaussians, info = read_splats(tmp_path / "a.spz", spz_axes="ply")
    assert info == SplatInfo("spz", "mip", None, 1, 1, version=4)
    assert gaussians.means.tolist() == [[1.5, -0.25, (2**23 - 1) / 4096]]
    assert gaussians.scales.tolist() == [[0.0, -10.0, 5.9375]]
    z = 146 / 511 * math.sqrt(0.5)
    torch.testing.assert_close(gaussians.quats, torch.tensor([[math.sqrt(1 - z * z), 0.0, 0.0, z]]))
    assert gaussians.features_rest[0].tolist() == [[0.5, 0, -1], [0, 0.25, 0], [1 / 128, -1 / 128, 127 / 128]]


def test_bytes_that_are_written(make: Make, tmp_path: Path) -> None:
    """Streams and header as the specification has them; their values are those of version 3."""
    info = SplatInfo(render_mode="mip", filters_fused=True, comments=("made_by: us", "scene: café"))
    write_splats(tmp_path / "4.spz", make(300, 2), info, spz_version=4)
    write_splats(tmp_path / "3.spz", make(300, 2), info)
    data, old = (tmp_path / "4.spz").read_bytes(), gzip.decompress((tmp_path / "3.spz").read_bytes())
    magic, version, *same, streams, start, rest = struct.unpack("<4sIIBBBBI12s", data[:32])
    assert (magic, version, streams, rest) == (b"NGSP", 4, 6, bytes(12))
    assert struct.pack("<IBBB", *same[:3], same[3] & 1) == old[8:15] and same[3] == 3
    assert struct.unpack("<II", data[32:40]) == (COMMENTS, start - 40)
    table = [struct.unpack_from("<QQ", data, start + 16 * i) for i in range(streams)]
    assert [size for _, size in table] == [300 * width for width in (9, 1, 3, 3, 4, 24)]
    at, values = start + 16 * streams, b""
    for length, size in table:
        values += zstandard.ZstdDecompressor().decompress(data[at : at + length], size)
        at += length
    assert at == len(data) and values == old[16:]
    found = read_splats(tmp_path / "4.spz")[1]
    assert write_splats(tmp_path / "a.ply", make(9), found).version is None and found.version == 4
    assert (found.render_mode, found.filters_fused) == ("mip", True)
    assert found.comments == ("made_by: us", "scene: café") and found.notices == ()


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize("axes", ["rub", "ply"])
def test_versions_hold_the_same_values(degree: int, axes: Any, make: Make, assert_same: Any, tmp_path: Path) -> None:
    for version in (3, 4):
        write_splats(tmp_path / f"{version}.spz", make(300, degree), SplatInfo(), spz_axes=axes, spz_version=version)  # type: ignore[arg-type]
    assert_same(read_splats(tmp_path / "4.spz", spz_axes=axes)[0], read_splats(tmp_path / "3.spz", spz_axes=axes)[0])


def test_own_files_are_replaced_and_converted(make: Make, tmp_path: Path) -> None:
    write_splats(tmp_path / "a.ply", make(), SplatInfo())
    for _ in range(2):
        convert_splats(tmp_path / "a.ply", tmp_path / "b.spz", spz_version=4)
    made = convert_splats(tmp_path / "b.spz", tmp_path / "c.spz")
    assert (made.source.version, made.result.version) == (4, 3) and made.lost == []
    assert "converted_from: b.spz (spz version 4)" in made.result.comments
    (tmp_path / "b.spz").write_bytes(spz4())
    with pytest.raises(Exception, match=r"b\.spz"):
        convert_splats(tmp_path / "a.ply", tmp_path / "b.spz", spz_version=4)
    with pytest.raises(SplatFileError, match=r"--spz-version.*d\.ply"):
        convert_splats(tmp_path / "a.ply", tmp_path / "d.ply", spz_version=4)


def test_extensions_are_skipped_and_told(tmp_path: Path) -> None:
    extensions = record(0xADBE0002, bytes(12)) + record(COMMENTS, b"scene: x")
    (tmp_path / "a.spz").write_bytes(spz4(flags=0x82, extensions=extensions))
    info = read_splats(tmp_path / "a.spz")[1]
    assert "0x80" in info.notices[0] and "0xadbe0002" in info.notices[1] and info.comments == ("scene: x",)


FRAMES = [packed(value) for value in VALUES]
PAIRS = [(len(frame), len(value)) for frame, value in zip(FRAMES, VALUES, strict=True)]
BOMB, SHORT = packed(bytes(50_000_000)), packed(b"12345678")
LIES = {
    "cut in the header": (spz4()[:31], "header is incomplete"),
    "cut in the table": (spz4()[:100], "table of streams is incomplete"),
    "cut in the streams": (spz4()[:-1], "streams end at byte"),
    "more at the end": (spz4() + b"x", "streams end at byte"),
    "version": (spz4(version=5), "version 5"),
    "degree": (spz4(degree=4), "degree 4"),
    "fraction bits": (spz4(bits=24), "24 fraction bits"),
    "count beyond memory": (spz4(count=4_000_000_000), "4000000000 Gaussians"),
    "count beyond the size": (spz4(count=1_000_000), "cannot hold the 1000000"),
    "count": (spz4(count=2), "sizes that 2 Gaussians"),
    "no Gaussians": (spz4(count=0, frames=[]), "no Gaussians"),
    "streams": (spz4(streams=5), "5 streams"),
    "streams without SH": (spz4(degree=0), "6 streams"),
    "table before the header's end": (spz4(table=31), "byte 31"),
    "table behind the end": (spz4(table=10_000), "byte 10000"),
    "sizes in the table": (spz4(sizes=[*PAIRS[:5], (PAIRS[5][0], 10)]), "sizes that 1 Gaussians"),
    "axes": (spz4(flags=2, extensions=record(COORDINATE_SYSTEM, bytes(4))), "SPZ_ADOBE_coordinate_system"),
    "a bomb": (spz4([BOMB, *FRAMES[1:]], [(len(BOMB), 9), *PAIRS[1:]]), "not the 9 bytes"),
    "too little": (spz4([SHORT, *FRAMES[1:]], [(len(SHORT), 9), *PAIRS[1:]]), "not the 9 bytes"),
    "no zstd": (spz4([b"123456789", *FRAMES[1:]], [(9, 9), *PAIRS[1:]]), "damaged"),
}
"""Files that cannot be read, and a part of what is said of them."""


@pytest.mark.parametrize("what", LIES)
def test_files_that_cannot_be_read(what: str, assert_refused: Callable[..., None]) -> None:
    assert_refused("a.spz", *LIES[what])
