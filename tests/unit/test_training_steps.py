"""Measurements of the pose estimator's training and of MoCo: plans, memory, times, batches that do not fit."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")
QUICK = ["--tiny", "--device", "cpu", "--warm-up", "0", "--steps", "2", "--seconds", "0"]


@pytest.fixture(scope="module")
def steps(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("training_steps")


@pytest.mark.parametrize("name", ["sparse", "dense-all"])
def test_poses_take_what_is_planned(name: str, load: Callable[[str], ModuleType]) -> None:
    """Gradients of the step before, kept while the network predicts, would take a fifth more where all is trained."""
    pytest.importorskip("accelerate")
    pytest.importorskip("diffusers")
    poses = load("pose_training")
    found = poses.run_one(name, poses.make_parser().parse_args(QUICK))
    assert found["peak_to_plan"] == pytest.approx(1, abs=0.05)
    assert (
        found["refused"] == [] and found["encoder"] == "random weights" and (found["batch"], found["images"]) == (2, 3)
    )
    assert found["timed_steps"] == found["full_timed_steps"] == 2
    assert found["full_images_per_s"] == pytest.approx(6 * found["full_steps_per_s"], rel=1e-3)
    assert found["step_ms_q1"] <= found["step_ms"] <= found["step_ms_q3"]


def test_moco_takes_what_is_planned(load: Callable[[str], ModuleType]) -> None:
    moco = load("moco_training")
    found = moco.run_one("optimized-16gb", moco.make_parser().parse_args(QUICK))
    assert found["peak_to_plan"] == pytest.approx(1, abs=0.1)
    assert (found["batch"], found["accumulation"], found["queue"], found["epochs"]) == (8, 4, 256, 600)
    assert found["images_per_s"] == pytest.approx(32 * found["steps_per_s"], rel=1e-3)
    assert found["run_steps"] == 600 * (2000 // 8) // 4


def test_batches_that_do_not_fit_are_halved_and_told(steps: ModuleType) -> None:
    def measure(batch: int) -> dict[str, Any]:
        if batch > 2:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {batch} GiB. GPU 0 is full.")
        return {"batch": batch}

    found, refused = steps.halved_until_it_fits(8, measure, steps.shortage_sentence)
    assert found == {"batch": 2}
    assert refused == [
        f"A batch of {batch} does not fit: CUDA out of memory. Tried to allocate {batch} GiB." for batch in (8, 4)
    ]
    with pytest.raises(ZeroDivisionError):
        steps.halved_until_it_fits(8, lambda batch: batch / 0, steps.shortage_sentence)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        steps.halved_until_it_fits(1, lambda batch: measure(9), steps.shortage_sentence)


def test_a_plan_that_is_refused_is_told(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    from f3rm_ext.errors import ConfigError

    moco = load("moco_training")

    def refuse(config: Any, *_: object) -> dict[str, Any]:
        if config.batch_size > 4:
            raise ConfigError(f"A batch of {config.batch_size} needs 9 GiB.")
        return {"batch": config.batch_size}

    monkeypatch.setattr(moco, "measure", refuse)
    found = moco.run_one("low-vram", moco.make_parser().parse_args(QUICK))
    assert found == {"batch": 4, "refused": ["A batch of 8 does not fit: A batch of 8 needs 9 GiB."]}


def test_times_are_those_of_timed_steps(steps: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now, took = [0.0], iter([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0])

    def step() -> float:
        now[0] += next(took)
        return 10.0

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = steps.time_steps(step, CPU, warm_up=2, steps=9, seconds=5.5)
    assert found["timed_steps"] == 3 and (found["step_ms_q1"], found["step_ms"], found["step_ms_q3"]) == (
        1500,
        2000,
        2500,
    )
    assert (found["steps_per_s"], found["images_per_s"]) == (0.5, 5.0)


def test_a_peak_is_that_of_the_measured_steps(steps: ModuleType) -> None:
    before = torch.ones(4 << 20, dtype=torch.uint8)
    with steps.TensorMemory(CPU) as memory:
        held = torch.ones(1 << 20, dtype=torch.uint8)
        torch.ones(8 << 20, dtype=torch.uint8)  # freed, and not in a measured step
        with memory.measured():
            torch.ones(2 << 20, dtype=torch.uint8)
            torch.ones(2 << 20, dtype=torch.uint8)
    del before, held
    assert memory.peak_bytes == pytest.approx(3 << 20, rel=0.01)
    found = memory.result(6 << 20, 9 << 20)
    assert (found["planned_mib"], found["peak_mib"], found["peak_to_plan"], found["whole_planned_mib"]) == (
        6,
        3,
        0.5,
        9,
    )


def test_rows_of_other_sizes_are_kept(steps: ModuleType, tmp_path: Path) -> None:
    path, options = tmp_path / "rows.json", {"device": "cpu", "out": tmp_path}
    for batch, figure in ((1, 1), (2, 2), (1, 3)):
        steps.write_rows(path, options, [{"label": "a", "batch": batch, "figure": figure}], ("label", "batch"))
    found = json.loads(path.read_text())
    assert [row["figure"] for row in found["rows"]] == [2, 3] and found["options"]["device"] == "cpu"
    path.write_text(json.dumps({**found, "versions": {"torch": "1"}}))
    steps.write_rows(path, options, [{"label": "b", "batch": 1, "figure": 4}], ("label", "batch"))
    assert [row["figure"] for row in json.loads(path.read_text())["rows"]] == [4]
