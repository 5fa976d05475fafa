"""``.spz``: bytes worked out by hand, axes, and how far values may be off after a round trip."""

import gzip
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import SplatInfo, read_splats, write_splats
from f3rm_ext.splat.files.convert import rotation_differences
from f3rm_ext.splat.files.spz import COORDINATE_SYSTEM, SpzVersion, choose_fraction_bits, require_readable
from f3rm_ext.splat.gaussians import Gaussians

Make = Callable[..., Gaussians]
HALF = math.sqrt(0.5)
POSITION = bytes([0x00, 0x18, 0x00]) + bytes([0x00, 0xFC, 0xFF]) + bytes([0xFF, 0xFF, 0x7F])  # 6144, -1024, 2²³ - 1
ROTATION = 3 << 30 | (1 << 9 | 511) << 20 | 0 << 10 | 146  # w is the largest; x = -511, y = 0, z = 146
SH = bytes([192, 128, 0, 128, 160, 128, 129, 127, 255])


def header(version: int = 3, count: int = 1, degree: int = 1, bits: int = 12, flags: int = 1) -> bytes:
    return struct.pack("<4sIIBBBB", b"NGSP", version, count, degree, bits, flags, 0)


def body(rotation: bytes = struct.pack("<I", ROTATION)) -> bytes:
    """Position, opacity, colour, scale, rotation, SH of one Gaussian."""
    return POSITION + bytes([128]) + bytes([255, 0, 128]) + bytes([160, 0, 255]) + rotation + SH


def pressed(data: bytes) -> bytes:
    """The same bytes whatever the time: the cases below are named after them."""
    return gzip.compress(data, mtime=0)


def file_of(path: Path, data: bytes) -> Path:
    path.write_bytes(pressed(data))
    return path


def test_bytes_that_are_read(tmp_path: Path) -> None:
    gaussians, info = read_splats(file_of(tmp_path / "a.spz", header() + body()), spz_axes="ply")
    assert info == SplatInfo("spz", "mip", None, 1, 1, version=3)
    assert gaussians.means.tolist() == [[1.5, -0.25, (2**23 - 1) / 4096]]
    torch.testing.assert_close(gaussians.alphas(), torch.tensor([128 / 255]), rtol=0, atol=1e-6)
    assert gaussians.features_dc[0].tolist() == pytest.approx([0.5 / 0.15, -0.5 / 0.15, 0.5 / 255 / 0.15])
    assert gaussians.scales.tolist() == [[0.0, -10.0, 5.9375]]
    z = 146 / 511 * HALF
    wanted = [[math.sqrt(1 - 0.5 - z * z), -HALF, 0.0, z]]
    torch.testing.assert_close(gaussians.quats, torch.tensor(wanted), rtol=0, atol=1e-6)
    assert gaussians.features_rest[0].tolist() == [[0.5, 0, -1], [0, 0.25, 0], [1 / 128, -1 / 128, 127 / 128]]


def test_axes_of_the_format_are_turned_into_those_of_ply(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.spz", header() + body())
    ours, raw = read_splats(path)[0], read_splats(path, spz_axes="ply")[0]
    assert torch.equal(ours.means, raw.means * torch.tensor([1, -1, -1]))
    assert torch.equal(ours.quats, raw.quats * torch.tensor([1, 1, -1, -1]))
    # y and z of degree 1 turn their signs, x keeps it
    assert torch.equal(ours.features_rest, raw.features_rest * torch.tensor([-1, -1, 1])[:, None])


def test_version_2(tmp_path: Path) -> None:
    """Three bytes for a rotation: x, y and z, of which w follows."""
    rotation = bytes([255 - 51, 51, 128])
    path = file_of(tmp_path / "a.spz", header(version=2, flags=0) + body(rotation))
    gaussians, info = read_splats(path, spz_axes="ply")
    x, y, z = 0.6, -0.6, 0.5 / 127.5
    wanted = [[math.sqrt(1 - x * x - y * y - z * z), x, y, z]]
    torch.testing.assert_close(gaussians.quats, torch.tensor(wanted), rtol=0, atol=1e-6)
    assert info.render_mode == "default" and gaussians.features_rest[0, 0, 0] == 0.5


def test_bytes_that_are_written(tmp_path: Path) -> None:
    w = math.sqrt(1 - 0.5**2 - 0.3**2)
    gaussians = Gaussians(
        means=torch.tensor([[1.5, 0.25, -2000.0]]),  # 2000 leaves 12 bits behind the point
        scales=torch.tensor([[0.03, -999.0, 99.0]]),
        quats=-2 * torch.tensor([[w, -0.5, 0.0, -0.3]]),
        opacities=torch.tensor([[math.log(128 / 127)]]),
        features_dc=torch.tensor([[9.0, -9.0, 0.01]]),
        features_rest=torch.tensor([[[-0.5, 0.0, 2.0], [0.0, -0.25, 0.03], [0.04, -0.04, 0.99]]]),
    )
    info = SplatInfo(render_mode="mip", filters_fused=True, comments=("made_by: us",))
    write_splats(tmp_path / "a.spz", gaussians, info)
    data = gzip.decompress((tmp_path / "a.spz").read_bytes())
    # w is the largest and becomes positive; turned about x, z is positive too; 361 = 0.5 / √½ · 511, 217 of 0.3
    rotation = 3 << 30 | (1 << 9 | 361) << 20 | 0 << 10 | 217
    assert data == b"".join(
        [
            header(),
            POSITION[:6] + (2000 * 4096).to_bytes(3, "little"),
            bytes([128, 255, 0, 128, 160, 0, 255]),
            struct.pack("<I", rotation),
            # of degree 1: in steps of 8, and those of y and z with the other sign
            bytes([192, 128, 0, 128, 160, 128, 136, 120, 255]),
        ]
    )


@pytest.mark.parametrize(("count", "degree"), [(1, 0), (300, 1), (300, 2), (300, 3)])
def test_round_trip_is_within_half_a_step(count: int, degree: int, make: Make, tmp_path: Path) -> None:
    gaussians = make(count, degree)
    gaussians.features_rest = gaussians.features_rest.clamp(-0.9, 0.9)
    write_splats(tmp_path / "a.spz", gaussians, SplatInfo(render_mode="default"))
    found, info = read_splats(tmp_path / "a.spz")
    assert info == SplatInfo("spz", "default", None, degree, count, version=3)
    assert ((found.means - gaussians.means).abs() <= 0.5 ** choose_fraction_bits(gaussians) / 2 + 1e-6).all()
    assert ((found.scales - gaussians.scales).abs() <= 1 / 32 + 1e-6).all()
    assert ((found.alphas() - gaussians.alphas()).abs() <= 0.5 / 255 + 1e-6).all()
    assert ((found.features_dc - gaussians.features_dc).abs() <= 0.5 / 255 / 0.15 + 1e-6).all()
    change = (found.features_rest - gaussians.features_rest).abs()
    assert (change[:, :3] <= 4.5 / 128 + 1e-6).all() and (change[:, 3:] <= 8.5 / 128 + 1e-6).all()
    assert rotation_differences(gaussians.quats, found.quats).max() < 0.25


def test_a_turned_scene_looks_the_same_from_a_turned_direction(make: Make, tmp_path: Path) -> None:
    """Shape and colour, evaluated with gsplat's formulas: turned Gaussians are the same ones in other axes."""
    gsplat = pytest.importorskip("gsplat.cuda._torch_impl")
    write_splats(tmp_path / "a.spz", make(50), SplatInfo())
    ply, rub = read_splats(tmp_path / "a.spz")[0], read_splats(tmp_path / "a.spz", spz_axes="ply")[0]
    turn = torch.diag(torch.tensor([1.0, -1.0, -1.0]))

    def covariances(gaussians: Gaussians) -> torch.Tensor:
        halves = gaussians.rotations() * gaussians.sizes()[:, None, :]
        return halves @ halves.transpose(1, 2)

    torch.testing.assert_close(covariances(rub), turn @ covariances(ply) @ turn.T)

    def colors(gaussians: Gaussians, directions: torch.Tensor) -> torch.Tensor:
        coefficients = torch.cat([gaussians.features_dc[:, None], gaussians.features_rest], dim=1)
        return gsplat._spherical_harmonics(3, directions, coefficients)

    directions = torch.nn.functional.normalize(torch.randn(50, 3, generator=torch.Generator().manual_seed(1)), dim=1)
    torch.testing.assert_close(colors(rub, directions @ turn.T), colors(ply, directions), rtol=0, atol=1e-5)
    assert (colors(rub, directions) - colors(ply, directions)).abs().max() > 0.1


def test_tags_and_origin_are_in_the_comment_of_the_stream(make: Make, tmp_path: Path) -> None:
    info = SplatInfo(render_mode="mip", filters_fused=True, comments=("made_by: us", "scene: caf\u00e9\0"))
    write_splats(tmp_path / "a.spz", make(5), info)
    found = read_splats(tmp_path / "a.spz")[1]
    assert (found.render_mode, found.filters_fused) == ("mip", True)
    assert found.comments == ("made_by: us", r"scene: caf\xe9 ")


@pytest.mark.parametrize(
    ("largest", "bits"), [(0.0, 23), (1e-9, 23), (0.99, 23), (1.0, 22), (3.9, 21), (2047.9, 12), (2.0**23 - 1, 0)]
)
def test_bits_behind_the_point_that_the_largest_coordinate_leaves(make: Make, largest: float, bits: int) -> None:
    gaussians = make(5)
    gaussians.means[:] = torch.tensor([0.0, -largest, 0.0])
    gaussians.scales[:] = -30
    assert choose_fraction_bits(gaussians) == bits


@pytest.mark.parametrize("unit", [1e-3, 1.0, 37.0])
def test_no_more_bits_than_small_gaussians_need(make: Make, unit: float) -> None:
    gaussians = make(1000)
    gaussians.means[:] = gaussians.means.clamp(-3, 3) * unit
    gaussians.scales[:] = math.log(0.01 * unit)
    gaussians.opacities[:] = 2
    gaussians.scales[:5] -= 5  # few
    gaussians.opacities[5:300], gaussians.scales[5:300] = -20, -50  # invisible
    step = 2.0 ** -choose_fraction_bits(gaussians)
    assert 0.01 * unit / 16 < step <= 0.01 * unit / 8
    gaussians.scales[300:320] -= math.log(8)
    assert 2.0 ** -choose_fraction_bits(gaussians) == step / 8


@pytest.mark.parametrize("version", [3, 4])
def test_positions_are_rounded_to_what_is_needed(make: Make, tmp_path: Path, version: SpzVersion) -> None:
    gaussians, path = make(500), tmp_path / "a.spz"
    gaussians.scales[:] = -2
    write_splats(path, gaussians, SplatInfo(), spz_version=version)
    moved = (read_splats(path)[0].means - gaussians.means).abs().max()
    assert math.exp(-2) / 64 < moved <= math.exp(-2) / 16


def test_too_far_out(make: Make, tmp_path: Path) -> None:
    gaussians = make(5)
    gaussians.means[0, 0] = 2**24
    with pytest.raises(SplatFileError, match=r"1.68e\+07, .*8388607"):
        write_splats(tmp_path / "a.spz", gaussians, SplatInfo())
    assert not list(tmp_path.iterdir())


def test_more_gaussians_than_readers_accept(make: Make, tmp_path: Path) -> None:
    tensors = {name: value.expand(10_000_001, *value.shape[1:]) for name, value in make(1, 0).tensors().items()}
    with pytest.raises(SplatFileError, match=r"a\.spz.*10000001.*10000000\D.*\.ply"):
        write_splats(tmp_path / "a.spz", Gaussians.from_tensors(tensors), SplatInfo())
    assert not list(tmp_path.iterdir())
    require_readable(tmp_path / "a.spz", 10_000_000)


@pytest.mark.parametrize("what", ["extensions", "bytes after its last Gaussian"])
def test_more_than_the_gaussians(what: str, tmp_path: Path) -> None:
    flags = 3 if what == "extensions" else 1
    info = read_splats(file_of(tmp_path / "a.spz", header(flags=flags) + body() + b"more"))[1]
    assert info.notices == (f"a.spz has {what}, which are left out.",) and info.render_mode == "mip"


def test_flags_that_nobody_defined_are_told(tmp_path: Path) -> None:
    (notice,) = read_splats(file_of(tmp_path / "a.spz", header(flags=0x81) + body()))[1].notices
    assert "a.spz" in notice and "0x80" in notice


OTHER_AXES = struct.pack("<II4s", 0x12340001, 4, b"anyt") + struct.pack("<III", COORDINATE_SYSTEM, 4, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pressed(b"hello"), "no .spz file"),
        (pressed(b"NGSP"), "no .spz file"),
        (pressed(header(version=1) + body()), "version 1 .*2 to 4"),
        (b"NGSP" + (5).to_bytes(4, "little") + bytes(99), "version 5 .*2 to 4"),
        (pressed(header(degree=4) + body()), "degree 4"),
        (pressed(header() + body()[:-1]), "cut short .*its 1 Gaussians"),
        (pressed(header() + body())[:-1], "is cut short"),
        (pressed(header() + body())[:12], "is cut short"),
        (pressed(header(count=4_000_000_000)), "4000000000 Gaussians"),
        (pressed(header(count=180_000_000) + random.Random(0).randbytes(5_000_000)), "180000000 Gaussians"),
        (pressed(header(bits=255) + body()), "255 fraction bits"),
        (pressed(header() + body())[:-8] + bytes(8), "damaged .*CRC"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\0" + bytes([255] * 99), "is damaged"),
        (pressed(header(count=0)), "no Gaussians"),
        (pressed(header(flags=2) + body() + OTHER_AXES), "SPZ_ADOBE_coordinate_system"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_files_that_cannot_be_read(data: bytes, message: str, assert_refused: Callable[..., None]) -> None:
    assert_refused("a.spz", data, message)
