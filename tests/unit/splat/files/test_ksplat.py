"""``.ksplat``: files worked out from the layout of the reference, and files that lie."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import SplatInfo, convert_splats, read_splats
from f3rm_ext.splat.files.convert import rotation_differences
from f3rm_ext.splat.gaussians import Gaussians

Make = Callable[..., Gaussians]
SIDE, GREATEST = 5.0, 32767


def file_header(
    count: int,
    level: int,
    sections: int = 1,
    limits: tuple[float, float] = (0.0, 0.0),
    version: tuple[int, int] = (0, 1),
) -> bytes:
    data = bytearray(4096)
    data[0:2] = bytes(version)
    struct.pack_into("<IIIIH", data, 4, sections, sections, count, count, level)
    struct.pack_into("<5f", data, 24, 0, 0, 0, *limits)
    return bytes(data)


def section_header(
    count: int, degree: int, bucket_count: int = 0, full: int = 0, others: int = 0, width: int = 12
) -> bytes:
    data = bytearray(1024)
    struct.pack_into("<IIII", data, 0, count, count, bucket_count, full + others)
    struct.pack_into("<fH", data, 16, SIDE, width)
    struct.pack_into("<I", data, 24, 0)  # the default
    struct.pack_into("<II", data, 32, full, others)
    struct.pack_into("<H", data, 40, degree)
    return bytes(data)


def sh_bytes(rest: np.ndarray, level: int, limits: tuple[float, float]) -> bytes:
    """Degree by degree, colour by colour."""
    values = np.concatenate([rest[:3].T.ravel(), rest[3:8].T.ravel()])
    if level == 2:
        return np.rint((values - limits[0]) / (limits[1] - limits[0]) * 255).clip(0, 255).astype("u1").tobytes()
    return values.astype("<f4" if level == 0 else "<f2").tobytes()


def section(
    gaussians: Gaussians, level: int, limits: tuple[float, float], bucket_count: int = 16
) -> tuple[bytes, bytes]:
    """Header and data of a section; its Gaussians are in the order of the buckets, which lie around the first."""
    count, real = len(gaussians), "<f4" if level == 0 else "<f2"
    means, quats = gaussians.means.numpy(), torch.nn.functional.normalize(gaussians.quats, dim=1).numpy()
    rows, middles = [], []
    for i in range(count):
        if i % bucket_count == 0:
            middles.append(means[i] + 0.25)
        offset = np.rint((means[i] - middles[-1]) / (SIDE / 2 / GREATEST)) + GREATEST
        color = np.rint((gaussians.features_dc[i].numpy() * 0.28209479177387814 + 0.5) * 255).clip(0, 255)
        rows.append(
            (means[i].astype("<f4") if level == 0 else offset.clip(0, 2 * GREATEST + 1).astype("<u2")).tobytes()
            + gaussians.sizes()[i].numpy().astype(real).tobytes()
            + quats[i].astype(real).tobytes()
            + bytes([*color.astype(int), round(float(gaussians.alphas()[i]) * 255)])
            + sh_bytes(gaussians.features_rest[i].numpy(), level, limits)
        )
    if level == 0:
        return section_header(count, gaussians.sh_degree), b"".join(rows)
    full, rest = divmod(count, bucket_count)
    lengths = [rest] if rest else []
    data = struct.pack(f"<{len(lengths)}I", *lengths) + np.array(middles, "<f4").tobytes() + b"".join(rows)
    return section_header(count, gaussians.sh_degree, bucket_count, full, len(lengths)), data


def ksplat(parts: list[Gaussians], level: int, limits: tuple[float, float] = (0.0, 0.0)) -> bytes:
    used = limits if any(limits) else (-1.5, 1.5)
    made = [section(part, level, used) for part in parts]
    head = file_header(sum(map(len, parts)), level, len(parts), limits)
    return head + b"".join(header for header, _ in made) + b"".join(data for _, data in made)


@pytest.fixture
def near(make: Make) -> Callable[..., Gaussians]:
    """Gaussians that lie within the side of a bucket."""

    def made(count: int, degree: int, seed: int = 0) -> Gaussians:
        gaussians = make(count, degree, seed)
        gaussians.means = gaussians.means.clamp(-1, 1)
        return gaussians

    return made


@pytest.mark.parametrize("limits", [(0.0, 0.0), (-0.9, 0.8)])
@pytest.mark.parametrize("degree", [0, 1, 2])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_level_and_degree(
    level: int, degree: int, limits: tuple[float, float], near: Callable[..., Gaussians], tmp_path: Path
) -> None:
    gaussians = near(40, degree)
    (tmp_path / "a.ksplat").write_bytes(ksplat([gaussians], level, limits))
    found, info = read_splats(tmp_path / "a.ksplat")
    assert info == SplatInfo("ksplat", None, None, degree, 40)
    exact = level == 0
    assert ((found.means - gaussians.means).abs() <= (1e-6 if exact else SIDE / 4 / GREATEST + 1e-6)).all()
    assert ((found.scales - gaussians.scales).abs() <= (1e-5 if exact else 2e-3)).all()
    assert rotation_differences(gaussians.quats, found.quats).max() < (1e-3 if exact else 0.1)
    assert ((found.alphas() - gaussians.alphas()).abs() <= 0.5 / 255 + 1e-6).all()
    colors = gaussians.features_dc.clamp(-0.5 / 0.2820948, 0.5 / 0.2820948)
    assert ((found.features_dc - colors).abs() <= 0.5 / 255 / 0.2820948 + 1e-5).all()
    low, high = (limits if any(limits) else (-1.5, 1.5)) if level == 2 else (-99, 99)
    change = (found.features_rest - gaussians.features_rest.clamp(low, high)).abs()
    assert (change <= (0, 1e-3, (high - low) / 510 + 1e-5)[level]).all()


def test_sections_of_different_degrees(near: Callable[..., Gaussians], tmp_path: Path) -> None:
    parts = [near(20, 1), near(33, 2, 1)]
    (tmp_path / "a.ksplat").write_bytes(ksplat(parts, 1) + b"more")
    found, info = read_splats(tmp_path / "a.ksplat")
    assert (info.count, info.sh_degree) == (53, 2) and "4 bytes" in info.notices[0]
    torch.testing.assert_close(found.means, torch.cat([part.means for part in parts]), rtol=0, atol=1e-4)
    assert (found.features_rest[:20, 3:] == 0).all() and (found.features_rest[20:, 3:] != 0).any()


def test_sizes_of_nothing_are_tiny(near: Callable[..., Gaussians], tmp_path: Path) -> None:
    gaussians = near(3, 0)
    gaussians.scales[1, 2] = -30.0  # 0 in float16
    (tmp_path / "a.ksplat").write_bytes(ksplat([gaussians], 1))
    assert -20 < read_splats(tmp_path / "a.ksplat")[0].scales[1, 2] < -15


def test_converted_to_what_is_written(near: Callable[..., Gaussians], tmp_path: Path) -> None:
    (tmp_path / "a.ksplat").write_bytes(ksplat([near(30, 2)], 2))
    made = convert_splats(tmp_path / "a.ksplat", tmp_path / "b.ply")
    assert made.lost == [] and made.source.format == "ksplat" and len(read_splats(tmp_path / "b.ply")[0]) == 30
    with pytest.raises(SplatFileError, match=r"b\.ksplat"):
        convert_splats(tmp_path / "b.ply", tmp_path / "b.ksplat")


ROW = bytes(24)
LIES = {
    "header": (file_header(1, 0)[:-1], "header is incomplete"),
    "version": (file_header(1, 0, version=(0, 2)), r"version 0\.2"),
    "level": (file_header(1, 3), "level 3"),
    "sections": (file_header(1, 0, sections=2**31), "2147483648 sections"),
    "no sections": (file_header(0, 0, sections=0), "no sections"),
    "sum": (file_header(3, 0) + section_header(2, 0) + bytes(200), "3 Gaussians of its header"),
    "count": (file_header(2**32 - 1, 0) + section_header(2**32 - 1, 0) + bytes(44), "it has 5164"),
    "cut": (file_header(1, 0) + section_header(1, 0) + bytes(43), "take 5164 bytes"),
    "degree": (file_header(1, 0) + section_header(1, 3) + bytes(999), "SH degree 3"),
    "buckets": (file_header(1, 1) + section_header(1, 0, 9, 0, 2**31) + ROW, "sections take"),
    "bucket width": (file_header(1, 1) + section_header(1, 0, 9, 0, 1, width=16) + ROW, "take 16 bytes"),
    "bucket sum": (
        file_header(1, 1) + section_header(1, 0, 9, 0, 1) + struct.pack("<I3f", 2, 0, 0, 0) + ROW,
        "hold 2 of the 1",
    ),
    "full buckets": (file_header(1, 1) + section_header(1, 0, 9, 1, 0) + bytes(12) + ROW, "hold 9 of the 1"),
}


@pytest.mark.parametrize("what", LIES)
def test_files_that_cannot_be_read(what: str, assert_refused: Callable[..., None]) -> None:
    assert_refused("a.ksplat", *LIES[what])
