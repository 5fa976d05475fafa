"""`ns-train f3rm-ext` and `-big` on CUDA as a user types them: training, evaluation, backends, resuming."""

import importlib.util
import json
import math
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from f3rm_ext.nerf.hash_backends import Backend

STEPS = 20
Type = Callable[..., str]
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train_field(
    type_command: Type, tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> Train:
    """`ns-train METHOD` on the tiny capture; gives the run's folder."""
    # The presets are for GPUs: on the CPU, tables of that size would take minutes.
    small: tuple[object, ...] = ()
    if device.type == "cpu":
        small = ("--pipeline.model.grid.log2-hashmap-size", 12, "--pipeline.model.feature-grid.log2-hashmap-size", 12)
        small += ("--pipeline.model.num-samples", 8, "--pipeline.datamanager.train-num-rays-per-batch", 64)

    def train(method: str, *arguments: object, steps: int = STEPS) -> Path:
        root = tmp_path_factory.mktemp(method)
        type_command(
            "ns-train",
            method,
            *("--data", tiny_capture, "--output-dir", root, "--experiment-name", "e", "--timestamp", "t"),
            *("--vis", "tensorboard", "--logging.local-writer.enable", "False", "--max-num-iterations", steps),
            *("--machine.device-type", device.type, *small, *arguments),
        )
        return root / "e" / method / "t"

    return train


@pytest.fixture(scope="module")
def features(tiny_capture: Path) -> tuple[object, ...]:
    """Two extractors that need no weights, as `-big` has two."""
    return ("--pipeline.datamanager.features.extractors", f"labels:data={tiny_capture}", "dense-daisy")


@pytest.fixture(scope="module")
def run(train_field: Train, features: tuple[object, ...]) -> Path:
    """A run of `f3rm-ext` with a checkpoint halfway."""
    return train_field("f3rm-ext", *features, "--steps-per-save", STEPS // 2, "--save-only-latest-checkpoint", "False")


def state_of(folder: Path, step: int = STEPS - 1) -> dict[str, Any]:
    return torch.load(folder / "nerfstudio_models" / f"step-{step:09d}.ckpt", map_location="cpu", weights_only=True)


def assert_sane(folder: Path, step: int = STEPS - 1) -> None:
    """Parameters are float32, finite, and moved by the training."""
    state = state_of(folder, step)["pipeline"]
    tables = {name: value for name, value in state.items() if name.endswith("table")}
    assert len(tables) >= 4, sorted(tables)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert torch.isfinite(value).all(), name
    for name, table in tables.items():
        assert table.dtype == torch.float32 and table.abs().max() > 1e-3, name  # they start below 1e-4


def evaluate(type_command: Type, folder: Path, out: Path) -> dict[str, float]:
    type_command("ns-eval", "--load-config", folder / "config.yml", "--output-path", out)
    return json.loads(out.read_text())["results"]


def test_f3rm_ext_is_trained_and_evaluated(run: Path, type_command: Type, tmp_path: Path) -> None:
    assert_sane(run)
    metrics = evaluate(type_command, run, tmp_path / "eval.json")
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    # Evaluation is not under autocast: pictures that fail there are black, at about 5 dB.
    assert metrics["psnr"] > 8 and metrics["feature_cosine_labels"] > 0.1
    assert metrics["train_peak_memory_mib"] > 0


def test_a_resumed_run_goes_the_way_of_one_that_was_not(
    run: Path, train_field: Train, features: tuple[object, ...], device: torch.device
) -> None:
    folder = run / "nerfstudio_models"
    resumed = train_field("f3rm-ext", *features, "--load-dir", folder, "--load-step", STEPS // 2)
    one, two = state_of(run), state_of(resumed)
    assert one["step"] == two["step"] == STEPS - 1
    for name, value in one["pipeline"].items():
        if isinstance(value, torch.Tensor) and name.endswith("table"):
            # Sums of atomics come in any order, so on CUDA the ways part in the last digits.
            off = float((value - two["pipeline"][name]).norm() / value.norm())
            assert off < (1e-6 if device.type == "cpu" else 0.05), f"{name}: {off:.1e}"
    drawn = [state["f3rm_ext"]["random"] for state in (one, two)]
    for generator in {"torch", "cuda"} & drawn[0].keys():
        assert torch.equal(drawn[0][generator], drawn[1][generator]), "other numbers were drawn"


def test_the_big_preset(train_field: Train, features: tuple[object, ...], type_command: Type, tmp_path: Path) -> None:
    folder = train_field("f3rm-ext-big", *features)
    assert_sane(folder)
    assert evaluate(type_command, folder, tmp_path / "eval.json")["psnr"] > 8


@pytest.mark.parametrize("backend", [name for name in typing.get_args(Backend) if name not in ("auto", "numba")])
def test_every_backend_trains(backend: str, train_field: Train) -> None:
    if backend == "tcnn" and importlib.util.find_spec("tinycudann") is None:
        pytest.skip("tiny-cuda-nn (tinycudann) is not installed")
    extractors = ("--pipeline.datamanager.features.extractors", "dense-daisy")
    folder = train_field("f3rm-ext", *extractors, "--pipeline.model.backend", backend, steps=8)
    assert_sane(folder, 7)


def test_without_mixed_precision(train_field: Train, tmp_path: Path, type_command: Type, device: torch.device) -> None:
    extractors = ("--pipeline.datamanager.features.extractors", "dense-daisy")
    folder = train_field("f3rm-ext", *extractors, "--mixed-precision", "False")
    assert_sane(folder)
    assert evaluate(type_command, folder, tmp_path / "eval.json")["psnr"] > 8
