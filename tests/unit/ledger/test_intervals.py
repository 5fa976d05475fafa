"""Intervals hold what they promise, on samples whose truth is known."""

import math
import random
from collections.abc import Callable

import pytest

from f3rm_ext.ledger.intervals import Change, independent_change, paired_change, quartiles

SEEDS = range(2000)


def sample(random_: random.Random, speed: float, noise: float, drift: list[float]) -> list[float]:
    return [speed * slow * math.exp(random_.gauss(0, noise)) for slow in drift]


def slower(change: Callable[..., Change], speed: float, noise: float, repeats: int) -> float:
    """Share of the seeds with which a speed is slower than one of 10, as `compare` counts it."""
    flagged = 0
    for seed in SEEDS:
        random_ = random.Random(seed)
        base, new = (sample(random_, each, noise, [1.0] * repeats) for each in (10.0, speed))
        flagged += change(base, new).high < 0
    return flagged / len(SEEDS)


@pytest.mark.parametrize("change", [paired_change, independent_change])
@pytest.mark.parametrize("repeats", [3, 5])
def test_equal_runs_are_rarely_told_apart(change: Callable[..., Change], repeats: int) -> None:
    assert slower(change, 10.0, 0.05, repeats) < 0.035, "promised: 2.5 %"


def test_pairs_cancel_what_slows_the_whole_machine() -> None:
    random_ = random.Random(1)
    drift = [1.0, 0.5, 0.8, 1.1]
    base, new = (sample(random_, speed, 0.01, drift) for speed in (10.0, 9.0))
    assert paired_change(base, new).high < 0 and paired_change(base, new).middle == pytest.approx(-0.1, abs=0.02)
    assert independent_change(base, new).high > 0, "not told apart without pairs"


def test_a_slower_variant_is_found() -> None:
    assert slower(paired_change, 8.0, 0.02, 3) > 0.9


def test_against_a_table_of_students_t() -> None:
    # Mean of three differences 0.09, 0.10, 0.11: ± 4.303 × 0.01 / √3.
    change = paired_change([1.0] * 3, [math.exp(x) for x in (0.09, 0.10, 0.11)])
    reach = 4.303 * 0.01 / math.sqrt(3)
    assert change.low == pytest.approx(math.expm1(0.1 - reach), abs=1e-5)
    assert change.high == pytest.approx(math.expm1(0.1 + reach), abs=1e-5)
    assert change.middle == pytest.approx(math.expm1(0.1)) and change.repeats == 3
    assert change.band == pytest.approx(math.expm1(reach), abs=1e-5), "the same whatever the change"


def test_one_repeat_has_no_interval() -> None:
    for change in (paired_change([10.0], [5.0]), independent_change([10.0], [5.0, 5.0])):
        assert change.middle == pytest.approx(-0.5) and math.isinf(change.band) and change.repeats == 1


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert independent_change([20.0, 20.0], [20.0, 20.0, 20.0])[:3] == (0.0, 0.0, 0.0)
    assert paired_change([20.0, 21.0], [20.0, 21.0])[:3] == (0.0, 0.0, 0.0)


def test_quartiles_of_few_values() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([4.0, 2.0]) == (2.5, 3.0, 3.5)
