"""Compressed PLY: bytes worked out by hand, and how far values may be off after a round trip."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import SplatInfo, packing, read_splats, write_splats
from f3rm_ext.splat.files.convert import rotation_differences
from f3rm_ext.splat.gaussians import SH_C0, Gaussians

Make = Callable[..., Gaussians]
NAME = "a.compressed.ply"
AXES = [f"{end}_{axis}" for end in ("min", "max") for axis in "xyz"]
SCALES = [f"{end}_scale_{axis}" for end in ("min", "max") for axis in "xyz"]
COLORS = [f"{end}_{axis}" for end in ("min", "max") for axis in "rgb"]
PACKED = ["packed_position", "packed_rotation", "packed_scale", "packed_color"]
BOUNDS = [-1.0, 0.0, 2.0, 1.0, 4.0, 2.0, -8.0, -6.0, -5.0, -4.0, -2.0, -5.0, 0.0, -1.0, 0.25, 1.0, 2.0, 0.75]
POSITION = 2047 << 21 | 0 << 11 | 1023  # x at its greatest, y at its least; z has only one value
ROTATION = 3 << 30 | 1023 << 20 | 512 << 10 | 256  # z is the largest; then w, x and y
SCALE = 0 << 21 | 1023 << 11 | 0
COLOR = 255 << 24 | 0 << 16 | 51 << 8 | 204


def file_of(
    path: Path, chunk: list[str], bounds: list[float], sh: bytes = b"", vertices: int = 1, chunks: int = 1
) -> Path:
    """A file made byte by byte, all Gaussians alike."""
    text = ["ply", "format binary_little_endian 1.0", "comment SplatRenderMode: mip", f"element chunk {chunks}"]
    text += [f"property float {name}" for name in chunk]
    text += [f"element vertex {vertices}", *(f"property uint {name}" for name in PACKED)]
    if sh:
        text += [f"element sh {vertices}", *(f"property uchar f_rest_{i}" for i in range(len(sh)))]
    data = struct.pack(f"<{len(bounds)}f", *bounds) * chunks
    data += struct.pack("<4I", POSITION, ROTATION, SCALE, COLOR) * vertices + sh * vertices
    path.write_bytes(("\n".join([*text, "end_header"]) + "\n").encode() + data)
    return path


def test_bytes_that_are_read(tmp_path: Path) -> None:
    sh = bytes([0, 255, 128, 1, 127, 64, 192, 129, 254])
    gaussians, info = read_splats(file_of(tmp_path / "a.ply", AXES + SCALES + COLORS, BOUNDS, sh))
    assert info == SplatInfo("compressed-ply", "mip", None, 1, 1)
    assert gaussians.means.tolist() == [[1.0, 0.0, 2.0]]
    assert gaussians.scales.tolist() == [[-8.0, -2.0, -5.0]]
    w, x, y = 0.5 * 2**0.5, (512 / 1023 - 0.5) * 2**0.5, (256 / 1023 - 0.5) * 2**0.5
    z = max(0.0, 1 - w * w - x * x - y * y) ** 0.5
    torch.testing.assert_close(gaussians.quats, torch.tensor([[w, x, y, z]]), rtol=0, atol=1e-6)
    colors = gaussians.features_dc[0] * SH_C0 + 0.5
    torch.testing.assert_close(colors, torch.tensor([1.0, -1.0, 0.25 + 0.5 / 5]), rtol=0, atol=1e-6)
    torch.testing.assert_close(gaussians.alphas(), torch.tensor([0.8]), rtol=0, atol=1e-6)
    # red is f_rest_0 to f_rest_2: the ends of the range are exact, other levels are read at their centre
    wanted = [[-4.0, 4.0, 0.5 / 32], [-4 + 1.5 / 32, -0.5 / 32, -2 + 0.5 / 32], [2 + 0.5 / 32, 1.5 / 32, 4 - 1.5 / 32]]
    assert gaussians.features_rest[0].T.tolist() == wanted


def test_colors_without_bounds(tmp_path: Path) -> None:
    gaussians, _ = read_splats(file_of(tmp_path / "a.ply", AXES + SCALES, BOUNDS[:12]))
    colors = gaussians.features_dc[0] * SH_C0 + 0.5
    torch.testing.assert_close(colors, torch.tensor([1.0, 0.0, 0.2]), rtol=0, atol=1e-6)


def test_bytes_that_are_written(tmp_path: Path) -> None:
    """Of two Gaussians, one at each end of all bounds."""
    dc = (torch.tensor([[0.0, 0.25, 1.0], [1.0, 0.75, 1.0]]) - 0.5) / SH_C0
    gaussians = Gaussians(
        means=torch.tensor([[-1.0, 4.0, 2.0], [1.0, 0.0, 2.0]]),
        scales=torch.tensor([[-8.0, -2.0, -5.0], [-4.0, -6.0, -5.0]]),
        quats=torch.tensor([[0.0, 0.0, -3.0, 0.0], [1.0, -1.0, 0.0, 0.0]]),
        opacities=torch.tensor([[float("-20")], [20.0]]),
        features_dc=dc,
        features_rest=torch.tensor([[[-9.0, 0.0, 0.01]] * 3, [[9.0, -0.01, 3.99]] * 3]),
    )
    write_splats(tmp_path / NAME, gaussians, SplatInfo(render_mode="mip"))
    data = (tmp_path / NAME).read_bytes().partition(b"end_header\n")[2]
    bounds = [-1, 0, 2, 1, 4, 2, -8, -6, -5, -4, -2, -5, 0, 0.25, 1, 1, 0.75, 1]
    assert struct.unpack("<18f", data[:72]) == pytest.approx(bounds, abs=1e-6)
    # y has turned its sign, so that the largest is positive; the others are 0, in the middle
    first = (1023 << 11, 2 << 30 | 512 << 20 | 512 << 10 | 512, 1023 << 11, 0 << 24 | 0 << 16 | 0 << 8 | 0)
    # of two that are as large, the first counts
    second = (2047 << 21, 0 << 30 | 0 << 20 | 512 << 10 | 512, 2047 << 21, 255 << 24 | 255 << 16 | 0 << 8 | 255)
    found = [struct.unpack("<4I", data[72 + 16 * i : 88 + 16 * i]) for i in range(2)]
    assert sorted(found) == sorted([first, second])
    order = [0, 1] if found == [first, second] else [1, 0]
    levels = [bytes([0] * 3 + [128] * 3 + [128] * 3), bytes([255] * 3 + [127] * 3 + [255] * 3)]
    assert data[104:] == levels[order[0]] + levels[order[1]]


@pytest.mark.parametrize(("count", "degree"), [(1, 0), (256, 1), (257, 2), (1000, 3)])
def test_round_trip_is_within_half_a_step(count: int, degree: int, make: Make, tmp_path: Path) -> None:
    gaussians = make(count, degree)
    gaussians.features_rest = gaussians.features_rest.clamp(-0.9, 0.9)
    gaussians = gaussians[packing.morton_order(gaussians)]
    write_splats(tmp_path / NAME, gaussians, SplatInfo())
    found, info = read_splats(tmp_path / NAME)
    assert (info.format, info.count, info.sh_degree) == ("compressed-ply", count, degree)
    steps = torch.tensor([2047, 1023, 2047])
    for start in range(0, count, 256):
        ours, theirs = gaussians[start : start + 256], found[start : start + 256]
        for name in ("means", "scales"):
            values = ours.tensors()[name]
            step = (values.amax(0) - values.amin(0)) / steps
            assert ((theirs.tensors()[name] - values).abs() <= step / 2 + 2e-6).all(), name
        span = (ours.features_dc.amax(0) - ours.features_dc.amin(0)) / 255
        assert ((theirs.features_dc - ours.features_dc).abs() <= span / 2 + 2e-6).all()
    assert ((found.alphas() - gaussians.alphas()).abs() <= 0.5 / 255 + 1e-6).all()
    assert ((found.features_rest - gaussians.features_rest).abs() <= 1 / 64 + 1e-6).all()
    assert rotation_differences(gaussians.quats, found.quats).max() < 0.25


def test_neighbours_share_a_chunk(make: Make, tmp_path: Path) -> None:
    """Without an order, each chunk would span the scene and positions would be off by 1/2047 of it."""
    gaussians = make(5000, 0)
    gaussians.means = torch.rand(5000, 3, generator=torch.Generator().manual_seed(1))
    write_splats(tmp_path / NAME, gaussians, SplatInfo())
    found, _ = read_splats(tmp_path / NAME)
    spans = torch.stack([chunk.amax(0) - chunk.amin(0) for chunk in found.means.split(256)])
    assert spans.prod(dim=1).median() < 0.25


def test_no_element_without_properties(make: Make, tmp_path: Path) -> None:
    """Without SH there is no element for them, or other readers would refuse the file; but gsplat writes one."""
    write_splats(tmp_path / NAME, make(degree=0), SplatInfo())
    data = (tmp_path / NAME).read_bytes()
    assert b"element sh" not in data
    (tmp_path / "b.ply").write_bytes(data.replace(b"end_header", b"element sh 40\nend_header"))
    ours, theirs = read_splats(tmp_path / NAME)[0], read_splats(tmp_path / "b.ply")[0]
    assert torch.equal(ours.means, theirs.means) and theirs.sh_degree == 0


def test_layouts_that_are_not_known(assert_refused: Callable[..., None], tmp_path: Path) -> None:
    chunk, path = AXES + SCALES + COLORS, tmp_path / "a.ply"
    for names, message in ((chunk[1:], "lacks min_x"), (chunk[:-1], "lacks max_b")):
        with pytest.raises(SplatFileError, match=message):
            read_splats(file_of(path, names, BOUNDS[: len(names)]))
    for vertices, chunks in ((257, 1), (256, 2)):
        with pytest.raises(SplatFileError, match=f"{chunks} chunks.*{vertices} Gau"):
            read_splats(file_of(path, chunk, BOUNDS, vertices=vertices, chunks=chunks))
    with pytest.raises(SplatFileError, match="6 SH"):
        read_splats(file_of(path, chunk, BOUNDS, bytes(6)))
    whole, scale = file_of(path, chunk, BOUNDS, bytes(9)).read_bytes(), b"property uint packed_scale\n"
    for old, new, message in (
        (b"element sh 1", b"element sh 2", "1 chunks of 256 .* 2, .* 1 "),
        (b"property uint packed_color", b"property short packed_color", "packed_color"),
        (b"property uchar f_rest_3", b"property char f_rest_3", "f_rest_3"),
        (scale, b"", "lacks packed_scale"),
    ):
        assert_refused("a.ply", whole.replace(old, new) + bytes(100), message)
    misplaced = whole.replace(scale, b"").replace(b"element vertex", scale + b"element vertex")
    assert_refused("a.ply", misplaced + bytes(100), "lacks packed_scale")
