"""Colours by direction against gsplat's, and what may be asked of them."""

import pytest
import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import sh_rest_count
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_colors


def _inputs(degree: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(degree)
    shapes = ((50, 3), (50, 3), (50, sh_rest_count(degree), 3))
    directions, dc, rest = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes)
    return 3.0 * directions, dc, rest


@pytest.mark.parametrize("degree", range(4))
@pytest.mark.parametrize("extra", [0, 1])
def test_colors_are_gsplats(degree: int, extra: int) -> None:
    from gsplat.cuda._torch_impl import _spherical_harmonics

    directions, dc, rest = _inputs(min(3, degree + extra))
    theirs = _spherical_harmonics(degree, directions, torch.cat([dc[:, None], rest], dim=1))
    ours = sh_colors(degree, directions, dc, rest)
    torch.testing.assert_close(ours, (theirs + 0.5).clamp(min=0))
    assert (ours == 0).any() and (ours > 0).any()


@pytest.mark.parametrize("degree", range(4))
def test_float32_and_half_storage(degree: int) -> None:
    exact = sh_colors(degree, *_inputs(degree))
    directions, dc, rest = (value.float() for value in _inputs(degree))
    single = sh_colors(degree, directions, dc, rest)
    torch.testing.assert_close(single, exact.float(), rtol=1e-5, atol=1e-5)
    half = sh_colors(degree, directions, dc, rest.half())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, single, rtol=0, atol=1e-2)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_unused_coefficients_get_no_gradient(degree: int) -> None:
    directions, dc, rest = (value.float().requires_grad_() for value in _inputs(3))
    sh_colors(degree, directions, dc, rest).sum().backward()
    assert rest.grad is not None
    used = sh_rest_count(degree)
    assert rest.grad[:, :used].abs().sum() > 0 and rest.grad[:, used:].abs().sum() == 0


@pytest.mark.parametrize("degree", [-1, 3, 4])
def test_a_degree_without_coefficients_is_refused(degree: int) -> None:
    directions, dc, rest = _inputs(2)
    with pytest.raises(ConfigError, match=f"degree {degree} need"):
        sh_colors(degree, directions, dc, rest)


def test_no_gaussians() -> None:
    assert sh_colors(3, torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 15, 3)).shape == (0, 3)
