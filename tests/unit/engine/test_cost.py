"""What a run took: peaks and steps per second, and how they survive a checkpoint."""

import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from f3rm_ext.engine import cost
from f3rm_ext.engine.cost import TrainingCost, peak_mib, reset_peak
from f3rm_ext.profiling import memory

CPU = torch.device("cpu")


class Meter:
    """A device's counter of its peak, MiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = self.peak = 100.0
        monkeypatch.setattr(cost, "peak_mib", lambda device: self.peak)
        monkeypatch.setattr(cost, "reset_peak", self.reset)

    def reset(self, device: torch.device) -> None:
        self.peak = self.held

    def use(self, mib: float) -> None:
        """Takes so much more, and gives it back."""
        self.peak = max(self.peak, self.held + mib)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    return Meter(monkeypatch)


def test_the_peak_is_that_since_the_reset() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of resident memory cannot be reset here")
    reset_peak(CPU)
    before = peak_mib(CPU)
    # Mapped anew: what torch is given may be resident already, left by an earlier test.
    with mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    assert 250 < peak_mib(CPU) - before < 400
    reset_peak(CPU)
    assert peak_mib(CPU) - before < 200


def test_a_system_without_proc_tells_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")

    def refuse(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(memory.Path, "read_text", refuse)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=2048))
    for platform, peak in (("linux", 2 << 20), ("darwin", 2048)):
        monkeypatch.setattr(sys, "platform", platform)
        assert memory.peak_bytes(CPU) == memory.resident_bytes() == peak
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert memory.peak_bytes(CPU) == memory.resident_bytes() == 0


def test_steps_per_second_leave_the_first_step_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.0, 104.0])
    monkeypatch.setattr(cost.time, "perf_counter", lambda: next(clock))
    found = TrainingCost()
    speeds = []
    for step in (7, 8, 15):
        found.step_post_backward(step, CPU)
        speeds.append(found.it_per_s)
    assert speeds == [0.0, 1.0, 2.0]
    assert found.peak_mib > 0


def test_a_reset_within_a_step_hides_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    peak_bytes = 0
    for module in (cost, memory):
        monkeypatch.setattr(module, "peak_bytes", lambda device: peak_bytes)
    outer, inner = TrainingCost(), TrainingCost()
    for step, taken_mib in enumerate((300, 50)):
        for found in (outer, inner):
            found.step_pre_backward(CPU)
        peak_bytes = taken_mib << 20
        memory.reset_peak(CPU)  # as the tensor profiler does after the optimiser's step
        peak_bytes = 1 << 20
        for found in (inner, outer):
            found.step_post_backward(step, CPU)
    peak_bytes = 900 << 20
    memory.reset_peak(CPU)  # between steps
    assert inner.peak_mib == outer.peak_mib == 300


@pytest.mark.parametrize("resets", [False, True], ids=["evaluation batch", "picture"])
def test_what_is_drawn_between_steps_neither_counts_nor_hides_a_peak(meter: Meter, resets: bool) -> None:
    found = TrainingCost()
    for step, taken in enumerate((50, 20)):
        found.step_pre_backward(CPU)
        meter.use(taken)
        found.step_post_backward(step, CPU)
        if resets:
            meter.reset(CPU)
        meter.use(400)
    assert found.metrics(CPU) == {
        "train_peak_memory_mib": 150,
        "train_it_per_s": found.it_per_s,
        "eval_peak_memory_mib": 500,
    }


@pytest.mark.parametrize(("saved", "expected"), [(30.0, 110.0), (700.0, 700.0)])
def test_a_resumed_run_keeps_the_larger_peak(meter: Meter, saved: float, expected: float) -> None:
    found = TrainingCost()
    found.restore({"train_peak_mib": saved, "train_it_per_s": 1.0})
    found.step_pre_backward(CPU)
    meter.use(10)
    found.step_post_backward(8, CPU)
    assert found.peak_mib == expected


def test_a_checkpoint_keeps_them_and_an_older_one_has_none() -> None:
    saved, opened = TrainingCost(), TrainingCost()
    saved.peak_mib, saved.it_per_s = 12.0, 3.5
    opened.restore({**saved.state(), "extent": 1.0})
    assert opened.state() == saved.state()
    assert opened.metrics(CPU) == {
        "train_peak_memory_mib": 12.0,
        "train_it_per_s": 3.5,
        "eval_peak_memory_mib": pytest.approx(peak_mib(CPU), rel=0.1),
    }
    opened.restore({})
    assert opened.state() == TrainingCost().state()
