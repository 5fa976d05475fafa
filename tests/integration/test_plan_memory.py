"""Planned memory of a small field and of small splats, beside what torch allocates when they are trained."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The program that measures."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("plan_memory")
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("kind", ["field", "splats"])
def test_plans_are_within_ten_percent(
    kind: str, benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = {
        benchmark.RAYS: 512,
        "pipeline.model.num_samples": 16,
        benchmark.WINDOW: 12,
        "pipeline.model.eval_num_rays_per_chunk": 2048,
    }
    splats = {benchmark.COUNT: 10_000, benchmark.REGULARIZATION: "none"}
    runs = {"field": ("f3rm-ext-lite", 8, field), "splats": ("sugar-ext", 0, splats)}
    monkeypatch.setattr(benchmark, "RUNS", runs)
    monkeypatch.setattr(benchmark, "SPLAT_PX", (320, 180))
    monkeypatch.setattr(benchmark, "FIELD_PX", (64, 48))
    benchmark.write_lpips(tmp_path / "lpips.pth")
    found = benchmark.allocated(kind, tmp_path)
    planned = benchmark.plan(kind, tmp_path, found["about"], warm=False)
    for phase in benchmark.PHASES:
        assert planned["planned"][phase] == pytest.approx(found[phase], rel=0.1), phase
