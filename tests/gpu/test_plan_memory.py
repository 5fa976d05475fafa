"""Planned memory beside what torch's allocator hands out on a GPU."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

NAMES = (
    "f3rm-ext-lite, 4096 rays, 64 dimensions, 12 images",
    "sugar-ext, 300,000, degree 3",
    "sugar-ext, 300,000, degree 3, optimize-memory",
)


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_near_what_is_allocated(
    name: str, cuda: torch.device, load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    benchmark = load("plan_memory")
    benchmark.write_lpips(tmp_path / "lpips.pth")
    found = benchmark.on_cuda(name, tmp_path, cuda.type, tiny=False)
    assert found["train_planned_mib"] == pytest.approx(found["train_mib"], rel=0.15), found
    assert found["evaluation_planned_mib"] == pytest.approx(found["evaluation_mib"], rel=0.25), found
    assert found["reserved_mib"] <= found["whole_planned_mib"], found
