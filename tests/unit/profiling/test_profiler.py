"""Peaks by phase and snapshots at their steps; nothing that goes wrong with the profile ends the run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from f3rm_ext.profiling import memory, profiler
from f3rm_ext.profiling.device import DeviceMemory, DeviceSampler
from f3rm_ext.profiling.profile_file import NAME, read_profile
from f3rm_ext.profiling.profiler import Parts, TensorProfiler, scalars

CPU = torch.device("cpu")


class Meter:
    """A device's counter of its peak, bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = self.peak = 100
        monkeypatch.setattr(memory, "peak_bytes", lambda device: self.peak)
        monkeypatch.setattr(memory.Path, "write_text", self._reset)

    def _reset(self, *_: Any) -> None:
        self.peak = self.held

    def use(self, size: int) -> None:
        self.peak = max(self.peak, self.held + size)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    return Meter(monkeypatch)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, said: list[str]) -> Iterator[Any]:
    """Makes profilers, and closes those that a test leaves open."""
    model = nn.Linear(8, 8)
    opened = ExitStack()
    published: dict[int, dict[str, float]] = {}

    def make(
        path: Path = tmp_path / NAME, every: int = 2, model: nn.Module = model, device: torch.device = CPU
    ) -> TensorProfiler:
        made = TensorProfiler(
            path,
            device,
            lambda: Parts(model, {}, SimpleNamespace(), []),
            every=every,
            last_step=5,
            about={"method": "toy"},
            say=said.append,
            publish=lambda values, step: published.__setitem__(step, values),
        )
        made.published = published  # type: ignore[attr-defined]
        opened.callback(made.close, "finished")
        return made

    with opened:
        yield make


def test_snapshots_come_at_their_steps_and_at_the_ends(make: Any, tmp_path: Path) -> None:
    made = make(every=4)
    for step in range(6):
        made.step_pre_backward()
        with made.step(step):
            pass
        made.ends("train")
        made.step_post_backward(step)
    made.close("finished")
    profile = read_profile(tmp_path / NAME)
    assert [one.step for one in profile.snapshots] == [0, 4, 5]
    assert profile.start["method"] == "toy" and profile.end == "finished"
    assert list(made.published) == [0, 4, 5]


def test_every_phase_has_its_peak_whoever_resets_in_between(make: Any, meter: Meter) -> None:
    observers = list(memory._observers)  # other tests end within a step
    made = make()
    made.step_pre_backward()
    meter.use(500)
    memory.reset_peak(CPU)  # a model that measures for itself
    meter.use(20)
    made.ends("train")
    meter.use(70)
    made.ends("densify")
    with made.evaluation():
        meter.use(900)
    meter.use(3)
    made.step_pre_backward()
    meter.use(80)
    made.ends("train")  # the highest counts, not the last
    made.step_post_backward(0)
    peaks = {name: values["tensors"] for name, values in made.snapshots[0].phases.items()}
    assert peaks == {"train": 600, "densify": 170, "evaluation": 1000, "between steps": 103}
    made.step_post_backward(2)
    assert made.snapshots[1].phases == {}, "peaks are those since the last snapshot"
    made.close("finished")
    assert memory._observers == observers


def test_activations_are_what_autograd_keeps(make: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 1))
    made, inputs = make(model=model), torch.rand(100, 8)
    with made.step(0):
        loss = model(inputs).pow(2).sum()
        loss.backward()
    made.step_post_backward(0)
    # The input, the sigmoid's output (which the next layer keeps too) and what is squared; no weights.
    assert made.snapshots[0].activations == 4 * (100 * 8 + 100 * 16 + 100)


def test_a_steady_run_has_nothing_to_report(make: Any, said: list[str]) -> None:
    made = make(every=1)
    for step in range(8):
        made.step_post_backward(step)
    assert said == []


def test_a_full_disk_ends_the_profile_and_not_the_run(make: Any, said: list[str], tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    (tmp_path / "full").symlink_to("/dev/full")
    made = make(path=tmp_path / "full")
    made.step_post_backward(0)
    made.close("finished")
    assert len(made.snapshots) == 1
    assert len(said) == 1 and "No space left" in said[0] and "training goes on" in said[0]


@pytest.fixture
def sample_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces what measures the memory of the whole GPU, and the sentence of why nothing does."""
    return lambda sampler, why="": monkeypatch.setattr(profiler, "start_sampler", lambda device: (sampler, why))


def test_missing_nvml_is_said_once_and_the_profile_goes_on(
    make: Any, said: list[str], sample_with: Callable[..., None]
) -> None:
    sample_with(None, "NVML cannot be used.")
    made = make()
    for step in (0, 2, 4):
        made.step_post_backward(step)
    assert said == ["NVML cannot be used."] and len(made.snapshots) == 3


def test_tensorboard_gets_the_tags_that_are_documented(make: Any) -> None:
    made = make()
    made.ends("train")
    made.step_post_backward(0)
    values = scalars(made.snapshots[0])
    assert values["Tensor_Category/parameters_MB"] == pytest.approx((64 + 8) * 4 / 2**20)
    assert {"fragmentation_percent", "Large_Tensors/count", "Peak/train_tensors_MB"} <= values.keys()


def test_on_cuda_the_allocator_and_the_whole_gpu_are_recorded(
    make: Any, said: list[str], sample_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a pretended device: its tensors are those of the CPU, which count as main memory there."""
    held = {"allocated_bytes": {"current": 300, "peak": 700}, "reserved_bytes": {"current": 1000}}
    held["inactive_split_bytes"] = {"current": 50}
    nested = {name: {"all": values} for name, values in held.items()}
    card = SimpleNamespace(total_memory=24 << 30)
    for name, answer in (
        ("memory_stats_as_nested_dict", nested),
        ("reset_peak_memory_stats", None),
        ("get_device_properties", card),
        ("get_device_name", "a card"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    used = [5000]
    sampler = DeviceSampler(lambda: DeviceMemory(used[-1], 24 << 30), period_s=60.0)
    sample_with(sampler)
    made = make(device=torch.device("cuda:0"))
    made.ends("train")
    used.append(4000)
    made.ends("train")
    made.step_post_backward(0)
    made.close("finished")
    (one,) = made.snapshots
    assert (one.allocated, one.reserved, one.gaps, one.cache) == (300, 1000, 50, 650)
    assert one.fragmentation_percent == 5.0
    assert one.phases == {"train": {"tensors": 700, "device": 5000}} and one.device_used == 4000
    assert one.total == 0 and one.host["parameters"] == (64 + 8) * 4
    assert one.suspect == [] and said == []
    assert not sampler._thread.is_alive(), "sampling ends with the profile"
    assert scalars(one)["Allocator/cache_MB"] == 650 / 2**20


def test_a_driver_that_goes_away_is_said_once(make: Any, said: list[str], sample_with: Callable[..., None]) -> None:
    answers = [DeviceMemory(1, 10)]
    sampler = DeviceSampler(answers.pop, period_s=60.0)
    sample_with(sampler)
    made = make()
    for step in (0, 2):
        made.ends("train")
        made.step_post_backward(step)
    made.close("finished")
    assert said == ["The memory of the whole GPU is no longer recorded: pop from empty list."]
