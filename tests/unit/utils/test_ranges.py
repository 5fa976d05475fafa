"""Ranges of options: every value of a field that states one."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.ranges import Count, Positive, Range, check_ranges


@dataclass
class Options:
    batch_size: Count = 1
    rate: Positive | None = None
    momentum: Annotated[float, Range(0, 1, below=True)] = 0.0
    thresholds: tuple[Positive, ...] = ()
    corner: tuple[Count, Count] | None = None
    name: str = "-1"
    mapper: Literal["auto", "global"] | Count = "auto"
    parts: tuple[Literal["faces", "edges"], ...] = ()
    weights: Path | Literal["none"] = "none"


@pytest.mark.parametrize(
    "options",
    [{}, {"rate": 1e-30}, {"momentum": 0.999}, {"thresholds": (0.1, 2.0)}, {"mapper": 3}, {"weights": "file"}],
)
def test_values_in_range(options: dict) -> None:
    check_ranges(Options(**options))


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"batch_size": 0}, "of 1 or more"),
        ({"batch_size": 10**25}, "up to 1e"),
        ({"batch_size": 10**400}, "up to 1e"),
        ({"rate": 0.0}, "above 0"),
        ({"rate": math.nan}, "above 0"),
        ({"rate": math.inf}, "up to 1e"),
        ({"momentum": 1.0}, "from 0 to below 1"),
        ({"momentum": -0.1}, "from 0 to below 1"),
        ({"thresholds": (0.1, -1.0)}, "above 0"),
        ({"corner": (1, 0)}, "of 1 or more"),
        ({"mapper": "glomap"}, "auto, global"),
        ({"mapper": 0}, "of 1 or more"),
        ({"parts": ("faces", "corners")}, "faces, edges"),
        ({"rate": "fast"}, "a number"),
    ],
)
def test_values_out_of_range_are_named(options: dict, limits: str) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .*{limits}"):
        check_ranges(Options(**options))
