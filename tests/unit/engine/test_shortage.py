"""Too little memory for a training step: what is said, and that what was saved is left alone."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from f3rm_ext.engine import checkpoint
from f3rm_ext.engine.trainer import F3rmTrainer, F3rmTrainerConfig
from f3rm_ext.errors import MemoryShortageError
from f3rm_ext.memory.options import MemoryOption, QualityImpact, halve
from f3rm_ext.memory.shortage import is_out_of_memory, shortage_error

Train = Callable[..., F3rmTrainer]
MakeConfig = Callable[..., F3rmTrainerConfig]

OPTIONS = [
    MemoryOption(QualityImpact.RESTART, "table", 19, 18),
    MemoryOption(QualityImpact.DETAIL, "degree", 3, 2),
    MemoryOption(QualityImpact.NONE, "on-gpu", "True", "False"),
    MemoryOption(QualityImpact.NOISE, "rays", 4096, 2048),
]


def test_the_least_harmful_option_comes_first() -> None:
    text = str(shortage_error(7, "cuda:0", OPTIONS, resume="ns-train m --load-dir run"))
    assert "step 7 on cuda:0" in text and "`ns-train m --load-dir run`" in text
    assert text.endswith(": --on-gpu False (now True), --rays 2048 (now 4096), --degree 2 (now 3).")


def test_a_new_run_has_more_options_and_may_have_none() -> None:
    text = str(shortage_error(0, "cpu", OPTIONS))
    assert "start again" in text and text.endswith("--degree 2 (now 3), --table 18 (now 19).")
    assert "more memory" in str(shortage_error(0, "cpu", [])) and "--" not in str(shortage_error(0, "cpu", []))


@pytest.mark.parametrize(("now", "count"), [(127, 0), (128, 1), (129, 1)])
def test_nothing_is_halved_below_what_makes_sense(now: int, count: int) -> None:
    halved = MemoryOption(QualityImpact.NOISE, "rays", now, now // 2)
    assert list(halve(QualityImpact.NOISE, "rays", now, 64)) == [halved] * count


def test_main_memory_that_runs_out_on_windows_is_recognised() -> None:
    said = "[enforce fail at alloc_cpu.cpp:116] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."
    assert is_out_of_memory(RuntimeError(said)) and not is_out_of_memory(ValueError(said))


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
        self,
        toy: ModuleType,
        make_config: MakeConfig,
        train: Train,
        monkeypatch: pytest.MonkeyPatch,
        set_command_line: Callable[..., None],
        fail_in_step: Callable[..., None],
        error: Exception,
    ) -> None:
        set_command_line("ns-train", "toy", "--vis", "tensorboard")
        fail_in_step(error, 6)
        # Classes of their own: isinstance remembers which classes a protocol has accepted.
        for name, option in (("ToyData", OPTIONS[3]), ("ToyModel", OPTIONS[2])):
            saving = type(name, (getattr(toy, name),), {"memory_options": lambda self, option=option: [option]})
            monkeypatch.setattr(toy, name, saving)
        config = make_config(9)
        with pytest.raises(MemoryShortageError) as raised:
            toy.run(config)
        folder = config.get_base_dir() / "nerfstudio_models"
        assert [step for step, _ in checkpoint.newest_first(folder)] == [4]
        assert checkpoint.is_intact(checkpoint.make_path(folder, 4))
        text = str(raised.value)
        assert text.startswith("Memory ran out in training step 6 on cpu: ") and "\n" not in text
        assert f"`ns-train toy --load-dir {folder} --vis tensorboard`" in text
        assert text.index("--on-gpu False (now True)") < text.index("--rays 2048 (now 4096)")

        monkeypatch.undo()
        whole = train(9)
        resumed = train(9, load_dir=folder, seed=7)
        assert resumed.pipeline.losses == {step: loss for step, loss in whole.pipeline.losses.items() if step > 4}

    def test_running_out_before_the_first_checkpoint(
        self, train: Train, fail_in_step: Callable[..., None], error: Exception
    ) -> None:
        fail_in_step(error, 1)
        with pytest.raises(MemoryShortageError, match=r"step 1 .*nothing was saved"):
            train(9)

    def test_running_out_between_steps_is_none_of_training(
        self, train: Train, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        def save(trainer: F3rmTrainer, step: int) -> None:
            raise error

        monkeypatch.setattr(F3rmTrainer, "save_checkpoint", save)
        with pytest.raises(type(error)) as raised:
            train(9)
        assert raised.value is error


def test_other_failures_of_a_step_stay_what_they_are(train: Train, fail_in_step: Callable[..., None]) -> None:
    fail_in_step(RuntimeError("a shape does not fit"), 2)
    with pytest.raises(RuntimeError, match="a shape"):
        train(9)
