"""Random rounding: to neighbours only, right in the mean, the same for the same seed."""

from typing import Any

import pytest
import torch

from f3rm_ext.splat.memory.rounding import HALF_MAX, to_bfloat16, to_codes, to_half

ROUNDINGS = {"float16": to_half, "bfloat16": to_bfloat16}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", ROUNDINGS)
@pytest.mark.parametrize("value", [0.1, -0.3337, 1.0, 3e-5, -4.4e-7, 1234.567, 2**-14 - 2**-26])
def test_rounds_to_a_neighbour_and_right_in_the_mean(kind: str, value: float) -> None:
    rounded = ROUNDINGS[kind](torch.full((50_000,), value), seeded())
    assert rounded.dtype == getattr(torch, kind)
    values = rounded.double().unique()
    assert len(values) <= 2
    exact = torch.tensor(value, dtype=torch.float32).double()
    assert values.min() <= exact <= values.max()
    if len(values) == 2:  # neighbours: nothing lies between them
        middle = values.mean().to(rounded.dtype).double()
        assert middle in values
        gap = (values[1] - values[0]).item()
        assert rounded.double().mean().item() == pytest.approx(exact.item(), abs=4 * gap / 50_000**0.5)


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_what_fits_stays(kind: str) -> None:
    generator = seeded()
    values = torch.randn(1000, generator=generator).to(getattr(torch, kind))
    values[:4] = torch.tensor([0.0, 1.0, -2.0, 2.0**-20])
    assert torch.equal(ROUNDINGS[kind](values.float(), generator), values)


def test_too_large_for_half_becomes_the_largest() -> None:
    assert to_half(torch.tensor([1e6, -1e6, 65_510.0])).tolist() == [HALF_MAX, -HALF_MAX, HALF_MAX]


@pytest.mark.parametrize("rounding", ROUNDINGS.values())
def test_seeds_decide(rounding: Any) -> None:
    values = torch.rand(1000)
    first, again, other = (rounding(values, seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_codes_are_unbiased_and_within_their_range() -> None:
    values = torch.tensor([0.25, 126.75, -127.0, 3.0]).repeat(20_000, 1)
    codes = to_codes(values, 127, seeded())
    assert codes.dtype == torch.int8
    torch.testing.assert_close(codes.float().mean(0), values[0], atol=0.02, rtol=0)
    assert to_codes(torch.tensor([255.0, 254.5]), 255, seeded()).dtype == torch.uint8
    assert to_codes(torch.full((100,), 255.0), 255, seeded()).unique().tolist() == [255]
