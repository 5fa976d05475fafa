"""Snapshots made by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from f3rm_ext.profiling.census import CATEGORIES
from f3rm_ext.profiling.snapshot import Snapshot

MIB = 1 << 20


@pytest.fixture(scope="session")
def made() -> Callable[..., Snapshot]:
    """A snapshot of a step; sizes of categories in MiB."""

    def make(step: int, **options: Any) -> Snapshot:
        categories = dict.fromkeys(CATEGORIES, 0)
        categories |= {name: int(options.pop(name, 0) * MIB) for name in CATEGORIES}
        values: dict[str, Any] = {"categories": categories, "host": {}, "named": {}, "dtypes": {}, "largest": []}
        values |= {"groups": {}, "tensors": 1, "large": 0, "activations": 0, "resident": 10**12, "seconds": float(step)}
        return Snapshot(step=step, **(values | options))

    return make
