"""Remainders of reflective Gaussians: more bits where they are, nothing elsewhere, and they follow their rows."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.splat.gaussians import sh_rest_count
from f3rm_ext.splat.memory import remainder
from f3rm_ext.splat.memory.adam import PackedAdam
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_bases


def values(count: int = 20) -> Tensor:
    return torch.randn(count, 15, 3, generator=torch.Generator().manual_seed(0)) * 0.3


def stepped(parameter: Parameter, steps: int = 1, **options: Any) -> PackedAdam:
    optimizer = PackedAdam([parameter], lr=1e-5, reflective_above=0.05, **options)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


def test_view_dependence_is_the_spread_of_colors_over_directions() -> None:
    rest = values(3)
    directions = torch.nn.functional.normalize(
        torch.randn(40_000, 3, generator=torch.Generator().manual_seed(1)), dim=-1
    )
    colors = torch.einsum("dk,nkc->ndc", sh_bases(3, directions), rest)
    torch.testing.assert_close(
        remainder.view_dependence(rest), colors.square().mean(dim=(1, 2)).sqrt(), rtol=0.02, atol=0
    )
    assert remainder.view_dependence(rest.half()).dtype == torch.float32
    assert remainder.view_dependence(torch.zeros(2, sh_rest_count(0), 3)).tolist() == [0, 0]


def test_stored_and_remainder_together_are_nearly_float32() -> None:
    state: dict[str, Any] = {}
    like, rows = torch.zeros(20, 15, 3), torch.arange(20)
    remainder.choose(state, rows < 10, like)
    want = values()
    stored = remainder.write(state, rows, want, torch.Generator().manual_seed(0))
    exact = stored.float() + remainder.read(state, rows)
    assert stored.dtype == torch.float16
    assert torch.equal(stored[:10], want[:10].half())
    assert (exact - want)[:10].abs().max() < 2**-21
    assert (exact - want)[10:].abs().max() > 2**-15  # of those there is float16 only
    torch.testing.assert_close(exact[10:], want[10:], rtol=2**-10, atol=0)


def test_choosing_anew_keeps_the_remainders_of_those_that_stay() -> None:
    state: dict[str, Any] = {}
    rows = torch.arange(20)
    remainder.choose(state, rows < 10, torch.zeros(20, 15, 3))
    remainder.write(state, rows, values(), torch.Generator())
    before = remainder.read(state, rows)
    remainder.choose(state, (rows >= 5) & (rows < 15), torch.zeros(20, 15, 3))
    after = remainder.read(state, rows)
    assert torch.equal(after[5:10], before[5:10]) and before[5:10].abs().max() > 0
    assert after[:5].abs().max() == 0 and after[10:].abs().max() == 0


def test_small_updates_add_up_exactly_for_reflective_gaussians() -> None:
    start = values()
    start[10:] *= 0.01  # not reflective
    parameter = Parameter(start.half())
    optimizer = stepped(parameter, steps=100)
    state = optimizer.state[parameter]
    assert ((state["slot"] > 0) == (torch.arange(20) < 10)).all()
    assert state["remainder"].shape == (1, 11, 15, 3)
    exact = parameter.detach().float() + remainder.read(state, slice(None))
    assert (exact - start.half().float() + 100 * 1e-5)[:10].abs().max() < 2e-5


def test_float32_parameters_need_none() -> None:
    parameter = Parameter(values())
    assert "slot" not in stepped(parameter).state[parameter]


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_they_are_part_of_the_state(moments: str) -> None:
    parameter = Parameter(values().half())
    optimizer = stepped(parameter, steps=3)
    other = PackedAdam([Parameter(parameter.detach().clone())], reflective_above=0.05, moments=moments)
    other.load_state_dict(optimizer.state_dict())
    (state,) = other.state.values()
    want = remainder.read(optimizer.state[parameter], slice(None))
    assert torch.equal(remainder.read(state, slice(None)), want) and want.abs().max() > 0
    without = PackedAdam([Parameter(parameter.detach().clone())])
    without.load_state_dict(optimizer.state_dict())
    assert "slot" not in next(iter(without.state.values()))
