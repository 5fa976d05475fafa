"""What a run took: peaks and steps per second, and how they survive a checkpoint."""

from pathlib import Path

import pytest
import torch

from f3rm_ext.engine import cost
from f3rm_ext.engine.cost import TrainingCost, peak_mib, reset_peak

CPU = torch.device("cpu")


def test_the_peak_is_that_since_the_reset() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of resident memory cannot be reset here")
    reset_peak(CPU)
    before = peak_mib(CPU)
    block = torch.ones(64, 1 << 20)  # 256 MiB
    del block
    assert 250 < peak_mib(CPU) - before < 400
    reset_peak(CPU)
    assert peak_mib(CPU) - before < 200


def test_steps_per_second_leave_the_first_step_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.0, 104.0])
    monkeypatch.setattr(cost.time, "perf_counter", lambda: next(clock))
    found = TrainingCost()
    speeds = []
    for step in (7, 8, 15):
        found.after_step(step, CPU)
        speeds.append(found.it_per_s)
    assert speeds == [0.0, 1.0, 2.0]
    assert found.peak_mib > 0


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
