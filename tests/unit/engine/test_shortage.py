"""Too little memory for a training step: what is said, and that what was saved is left alone."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from f3rm_ext.engine import checkpoint
from f3rm_ext.engine.shortage import Lever, Loss, halved, shortage
from f3rm_ext.engine.trainer import F3rmTrainer
from f3rm_ext.errors import MemoryShortageError

LEVERS = [
    Lever(Loss.NEW_START, "table", 19, 18),
    Lever(Loss.DETAIL, "degree", 3, 2),
    Lever(Loss.NOTHING, "on-gpu", "True", "False"),
    Lever(Loss.NOISE, "rays", 4096, 2048),
]


def test_what_loses_least_comes_first() -> None:
    error = shortage(7, "cuda:0", "ns-train m --load-dir run", LEVERS)
    assert str(error) == (
        "Memory ran out in training step 7 on cuda:0: the last checkpoint is intact, so continue by running "
        "`ns-train m --load-dir run` with one or more of these options, those that lose least first: "
        "--on-gpu False (now True), --rays 2048 (now 4096), --degree 2 (now 3)."
    )


def test_a_new_start_has_more_ways() -> None:
    text = str(shortage(0, "cpu", None, LEVERS))
    assert "nothing was saved yet, so start again with" in text
    assert text.endswith("--degree 2 (now 3), --table 18 (now 19).")


def test_nothing_left_to_lower() -> None:
    assert str(shortage(0, "cpu", None, [])) == (
        "Memory ran out in training step 0 on cpu: nothing was saved yet, so start again where there is more memory."
    )


@pytest.mark.parametrize(("now", "count"), [(127, 0), (128, 1), (129, 1)])
def test_nothing_is_halved_below_what_makes_sense(now: int, count: int) -> None:
    assert list(halved(Loss.NOISE, "rays", now, 64)) == [Lever(Loss.NOISE, "rays", now, 64)] * count


def raising(error: Exception, at: int) -> object:
    def on_step(_: object, step: int) -> None:
        if step == at:
            raise error

    return on_step


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=["CUDA", "CPU", "numpy"],
)
class TestTraining:
    def test_a_step_without_memory_is_one_sentence_and_leaves_what_was_saved(
        self, toy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["ns-train", "toy", "--vis", "tensorboard"])
        monkeypatch.setattr(toy.ToyPipelineConfig, "on_step", raising(error, 6))
        monkeypatch.setattr(toy.ToyData, "memory_levers", lambda self: [LEVERS[3]], raising=False)
        monkeypatch.setattr(toy.ToyModel, "memory_levers", lambda self: [LEVERS[2]], raising=False)
        config = toy.make_config(tmp_path, 9)
        with pytest.raises(MemoryShortageError) as raised:
            toy.run(config)
        folder = config.get_base_dir() / "nerfstudio_models"
        assert [step for step, _ in checkpoint.newest_first(folder)] == [4]
        assert checkpoint.is_intact(checkpoint.path_of(folder, 4))
        text = str(raised.value)
        assert text.startswith("Memory ran out in training step 6 on cpu: ") and "\n" not in text
        assert f"`ns-train toy --load-dir {folder} --vis tensorboard`" in text
        assert text.index("--on-gpu False (now True)") < text.index("--rays 2048 (now 4096)")

        monkeypatch.undo()
        whole = toy.run(toy.make_config(tmp_path, 9))
        resumed = toy.run(toy.make_config(tmp_path, 9, load_dir=folder), seed=7)
        assert resumed.pipeline.losses == {step: loss for step, loss in whole.pipeline.losses.items() if step > 4}

    def test_running_out_before_the_first_checkpoint(
        self, toy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        monkeypatch.setattr(toy.ToyPipelineConfig, "on_step", raising(error, 1))
        with pytest.raises(MemoryShortageError, match="step 1 on cpu: nothing was saved yet, so start again"):
            toy.run(toy.make_config(tmp_path, 9))

    def test_running_out_between_steps_is_none_of_training(
        self, toy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        def save(trainer: F3rmTrainer, step: int) -> None:
            raise error

        monkeypatch.setattr(F3rmTrainer, "save_checkpoint", save)
        with pytest.raises(type(error)) as raised:
            toy.run(toy.make_config(tmp_path, 9))
        assert raised.value is error


def test_other_failures_of_a_step_stay_what_they_are(
    toy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy.ToyPipelineConfig, "on_step", raising(RuntimeError("a shape does not fit"), 2))
    with pytest.raises(RuntimeError, match="a shape does not fit"):
        toy.run(toy.make_config(tmp_path, 9))
