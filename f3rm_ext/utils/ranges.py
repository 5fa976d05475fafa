"""Ranges and words of options, stated by their types and checked in one place."""

import dataclasses
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from f3rm_ext.errors import ConfigError

HUGE = 1e12
"""Largest value of a range without an upper end; numbers above it overflow somewhere or fit into no memory."""


@dataclass(frozen=True)
class Range:
    """The values that an option may have: ``batch_size: Annotated[int, Range(1)]``. NaN and infinity are in no range.

    >>> 1 in Range(1), 0 in Range(1), 0.5 in Range(0, 1, above=True), float("nan") in Range(0), 1e308 in Range(0)
    (True, False, True, False, False)
    """

    least: float | int = -math.inf
    most: float | int = HUGE
    above: bool = False
    """Whether the smallest value itself is out of range."""
    below: bool = False
    """Whether the largest value itself is out of range."""

    def __contains__(self, value: float | int) -> bool:
        too_small = value <= self.least if self.above else value < self.least
        too_large = value >= self.most if self.below else value > self.most
        return not (too_small or too_large or math.isnan(value))  # isnan takes no integer beyond a float

    def __str__(self) -> str:
        """Completes "give a number": ``from 0 to below 1``, ``of 2 or more``, ``above 0 and up to 1``."""
        least, most = (str(end) if isinstance(end, int) else f"{end:g}" for end in (self.least, self.most))
        if self.most >= HUGE:
            return f"above {least}" if self.above else f"of {least} or more"
        if self.above:
            return f"above {least} and {'below' if self.below else 'up to'} {most}"
        return f"from {least} to {'below ' * self.below}{most}"


Positive = Annotated[float, Range(0, above=True)]
"""A number above 0."""
Count = Annotated[int, Range(1)]
"""A whole number, 1 or more."""


def check_ranges(options: Any, prefix: str = "") -> None:
    """Checks the fields of a dataclass that state a :class:`Range` or, from Python, the words that they may be.

    Args:
        options: the dataclass. Of tuples every element is checked.
        prefix: of the options on the command line, such as ``pipeline.model.``.

    Raises:
        ConfigError: a value is out of its range, or a word is none of the field's.
    """
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        limits, value = next(_ranges(hints[field.name]), None), getattr(options, field.name)
        types, option = list(_leaves(hints[field.name])), field.name.replace("_", "-")
        words = [word for word in types if isinstance(word, str)]
        is_free = any(kind in types for kind in (str, Path, Any)) or not (words or limits)
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(number, str) and not is_free and number not in words:
                known = f"one of {', '.join(words)}" if words else "a number"
                raise ConfigError(f"--{prefix}{option} is {number[:30]!r}: give {known}.")
            if limits is not None and isinstance(number, int | float) and number not in limits:
                limits = f"up to {HUGE:g}" if number > HUGE == limits.most else limits
                raise ConfigError(f"--{prefix}{option} is {str(number)[:30]}: give a number {limits}.")


def _leaves(hint: Any) -> typing.Iterator[Any]:
    """Yields the types in a type that have no parts, and the words of literals."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        parts = parts[:1]
    if not parts:
        yield hint
    for part in parts:
        yield from _leaves(part)


def _ranges(hint: Any) -> typing.Iterator[Range]:
    """Yields the ranges in a type, from outside to inside."""
    if typing.get_origin(hint) is Annotated:
        yield from (mark for mark in hint.__metadata__ if isinstance(mark, Range))
    for inner in typing.get_args(hint):
        yield from _ranges(inner)
