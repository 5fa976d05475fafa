"""Colours of stored coefficients, and their gradient in packed form, against plain autograd."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import sh_rest_count
from f3rm_ext.splat.memory import packed
from f3rm_ext.splat.memory.packed import (
    ColorGradient,
    PackedGradient,
    forget_gradient,
    packed_gradient,
    packed_sh_colors,
)
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_colors

COUNT = 40


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "CHUNK_CPU", 16)


def scene(dtype: torch.dtype, degree: int = 3) -> tuple[Tensor, Tensor, Parameter]:
    generator = torch.Generator().manual_seed(4)
    directions = torch.randn(COUNT, 3, generator=generator).requires_grad_()
    dc = torch.randn(COUNT, 3, generator=generator).requires_grad_()
    rest = torch.randn(COUNT, sh_rest_count(degree), 3, generator=generator) * 0.3
    return directions, dc, Parameter(rest.to(dtype))


def dense(parameter: Parameter) -> Tensor:
    """The packed gradient of a parameter, multiplied out."""
    gradient = packed_gradient(parameter)
    assert gradient is not None
    rows = gradient.rows()
    out = torch.zeros(parameter.shape)
    out[rows] = gradient.unpack(rows, 0, parameter.shape[1])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_values_and_gradients_are_those_of_plain_autograd(degree: int, dtype: torch.dtype) -> None:
    directions, dc, rest = scene(dtype)
    weights = torch.randn(COUNT, 3, generator=torch.Generator().manual_seed(5))
    weights[::3] = 0  # not visible
    plain_rest = rest.detach().float().requires_grad_()
    expected = sh_colors(degree, directions, dc, plain_rest)
    (expected * weights).sum().backward()
    wanted = directions.grad, dc.grad
    directions.grad = dc.grad = None
    colors = packed_sh_colors(degree, directions, dc, rest)
    (colors * weights).sum().backward()
    torch.testing.assert_close(colors, expected)
    torch.testing.assert_close(dc.grad, wanted[1])
    if degree == 0:
        assert packed_gradient(rest) is None and rest.grad is None
        return
    torch.testing.assert_close(directions.grad, wanted[0])
    torch.testing.assert_close(dense(rest), plain_rest.grad)
    assert rest.grad is not None and rest.grad.untyped_storage().nbytes() == rest.element_size()


def held_bytes(gradient: PackedGradient) -> int:
    tensors = (value for picture in gradient.pictures for value in vars(picture).values() if isinstance(value, Tensor))
    return sum(tensor.nbytes for tensor in tensors)


def test_only_visible_gaussians_take_memory() -> None:
    directions, dc, rest = scene(torch.float16)
    packed_sh_colors(3, directions, dc + 10, rest)[::4].sum().backward()
    gradient = packed_gradient(rest)
    assert gradient is not None and gradient.rows().tolist() == list(range(0, COUNT, 4))
    assert held_bytes(gradient) == 10 * (8 + 12 + 12)


def test_pictures_of_one_step_add_up() -> None:
    """Two views of different Gaussians, of different degrees."""
    directions, dc, rest = scene(torch.float32)
    expected = rest.detach().clone().requires_grad_()
    for colors in (sh_colors, packed_sh_colors):
        target = expected if colors is sh_colors else rest
        colors(3, directions, dc + 9, target)[:25].sum().backward()
        colors(1, -directions, dc + 9, target)[10:].square().sum().backward()
        colors(2, directions, dc + 9, target).mul(0).sum().backward()  # sees nobody
    torch.testing.assert_close(dense(rest), expected.grad)


def test_forgetting() -> None:
    directions, dc, rest = scene(torch.float16)
    packed_sh_colors(3, directions, dc, rest).sum().backward()
    forget_gradient(rest)
    assert rest.grad is None and packed_gradient(rest) is None
    forget_gradient(rest)  # twice does no harm


def test_without_grad_nothing_is_gathered() -> None:
    directions, dc, rest = scene(torch.float16)
    with torch.no_grad():
        assert not packed_sh_colors(3, directions, dc, rest).requires_grad
    assert packed_gradient(rest) is None


def test_frozen_coefficients_gather_nothing_but_directions_have_gradients() -> None:
    directions, dc, rest = scene(torch.float16)
    rest.requires_grad_(False)
    packed_sh_colors(3, directions, dc, rest).sum().backward()
    assert packed_gradient(rest) is None and rest.grad is None
    assert directions.grad is not None and directions.grad.abs().max() > 0


def test_too_few_coefficients_are_refused() -> None:
    directions, dc, rest = scene(torch.float16, degree=1)
    with pytest.raises(ConfigError, match="need 8 coefficients"):
        packed_sh_colors(2, directions, dc, rest)


def test_a_part_of_a_parameter_is_refused() -> None:
    """Its gradient would be gathered beside the part, where nobody looks."""
    directions, dc, rest = scene(torch.float32)
    with pytest.raises(ValueError, match="parameter itself"):
        packed_sh_colors(3, directions[:5], dc[:5], rest[:5])


def test_gradients_of_all_gaussians_and_of_visible_ones_are_one_another() -> None:
    """On CUDA gradients come for all Gaussians, and their visible rows are chosen when they are read."""
    generator = torch.Generator().manual_seed(6)
    directions, colors = (torch.randn(COUNT, 3, generator=generator) for _ in range(2))
    colors[1::2] = 0
    whole = PackedGradient([ColorGradient(None, directions, colors, 3)])
    assert held_bytes(whole) == COUNT * 24
    found = whole.expand(COUNT)
    assert found is not None and torch.equal(found[0][0], directions) and torch.equal(found[1][0], colors)
    assert whole.rows().tolist() == list(range(0, COUNT, 2)) and held_bytes(whole) == COUNT // 2 * 32
    again = whole.expand(COUNT)
    assert again is not None and torch.equal(again[1][0], colors) and not again[0][0, 1::2].any()
    whole.pictures.append(ColorGradient(None, directions, colors, 2))
    assert whole.expand(COUNT) is None  # of other degrees
    assert whole.rows().tolist() == list(range(0, COUNT, 2))
