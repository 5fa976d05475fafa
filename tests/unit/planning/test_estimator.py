"""Estimates of memory by category, device and method."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.extractors.registry import feature_size
from f3rm_ext.memory.devices import Device
from f3rm_ext.memory.estimate import CONTEXT_BYTES, LIBRARIES_BYTES, MemoryEstimate, mapped_bytes, process_bytes
from f3rm_ext.mesh.bound.layout import barycentric_weights
from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.planning import estimator
from f3rm_ext.planning.estimator import estimate_memory, estimate_splats, register_planner
from f3rm_ext.planning.request import CaptureSizes, PlanRequest, RefinementStart
from f3rm_ext.splat.memory.options import MemoryOptions
from f3rm_ext.splat.regularization.kernels import GRADIENT_BYTES, table_count
from f3rm_ext.splat.regularization.table import WIDTH

GIB, COUNT = 1 << 30, 20_000
DOCS = Path(__file__).parents[3] / "docs"
CAPTURE = CaptureSizes(train_images=20, eval_images=3, width_px=160, height_px=90)


def request_of(method: str, device: str = "cpu", capture: CaptureSizes = CAPTURE, **more: Any) -> PlanRequest:
    config: Any = (make_config if method.startswith("f3rm") else make_splat_config)(method)
    if method.startswith("f3rm"):
        config.pipeline.datamanager.features.extractors = ("dense-daisy",)
    return PlanRequest(config, capture, Device(device, more.pop("memory_bytes", 16 * GIB)), **more)


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
    assert found.device["train"]["context"] == (CONTEXT_BYTES if device == "cuda" else process_bytes())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_features_are_lifted_while_the_optimisers_hold_their_moments(device: str) -> None:
    request = request_of("sugar-ext", device, gaussians=COUNT)
    request.config.pipeline.datamanager.features.extractors = ("dense-daisy",)  # type: ignore[attr-defined]
    held = estimate_memory(request).device["lifting"]
    dim = feature_size("dense-daisy", CAPTURE.height_px, CAPTURE.width_px).dim
    assert held["features"] >= COUNT * dim * 2 and held["optimizer"] >= 1.9 * held["parameters"]
    assert held["workspace"] >= COUNT * min(dim, 64) * 4 * (2 if device == "cuda" else 1)


def test_a_process_on_the_cpu_has_libraries() -> None:
    assert LIBRARIES_BYTES + mapped_bytes("torch", "nvidia") == pytest.approx(process_bytes(), rel=0.1)
    torch_bytes = mapped_bytes("torch")
    assert 20 << 20 < torch_bytes < mapped_bytes("torch", "numpy") and mapped_bytes("no such package") == 0


def test_a_request_is_not_changed_and_no_random_numbers_are_taken() -> None:
    request = request_of("sugar-ext", gaussians=1000)
    before, state = str(request.config), torch.get_rng_state()
    estimate_memory(request)
    assert str(request.config) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_more_gaussians_take_more_and_half_precision_less(plans: dict[tuple[str, str], MemoryEstimate]) -> None:
    """A window that does not fit stays in main memory, also."""
    small = plans["sugar-ext", "cuda"]
    large = replace(CAPTURE, train_images=500, width_px=1600, height_px=900)
    request = request_of("sugar-ext", "cuda", large, gaussians=1_000_000, memory_bytes=6 * GIB)
    request.config.pipeline.model.memory.optimize_memory = True  # type: ignore[attr-defined]
    few, many = estimate_memory(replace(request, gaussians=COUNT)), estimate_memory(request)
    assert small.device["train"]["parameters"] == COUNT * 59 * 4
    assert many.device["train"]["parameters"] == 1_000_000 * (14 * 4 + 45 * 2)
    # Both keep the picture and as many points on surfaces; of each Gaussian its means, quaternion and scales, and what
    # they are projected to: centre, conic, depth, opacity, radius and colour.
    more = many.device["train"]["activations"] - few.device["train"]["activations"]
    assert more > (1_000_000 - COUNT) * 4 * (3 + 4 + 3 + 2 + 3 + 1 + 1 + 1 + 3)
    window = 500 * 1600 * 900 * 3
    assert many.device["train"].get("images", 0) == 0 and many.host["images"] == window
    assert small.device["train"]["images"] == small.host["images"] == 20 * 160 * 90 * 3


def test_photos_are_placed_by_the_gaussians_of_the_first_step() -> None:
    """The photos fit into a quarter of the memory beside 10,000 Gaussians, and not beside those of the end."""
    capture = replace(CAPTURE, train_images=1000, width_px=1024, height_px=512, points=10_000)
    cards = [
        request_of("sugar-ext", "cuda", capture, gaussians=count, memory_bytes=8 * GIB) for count in (10**6, 10**7)
    ]
    held = [estimate_memory(replace(card, pictures=False)).device["train"] for card in cards]
    assert held[0]["images"] == held[1]["images"] == 1000 * 1024 * 512 * 3


def test_divided_gaussians_share_devices() -> None:
    """Each device has its part, and room for what it and the others see of all."""
    request = request_of("sugar-ext", "cuda", gaussians=4 * COUNT + 1, processes=4, pictures=False)
    request.config.pipeline.model.regularization = "none"  # type: ignore[attr-defined]
    whole = estimate_memory(request).device["train"]
    request.config.pipeline.model.shard_gaussians = True  # type: ignore[attr-defined]
    part = estimate_memory(request).device["train"]
    assert part["parameters"] == (COUNT + 1) * 59 * 4 and part["optimizer"] < 0.3 * whole["optimizer"]
    assert part["activations"] > 3 * COUNT * 48 * 4
    assert estimate_memory(replace(request, processes=1)).device["train"]["parameters"] == whole["parameters"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_refinement_counts_its_mesh(device: str) -> None:
    request = request_of("sugar-ext-refine", device, gaussians=COUNT)
    request.config.pipeline.model.gaussians_per_triangle = 4  # type: ignore[attr-defined]
    found, faces = estimate_memory(request).device["train"], COUNT // 4
    assert found["parameters"] == COUNT * (2 + 2 + 1 + 48) * 4 + faces // 2 * 3 * 4
    assert found["optimizer"] == pytest.approx(2 * found["parameters"], rel=0.01)
    assert found["buffers"] >= faces * 3 * 8 + faces * 3 // 2 * (8 + 8 + 4)
    assert not hasattr(barycentric_weights(4, "cpu"), "fake_mode"), "no tensors without values stay in caches"
    barycentric_weights(4, "cpu").sum().item()
    free = estimate_memory(request_of("sugar-ext", device, gaussians=COUNT)).device["train"]
    assert (found["context"] > free["context"]) is (device == "cpu"), "Open3D"
    assert found["activations"] > 20 * faces * 4 and found["parameters"] < free["parameters"]


def test_free_gaussians_of_a_refinement_have_means_and_a_third_axis() -> None:
    start = RefinementStart(vertices=300, triangles=COUNT // 4, free=COUNT // 2)
    request = replace(request_of("sugar-ext-refine", "cuda"), start=start)
    found = estimate_memory(request).device["train"]["parameters"]
    bound, free, of_all = COUNT // 4, COUNT // 2, 1 + 3 + 45
    assert found == 4 * (300 * 3 + bound * (4 + of_all) + free * (3 + 3 + 4 + of_all))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_planar_keeps_no_neighbours(device: str) -> None:
    trains = {}
    for mode in ("none", "planar", "dn-consistency"):
        request = request_of("sugar-ext", device, gaussians=COUNT)
        request.config.pipeline.model.regularization = mode  # type: ignore[attr-defined]
        trains[mode] = estimate_memory(request).device["train"]
    neighbours = COUNT * 16 * 4
    assert trains["dn-consistency"]["buffers"] - trains["planar"]["buffers"] == pytest.approx(neighbours, abs=1000)
    # Patches and the other view are held beside the picture; a million points take more.
    assert trains["none"]["activations"] < trains["planar"]["activations"] < trains["dn-consistency"]["activations"]


def test_each_thread_of_the_cpu_has_gradients_of_points_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    request, held = request_of("sugar-ext", gaussians=COUNT, pictures=False), []
    request.config.pipeline.model.regularization = "dn-consistency"  # type: ignore[attr-defined]
    for threads in (1, 1000):
        monkeypatch.setattr(numba, "get_num_threads", lambda threads=threads: threads)
        held.append(estimate_memory(request).peak("train"))
        assert table_count(COUNT * WIDTH * 4) == min(threads, GRADIENT_BYTES // (COUNT * WIDTH * 4))
    assert 0.5 * GRADIENT_BYTES < held[1] - held[0] < 1.1 * GRADIENT_BYTES


def test_processes_share_the_rays(plans: dict[tuple[str, str], MemoryEstimate]) -> None:
    one = plans["f3rm-ext-lite", "cuda"].device["train"]
    two = estimate_memory(request_of("f3rm-ext-lite", "cuda", processes=2, pictures=False)).device["train"]
    assert two["activations"] < 0.6 * one["activations"] and two["parameters"] == one["parameters"]


@pytest.mark.parametrize("method", ["f3rm-ext-lite", "sugar-ext"])
def test_training_is_the_same_without_pictures(method: str, plans: dict[tuple[str, str], MemoryEstimate]) -> None:
    found = estimate_memory(request_of(method, "cpu", gaussians=COUNT, pictures=False))
    assert found.device == {"train": plans[method, "cpu"].device["train"]}


def test_other_methods_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherConfig:
        pass

    request = request_of("sugar-ext")
    request.config.pipeline.model = OtherConfig()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="memory plan"):
        estimate_memory(request)
    monkeypatch.setattr(estimator, "PLANNERS", dict(estimator.PLANNERS))
    register_planner(OtherConfig, lambda request: MemoryEstimate({"train": {"parameters": 1000}}))
    assert estimate_memory(request).device == {
        "train": {"parameters": 1000, "context": process_bytes(), "fragmentation": 100}
    }


def test_help_and_docs_say_what_optimize_memory_saves() -> None:
    def saved_percent(mode: str, degree: int) -> int:
        capture, peaks = CaptureSizes(train_images=4, eval_images=0, width_px=64, height_px=64), []
        for small in (False, True):
            request = request_of("sugar-ext", "cuda", capture, gaussians=6_000_000, pictures=False)
            model: Any = request.config.pipeline.model
            model.regularization, model.sh_degree, model.memory.optimize_memory = mode, degree, small
            request.config.pipeline.datamanager.cache_images = "cpu"  # type: ignore[attr-defined]
            peaks.append(sum(estimate_splats(request).device["train"].values()))
        return round(100 * (1 - peaks[1] / peaks[0]))

    (high, low), sugar = ([saved_percent(mode, degree) for degree in (3, 2)] for mode in ("planar", "dn-consistency"))
    pages = {
        name: (DOCS / name).read_text().replace("\n", " ") for name in ("splats.md", "benchmarks.md", "options.md")
    }
    said = f"{high} % less at SH degree 3 and {low} % less at"
    assert said in " ".join(inspect.getsource(MemoryOptions).split()) and said in pages["splats.md"]
    assert f"losses {sugar[0]} and {sugar[1]} %" in pages["splats.md"] and f"[{high} % less at" in pages["options.md"]
    assert f"{sugar[0]} % less at SH degree 3 and {sugar[1]} % less" in pages["benchmarks.md"]
