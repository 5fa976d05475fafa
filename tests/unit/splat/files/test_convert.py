"""From one format to another, and what is said of the losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import SUFFIXES, SplatInfo, convert_splats, read_splats, write_splats
from f3rm_ext.splat.files.convert import conversion_losses, rotation_differences
from f3rm_ext.splat.files.formats import WRITE_ONLY
from f3rm_ext.splat.gaussians import Gaussians

Make = Callable[..., Gaussians]
NAMES = [f"{s[1:].replace('.', '-')}{s}" for s, kind in SUFFIXES.items() if kind not in WRITE_ONLY]


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", NAMES)
def test_every_format_becomes_every_other(
    source: str, target: str, make: Make, assert_same: Any, tmp_path: Path
) -> None:
    gaussians, target = make(300), f"to-{target}"
    write_splats(tmp_path / source, gaussians, SplatInfo(render_mode="mip", filters_fused=True, comments=("from: us",)))
    before = (tmp_path / source).read_bytes()
    made = convert_splats(tmp_path / source, tmp_path / target)
    found, info = read_splats(tmp_path / target)
    assert (tmp_path / source).read_bytes() == before
    if source == "ply.ply" and target == "to-ply.ply":
        assert_same(found, gaussians)
    assert info.count == 300 and info.sh_degree == (0 if "splat.splat" in source + target else 3)
    if ".splat" not in source + target:
        assert (info.render_mode, info.filters_fused) == ("mip", True)
        assert info.comments[0] == "made_by: f3rm-ext export convert" and info.comments[-1] == "from: us"
    assert (found.means.mean(dim=0) - gaussians.means.mean(dim=0)).abs().max() < 1e-2
    if target == "to-ply.ply":
        assert made.lost == []
    elif source == "ply.ply":
        assert any(line.startswith("Opacities changed") for line in made.lost)


def test_lower_degree(make: Make, assert_same: Any, tmp_path: Path) -> None:
    write_splats(tmp_path / "a.ply", make(), SplatInfo())
    made = convert_splats(tmp_path / "a.ply", tmp_path / "b.ply", sh_degree=1)
    assert made.lost == ["SH degree 3 became 1."] and made.result.sh_degree == 1
    assert_same(read_splats(tmp_path / "b.ply")[0], make().to_sh_degree(1))
    with pytest.raises(SplatFileError, match=r"degree 1, .*--sh-degree"):
        convert_splats(tmp_path / "b.ply", tmp_path / "c.ply", sh_degree=2)
    assert not (tmp_path / "c.ply").exists()


def test_render_mode_that_a_format_cannot_tell(make: Make, tmp_path: Path) -> None:
    write_splats(tmp_path / "a.ply", make(), SplatInfo(render_mode="mip"))
    lost = convert_splats(tmp_path / "a.ply", tmp_path / "b.splat").lost
    assert lost[0] == "SH degree 3 became 0 (colours are now the same from everywhere)."
    assert lost[-1].startswith("The format cannot record that the splats need anti-aliasing")


@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
def test_a_file_is_not_converted_into_itself(link: str | None, make: Make, tmp_path: Path) -> None:
    source, target = tmp_path / "a.ply", tmp_path / "b.ply"
    write_splats(source, make(), SplatInfo(comments=("made_by: f3rm-ext export splats",)))
    before = source.read_bytes()
    if link:
        getattr(target, link)(source)
    with pytest.raises(SplatFileError, match="file to read"):
        convert_splats(source, target if link else tmp_path / "." / "a.ply", sh_degree=0)
    assert source.read_bytes() == before


def test_a_bad_source_leaves_the_target(make: Make, tmp_path: Path) -> None:
    write_splats(tmp_path / "a.ply", make(), SplatInfo())
    convert_splats(tmp_path / "a.ply", tmp_path / "b.spz")
    before = (tmp_path / "b.spz").read_bytes()
    (tmp_path / "a.ply").write_bytes((tmp_path / "a.ply").read_bytes()[:-1])
    with pytest.raises(SplatFileError, match="cut short"):
        convert_splats(tmp_path / "a.ply", tmp_path / "b.spz")
    assert (tmp_path / "b.spz").read_bytes() == before


def test_losses_are_measured(make: Make) -> None:
    before, after = make(3), make(3)
    after.means[0, 1] += 0.25
    after.scales[1] += torch.log(torch.tensor(1.1))
    after.opacities[2] = 0
    after.features_dc[:] += 1 / (255 * 0.28209479177387814)
    after.features_rest[0, 0, 0] += 0.5
    after.quats *= -2  # the same rotations
    told = conversion_losses(before, after)
    assert told[0].startswith("Positions changed by 0 at the median, 0.25 at most; the scene is ")
    assert told[1] == "Sizes changed by 0 % at the median, 10 % at most."
    assert told[2].startswith("Opacities changed by 0 at the median, 0.")
    assert told[3] == "Colours changed by 1 of 255 at the median, 1 of 255 at most."
    assert told[4] == "SH coefficients changed by 0 at the median, 0.5 at most."
    assert len(told) == 5 and conversion_losses(before, make(3)) == []


@pytest.mark.parametrize("degrees", [0.0, 1e-4, 1.0, 90.0, 180.0])
def test_angle_between_rotations(degrees: float) -> None:
    half = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64)) / 2
    turn = torch.stack([half.cos(), half.sin(), torch.zeros_like(half), torch.zeros_like(half)])[None]
    same = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    for sign in (2, -2):
        found = rotation_differences(same, sign * turn)
        torch.testing.assert_close(found, torch.tensor([degrees], dtype=torch.float64), rtol=1e-9, atol=1e-12)
