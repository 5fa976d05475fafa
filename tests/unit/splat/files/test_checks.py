"""Values that no Gaussian can have."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from f3rm_ext.errors import SplatFileError
from f3rm_ext.splat.files import SplatInfo, read_splats, write_splats
from f3rm_ext.splat.files.checks import check_values
from f3rm_ext.splat.files.ply import write_ply_splats
from f3rm_ext.splat.gaussians import Gaussians

Make = Callable[..., Gaussians]
NAN, INFINITY = math.nan, math.inf
PATH = Path("scene.ply")


def spoiled(gaussians: Gaussians) -> Gaussians:
    """With values that cannot be in 5 of the Gaussians."""
    gaussians.means[3, 0] = NAN
    gaussians.means[4, 0] = INFINITY
    gaussians.scales[4, 2] = -INFINITY
    gaussians.quats[5] = 0
    gaussians.opacities[6] = NAN
    gaussians.features_rest[7, 1:3, 2] = NAN
    return gaussians


def test_good_ones_pass_as_they_are(make: Make) -> None:
    gaussians = make()
    gaussians.quats[0] = torch.tensor([0.0, 0.0, -1e-20, 0.0])
    found, valid, notices = check_values(gaussians, PATH)
    assert found is gaussians and valid.all() and notices == []


def test_error_says_how_many_and_where(make: Make) -> None:
    told = (
        r"scene.ply has 7 values .*\(2 in x, 1 in scale_2, 1 in opacity, 2 in f_rest, 1 in rot \(length 0\)\) "
        r"in 5 of 40 Gaussians: .*--bad-values drop"
    )
    with pytest.raises(SplatFileError, match=told):
        check_values(spoiled(make()), PATH)


def test_dropped(make: Make, assert_same: Any) -> None:
    found, valid, (notice,) = check_values(spoiled(make()), PATH, "drop")
    assert (~valid).nonzero()[:, 0].tolist() == [3, 4, 5, 6, 7]
    assert notice.startswith("5 Gaussians are left out for 7 values that are NaN")
    assert_same(found, make()[torch.tensor([0, 1, 2, *range(8, 40)])])


def test_infinite_opacities_are_kept_when_the_others_are_dropped(make: Make) -> None:
    gaussians = make()
    gaussians.opacities[:3, 0] = torch.tensor([INFINITY, -INFINITY, NAN])
    with pytest.raises(SplatFileError, match="3 in opacity"):
        check_values(gaussians, PATH)
    found, _, notices = check_values(gaussians, PATH, "drop")
    assert len(found) == 39 and len(notices) == 2 and notices[0].startswith("2 infinite opacities")
    alphas = found.alphas()
    assert 0.999 < alphas[0] < 1 and 0 < alphas[1] < 1 / 255
    assert torch.equal(found.opacities[2:], make().opacities[3:]) and gaussians.opacities[0].isinf()


def test_none_at_all_and_none_left(make: Make) -> None:
    with pytest.raises(SplatFileError, match=r"scene\.ply.*no Gaussians"):
        check_values(make()[:0], PATH)
    gaussians = make(2)
    gaussians.means[:] = NAN
    with pytest.raises(SplatFileError, match=r"2 of 2.*none"):
        check_values(gaussians, PATH, "drop")


def test_read_and_written(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "a.ply"
    with pytest.raises(SplatFileError, match=r"a\.ply would get 7 .*NaN"):
        write_splats(path, spoiled(make()), SplatInfo())
    assert not path.exists()
    with path.open("wb") as stream:
        write_ply_splats(stream, spoiled(make()), SplatInfo())
    before = path.read_bytes()
    with pytest.raises(SplatFileError, match=r"a\.ply has 7 .*NaN"):
        read_splats(path)
    assert path.read_bytes() == before
    found, info = read_splats(path, bad_values="drop")
    assert len(found) == info.count == 35 and len(info.notices) == 1
    written = write_splats(tmp_path / "b.ply", spoiled(make()), SplatInfo(), bad_values="drop")
    assert written.count == 35 and len(written.notices) == 1


def test_numbers_beyond_float32_are_infinite(assert_refused: Callable[..., None]) -> None:
    names = ["x", "y", "z", "opacity", "f_dc_0", "f_dc_1", "f_dc_2"]
    names += [f"scale_{i}" for i in range(3)] + [f"rot_{i}" for i in range(4)]
    lines = ["ply", "format ascii 1.0", "element vertex 1", *(f"property double {name}" for name in names)]
    row = " ".join(["1e39", *["1"] * (len(names) - 1)])
    assert_refused("a.ply", "\n".join([*lines, "end_header", row, ""]).encode(), r"1 in x\b.*1 of")
