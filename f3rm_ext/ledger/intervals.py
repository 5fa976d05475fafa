"""Quartiles, and confidence intervals of the relative change between two groups of repeats."""

import math
from collections.abc import Sequence
from statistics import fmean, median, variance
from typing import NamedTuple

import numpy as np

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
    return Quartiles(*np.quantile(values, (0.25, 0.5, 0.75)).tolist())


class Change(NamedTuple):
    """The relative change from a baseline to something new, with its 95 % confidence interval: 0.1 is 10 % more."""

    middle: float
    low: float
    high: float
    repeats: int
    """Number of repeats, or of pairs, in the smaller group."""

    @property
    def band(self) -> float:
        """Half of the interval's width, as a ratio: a smaller change cannot be told from noise. Infinite for a single
        repeat.
        """
        return math.sqrt((1 + self.high) / (1 + self.low)) - 1 if math.isfinite(self.high) else math.inf


def paired_change(base: Sequence[float], new: Sequence[float]) -> Change:
    """Returns the change between repeats that belong together, because they ran one after the other or share a seed.

    Student's t on the differences of logarithms, so that a slow hour of the machine, which affects both, cancels out.
    """
    ratios = [math.log(after / before) for before, after in zip(base, new, strict=True)]
    error = math.sqrt(variance(ratios) / len(ratios)) if len(ratios) > 1 else math.inf
    return _change(median(ratios), fmean(ratios), error, len(ratios) - 1.0, len(ratios))


def independent_change(base: Sequence[float], new: Sequence[float]) -> Change:
    """Returns the change between groups of repeats that did not take turns: Welch's t on the logarithms."""
    before, after = ([math.log(value) for value in values] for values in (base, new))
    middle, mean = (statistic(after) - statistic(before) for statistic in (median, fmean))
    repeats = min(len(before), len(after))
    if repeats < 2:
        return _change(middle, mean, math.inf, 0.0, repeats)
    squares = [variance(values) / len(values) for values in (before, after)]
    total = sum(squares)
    terms = sum(square**2 / (len(values) - 1) for square, values in zip(squares, (before, after), strict=True))
    return _change(middle, mean, math.sqrt(total), total**2 / terms if total else 1.0, repeats)


def _change(middle: float, mean: float, error: float, degrees_of_freedom: float, repeats: int) -> Change:
    if math.isinf(error):
        return Change(math.expm1(middle), -math.inf, math.inf, repeats)
    from scipy.special import stdtrit

    half = float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2)) * error
    return Change(math.expm1(middle), math.expm1(mean - half), math.expm1(mean + half), repeats)
