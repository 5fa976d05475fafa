"""Conversion between degrees and storages, and the loss it states."""

import pytest
import torch
from torch.nn import functional

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.memory.conversion import convert_harmonics
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_bases

REST = torch.randn(200, 15, 3, generator=torch.Generator().manual_seed(0)) * 0.1


def test_stated_losses_are_those_of_colors() -> None:
    directions = functional.normalize(torch.randn(5000, 3, generator=torch.Generator().manual_seed(1)), dim=-1)
    bases = sh_bases(3, directions)
    rest, loss = convert_harmonics(REST, 1, torch.float16)
    assert rest.shape == (200, 3, 3) and rest.dtype == torch.float16
    back = torch.zeros_like(REST)
    back[:, :3] = REST[:, :3]
    assert loss.dropped == pytest.approx(
        torch.einsum("dk,nkc->dnc", bases, REST - back).square().mean().sqrt().item(), rel=0.02
    )
    rounding = torch.einsum("dk,nkc->dnc", bases[:, :3], REST[:, :3] - rest.float()).square().mean().sqrt().item()
    assert loss.rounding == pytest.approx(rounding, rel=0.02) and 0 < loss.rounding < 1e-4
    assert "degrees that are dropped" in str(loss)


def test_what_loses_nothing() -> None:
    half, _ = convert_harmonics(REST, 3, torch.float16)
    for given, degree in ((REST, 3), (REST[:, :3], 3), (half, 3)):
        rest, loss = convert_harmonics(given, degree, torch.float32)
        count = given.shape[1]
        assert torch.equal(rest[:, :count], given.float()) and not rest[:, count:].any() and rest.shape == REST.shape
        assert str(loss) == "nothing is lost" and loss.dropped == loss.rounding == 0


def test_no_coefficients_and_odd_numbers_of_them() -> None:
    rest, loss = convert_harmonics(REST, 0, torch.float16)
    assert rest.shape == (200, 0, 3) and loss.dropped > 0.05 and loss.rounding == 0
    assert convert_harmonics(rest, 2, torch.float32)[0].shape == (200, 8, 3)
    with pytest.raises(ConfigError, match="4 SH"):
        convert_harmonics(REST[:, :4], 3, torch.float32)
