"""--profile-tensors under nerfstudio's own loop, on a toy model."""

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from f3rm_ext.engine import profiled
from f3rm_ext.profiling import memory
from f3rm_ext.profiling.profile_file import NAME, Profile, read_profile


def profile_of(trainer: Any) -> Profile:
    return read_profile(trainer.base_dir / NAME)


def test_a_run_is_profiled_from_its_first_step_to_its_last(train: Callable[..., Any]) -> None:
    observers = list(memory._observers)  # other tests end within a step
    trainer = train(8, profile_tensors=True, profile_tensors_every=3)
    profile = profile_of(trainer)
    assert [one.step for one in profile.snapshots] == [0, 3, 6, 7]
    assert profile.end == "finished" and profile.start["method"] == "toy" and profile.device_total > 0
    last = profile.snapshots[-1]
    weights = (3 * 2 + 2) * 4
    assert last.categories["parameters"] == last.categories["gradients"] == weights
    assert last.categories["optimizer"] >= 2 * weights
    assert set(profile.peaks()) == {"train", "between steps"}
    assert memory._observers == observers


def test_without_the_option_there_is_none_and_training_is_the_same(
    train: Callable[..., Any], in_each_step: Callable[..., None]
) -> None:
    in_each_step(random.seed)  # the checks of types in tests draw from Python's generator
    plain = train(6)
    measured = train(6, profile_tensors=True, profile_tensors_every=1)
    assert not (plain.base_dir / NAME).exists()
    assert plain.pipeline.losses == measured.pipeline.losses


@pytest.mark.parametrize("vis", ["tensorboard", "viewer"])
def test_tensorboard_has_the_figures_even_if_the_run_writes_no_others(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, vis: str
) -> None:
    from f3rm_ext.workflow.records import read_scalars

    if vis == "viewer":  # The writers of nerfstudio stay from run to run within a process.
        monkeypatch.setattr(profiled.writer, "EVENT_WRITERS", [])
        monkeypatch.setattr(profiled.writer, "setup_event_writer", lambda *_, **__: None)
    trainer = train(4, profile_tensors=True, profile_tensors_every=2)
    curves = read_scalars(trainer.base_dir)
    for tag in ("Tensor_Category/parameters_MB", "fragmentation_percent", "Large_Tensors/count"):
        assert [step for step, _ in curves[f"TensorProfiling/{tag}"]] == [0, 2, 3], tag


def test_a_planted_leak_is_reported_in_training(
    train: Callable[..., Any], in_each_step: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = []
    in_each_step(lambda step: kept.append(torch.zeros(1 << 20, dtype=torch.uint8)))
    train(8, profile_tensors=True, profile_tensors_every=1)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("Memory leaks:") == 1 and "unnamed uint8 [1048576]" in said


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), "memory ran out"),
        (KeyError("x"), "failed with KeyError"),
        (SystemExit(130), "stopped"),
    ],
)
def test_the_profile_says_how_a_run_ended(
    toy: ModuleType,
    make_config: Callable[..., Any],
    fail_in_step: Callable[..., None],
    error: BaseException,
    reason: str,
) -> None:
    fail_in_step(error, 2)
    config = make_config(5, profile_tensors=True)
    with pytest.raises(BaseException):  # noqa: B017
        toy.run(config)
    assert read_profile(config.get_base_dir() / NAME).end == reason
