"""``.splat``: bytes worked out by hand, and how far values may be off after a round trip."""

import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from f3rm_ext.splat.files import SplatInfo, packing, read_splats, write_splats
from f3rm_ext.splat.files.convert import rotation_differences
from f3rm_ext.splat.gaussians import SH_C0, Gaussians

Make = Callable[..., Gaussians]
RECORD = struct.pack("<6f8B", 1.5, -2.0, 0.25, 1.0, 0.5, 0.125, 255, 0, 51, 204, 192, 128, 64, 0)


def test_bytes_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.splat").write_bytes(RECORD * 2)
    gaussians, info = read_splats(tmp_path / "a.splat")
    assert info == SplatInfo("splat", None, None, 0, 2)
    assert gaussians.means.tolist() == [[1.5, -2.0, 0.25]] * 2
    torch.testing.assert_close(gaussians.scales[0], torch.tensor([0, -math.log(2), -math.log(8)]))
    assert gaussians.quats[1].tolist() == [0.5, 0.0, -0.5, -1.0]
    torch.testing.assert_close(gaussians.alphas(), torch.tensor([0.8, 0.8]), rtol=0, atol=1e-6)
    colors = gaussians.features_dc[0] * SH_C0 + 0.5
    torch.testing.assert_close(colors, torch.tensor([1.0, 0.0, 0.2]), rtol=0, atol=1e-6)
    assert gaussians.features_rest.shape == (2, 0, 3)


def test_bytes_that_are_written(tmp_path: Path) -> None:
    """The larger and more opaque one comes first; a quaternion of any length; colours are limited."""
    gaussians = Gaussians(
        means=torch.tensor([[0.0, 0.0, 0.0], [1.5, -2.0, 0.25]]),
        scales=torch.tensor([[-200.0, 0.0, 200.0], [0.0, -math.log(2), -math.log(8)]]),
        quats=torch.tensor([[-7.0, 0.0, 0.0, 0.0], [1.0, 0.0, -1.0, -math.sqrt(2)]]),
        opacities=torch.tensor([[-30.0], [math.log(4)]]),
        features_dc=(torch.tensor([[0.5, 0.5, 0.5], [1.5, -0.5, 0.2]]) - 0.5) / SH_C0,
        features_rest=torch.ones(2, 15, 3),
    )
    written = write_splats(tmp_path / "a.splat", gaussians, SplatInfo(render_mode="mip"))
    assert (written.sh_degree, written.count) == (0, 2)
    limits = torch.finfo(torch.float32)
    second = struct.pack("<6f8B", 0, 0, 0, limits.tiny, 1.0, limits.max, 128, 128, 128, 0, 0, 128, 128, 128)
    first = RECORD[:28] + bytes([192, 128, 64, 128 - 91])
    assert (tmp_path / "a.splat").read_bytes() == first + second


def test_round_trip_is_within_half_a_step(make: Make, tmp_path: Path) -> None:
    gaussians = make(500, 2)
    gaussians.features_dc = gaussians.features_dc.clamp(-1.7, 1.7)  # within 0 to 255
    gaussians = gaussians[packing.importance_order(gaussians)]
    write_splats(tmp_path / "a.splat", gaussians, SplatInfo())
    found, _ = read_splats(tmp_path / "a.splat")
    assert torch.equal(found.means, gaussians.means)
    torch.testing.assert_close(found.scales, gaussians.scales, rtol=0, atol=1e-6)
    assert ((found.alphas() - gaussians.alphas()).abs() <= 0.5 / 255 + 1e-6).all()
    assert ((found.features_dc - gaussians.features_dc).abs() * SH_C0 <= 0.5 / 255 + 1e-6).all()
    assert rotation_differences(gaussians.quats, found.quats).max() < 1.0


def test_order_is_by_size_and_opacity(make: Make) -> None:
    gaussians = make(100)
    order = packing.importance_order(gaussians)
    weight = (gaussians.sizes().prod(dim=1) * gaussians.alphas())[order]
    assert (weight[:-1] >= weight[1:] * (1 - 1e-5)).all()
    assert torch.equal(packing.importance_order(gaussians[order]), torch.arange(100))


def test_opacities_in_bytes_have_finite_logits_that_look_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.splat").write_bytes(b"".join(RECORD[:27] + bytes([alpha]) + RECORD[28:] for alpha in (0, 255)))
    gaussians, _ = read_splats(tmp_path / "a.splat")
    low, high = gaussians.alphas().tolist()
    assert 0 < low < 1 / 255 and 0.999 < high < 1
    write_splats(tmp_path / "b.splat", gaussians, SplatInfo())
    assert {record[27] for record in struct.unpack("32s32s", (tmp_path / "b.splat").read_bytes())} == {0, 255}


@pytest.mark.parametrize("size", [31, 33, 65])
def test_cut_short(size: int, assert_refused: Callable[..., None]) -> None:
    assert_refused("a.splat", (RECORD * 3)[:size], f"32 .*{size} bytes")


def test_empty_file_and_sizes_that_are_none(assert_refused: Callable[..., None], tmp_path: Path) -> None:
    assert_refused("a.splat", b"", "no Gaussians")
    record = struct.pack("<6f8B", 0, 0, 0, 0.0, -1.0, 1.0, *[128] * 8)
    assert_refused("a.splat", RECORD + record, r"scale_0, 1 in scale_1, 1 in rot\b.*1 of")
    assert read_splats(tmp_path / "a.splat", bad_values="drop")[1].count == 1
