"""Quartiles, and confidence intervals of the relative change between two groups of repeats."""

import math
from collections.abc import Sequence
from statistics import fmean, median, variance
from typing import NamedTuple

CONFIDENCE = 0.95


class Quartiles(NamedTuple):
    """The quartiles of a sample."""

    low: float
    middle: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Returns the quartiles of at least one value, interpolated linearly between neighbours.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    Quartiles(low=2.0, middle=3.0, high=4.0)
    """
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    return Quartiles(at(0.25), at(0.5), at(0.75))


class Change(NamedTuple):
    """The relative change from a baseline to something new, with its 95 % confidence interval: 0.1 is 10 % more."""

    middle: float
    low: float
    high: float
    repeats: int
    """Repeats, or pairs of them, on the side that has fewer."""

    @property
    def band(self) -> float:
        """A change that is smaller cannot be told from noise: half the interval's width, as a ratio. Infinite for a
        single repeat.
        """
        return math.sqrt((1 + self.high) / (1 + self.low)) - 1 if math.isfinite(self.high) else math.inf


def paired_change(base: Sequence[float], new: Sequence[float]) -> Change:
    """Returns the change between repeats that belong together, because they ran one after the other or share a seed.

    Student's t on the differences of logarithms, so that a slow hour of the machine, which hits both, cancels out.

    Args:
        base: positive values of the baseline.
        new: as many values, in the same order.
    """
    ratios = [math.log(after / before) for before, after in zip(base, new, strict=True)]
    spread = math.sqrt(variance(ratios) / len(ratios)) if len(ratios) > 1 else math.inf
    return _change(median(ratios), fmean(ratios), spread, float(len(ratios) - 1), len(ratios))


def independent_change(base: Sequence[float], new: Sequence[float]) -> Change:
    """Returns the change between groups of repeats that were not run in turn: Welch's t on the logarithms.

    Args:
        base: positive values of the baseline.
        new: positive values of the other group.
    """
    before, after = ([math.log(value) for value in values] for values in (base, new))
    fewest = min(len(before), len(after))
    difference = fmean(after) - fmean(before)
    middle = median(after) - median(before)
    if fewest < 2:
        return _change(middle, difference, math.inf, 0.0, fewest)
    squares = [variance(values) / len(values) for values in (before, after)]
    total = sum(squares)
    freedom = 1.0
    if total > 0:
        freedom = total**2 / sum(
            square**2 / (len(values) - 1) for square, values in zip(squares, (before, after), strict=True)
        )
    return _change(middle, difference, math.sqrt(total), freedom, fewest)


def _change(middle: float, mean: float, spread: float, freedom: float, repeats: int) -> Change:
    if math.isinf(spread):
        return Change(math.expm1(middle), -math.inf, math.inf, repeats)
    from scipy.special import stdtrit

    reach = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * spread
    return Change(math.expm1(middle), math.expm1(mean - reach), math.expm1(mean + reach), repeats)
