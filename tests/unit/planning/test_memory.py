"""Planned memory of a small field and of small splats, beside what torch allocates when they are trained."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.planning import memory
from f3rm_ext.planning.allowances import CONTEXT_BYTES, PROCESS_BYTES
from f3rm_ext.planning.estimate import MemoryEstimate
from f3rm_ext.planning.memory import estimate_memory, register_planner
from f3rm_ext.planning.request import CaptureSizes, Device, PlanRequest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
GIB, COUNT = 1 << 30, 20_000
CAPTURE = CaptureSizes(train_images=20, eval_images=3, width_px=160, height_px=90)


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The program that measures."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("plan_memory")
    sys.path.remove(str(BENCHMARKS))


def request_of(method: str, device: str = "cpu", capture: CaptureSizes = CAPTURE, **more: Any) -> PlanRequest:
    config: Any = (make_config if method.startswith("f3rm") else make_splat_config)(method)
    if method.startswith("f3rm"):
        config.pipeline.datamanager.features.extractors = ("dense-daisy",)
    return PlanRequest(config, capture, Device(device, more.pop("memory_bytes", 16 * GIB)), **more)


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
    splats = {benchmark.COUNT: 20_000, benchmark.REGULARIZATION: "none"}
    runs = {"field": ("f3rm-ext-lite", 8, field), "splats": ("sugar-ext", 0, splats)}
    monkeypatch.setattr(benchmark, "RUNS", runs)
    monkeypatch.setattr(benchmark, "SPLAT_PX", (320, 180))
    monkeypatch.setattr(benchmark, "FIELD_PX", (64, 48))
    benchmark.write_lpips(tmp_path / "lpips.pth")
    found = benchmark.allocated(kind, tmp_path)
    planned = benchmark.plan(kind, tmp_path, found["about"], warm=False)
    for phase in benchmark.PHASES:
        assert planned["planned"][phase] == pytest.approx(found[phase], rel=0.1), phase


@pytest.fixture(scope="module")
def plans() -> dict[tuple[str, str], MemoryEstimate]:
    """Plans of both methods on both devices, made once."""
    cases = [(method, device) for method in ("f3rm-ext-lite", "sugar-ext") for device in ("cpu", "cuda")]
    return {case: estimate_memory(request_of(*case, gaussians=COUNT)) for case in cases}


@pytest.mark.parametrize("method", ["f3rm-ext-lite", "sugar-ext"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_categories(method: str, device: str, plans: dict[tuple[str, str], MemoryEstimate]) -> None:
    found = plans[method, device]
    assert set(found.device) == {"train", "evaluation", "query"}
    for held in found.device.values():
        assert min(held.values()) >= 0
        assert held["optimizer"] == pytest.approx(2 * held["parameters"], rel=0.05)
    assert (found.host == {}) == (device == "cpu")
    assert found.device["train"]["images"] >= 20 * 160 * 90 * 3
    assert found.device["train"]["context"] == (CONTEXT_BYTES if device == "cuda" else PROCESS_BYTES)


def test_a_request_is_not_changed_and_no_random_numbers_are_taken() -> None:
    request = request_of("sugar-ext", gaussians=1000)
    before, state = str(request.config), torch.get_rng_state()
    estimate_memory(request)
    assert str(request.config) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_more_gaussians_take_more_and_half_precision_less(plans: dict[tuple[str, str], MemoryEstimate]) -> None:
    """A window that does not fit stays in main memory, also."""
    few = plans["sugar-ext", "cuda"]
    large = replace(CAPTURE, train_images=500, width_px=1600, height_px=900)
    request = request_of("sugar-ext", "cuda", large, gaussians=1_000_000, memory_bytes=6 * GIB)
    request.config.pipeline.model.memory.optimize_memory = True  # type: ignore[attr-defined]
    many = estimate_memory(request)
    assert few.device["train"]["parameters"] == COUNT * 59 * 4
    assert many.device["train"]["parameters"] == 1_000_000 * (14 * 4 + 45 * 2)
    assert many.device["train"]["activations"] > 10 * few.device["train"]["activations"]
    window = 500 * 1600 * 900 * 3
    assert many.device["train"].get("images", 0) == 0 and many.host["images"] == window
    assert few.device["train"]["images"] == few.host["images"] == 20 * 160 * 90 * 3


def test_processes_share_the_rays(plans: dict[tuple[str, str], MemoryEstimate]) -> None:
    one = plans["f3rm-ext-lite", "cuda"].device["train"]
    two = estimate_memory(request_of("f3rm-ext-lite", "cuda", processes=2)).device["train"]
    assert two["activations"] < 0.6 * one["activations"] and two["parameters"] == one["parameters"]


def test_other_methods_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherConfig:
        pass

    request = request_of("sugar-ext")
    request.config.pipeline.model = OtherConfig()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="has no memory plan"):
        estimate_memory(request)
    monkeypatch.setattr(memory, "PLANNERS", dict(memory.PLANNERS))
    register_planner(OtherConfig, lambda request: MemoryEstimate({"train": {"parameters": 1000}}))
    assert estimate_memory(request).device == {
        "train": {"parameters": 1000, "context": PROCESS_BYTES, "fragmentation": 100}
    }
