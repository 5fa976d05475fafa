"""Leaks, gaps, spills and contradictions are found, and growth that has a reason is not."""

from collections.abc import Callable
from typing import Any

import pytest

from f3rm_ext.profiling.findings import doubts, findings
from f3rm_ext.profiling.snapshot import Snapshot

MIB = 1 << 20
Made = Callable[..., Snapshot]


def kinds(snapshots: list[Snapshot]) -> list[str]:
    return [finding.kind for finding in findings(snapshots)]


def test_a_leak_is_reported_with_its_tensors(made: Made) -> None:
    steady = {"zeros float32 [9]": [3, 900 * MIB]}
    snapshots = [
        made(step, parameters=10, other=step, groups={**steady, "unnamed float32 [512, 512]": [step, step * MIB]})
        for step in range(0, 60, 10)
    ]
    (leak,) = findings(snapshots)
    assert leak.kind == "leak"
    assert leak.text == (
        "Memory leaks: 40.0 MiB more between steps 10 and 50, about 100.0 MiB in 100 steps, that neither parameters "
        "nor images explain. Most of it is in 50 × unnamed float32 [512, 512] (50.0 MiB; 10 before)."
    )


@pytest.mark.parametrize(
    "options",
    [
        [{"parameters": 10 + step, "buffers": 1 + step / 10} for step in range(0, 60, 10)],
        [{"parameters": 10, "buffers": 1 if step < 30 else 50} for step in range(0, 60, 10)],
        [{"parameters": 10, "other": 1 + 0.01 * step} for step in range(0, 60, 10)],
        [{"parameters": 10, "other": step % 20} for step in range(0, 60, 10)],
        [{}, *({"parameters": 10, "other": 50} for _ in range(5))],
        [{"parameters": 10, "other": step} for step in range(0, 40, 10)],
    ],
    ids=["Gaussians grow", "one jump", "too small", "up and down", "the first step", "too few"],
)
def test_growth_with_a_reason_is_no_leak(made: Made, options: list[dict[str, Any]]) -> None:
    assert kinds([made(10 * index, **one) for index, one in enumerate(options)]) == []


def test_a_leak_that_python_does_not_see_shows_in_what_torch_has_allocated(made: Made) -> None:
    snapshots = [
        made(step, parameters=10, allocated=(10 + step) * MIB, reserved=100 * MIB, gaps=0) for step in range(0, 60, 10)
    ]
    (leak,) = findings(snapshots)
    assert leak.text.endswith("Python holds no tensor for it: a function or a hook of autograd does.")


def test_gaps_are_fragmentation_and_cache_is_not(made: Made) -> None:
    cached = made(1, allocated=100 * MIB, reserved=1000 * MIB, gaps=10 * MIB)
    assert cached.cache == 890 * MIB and kinds([cached]) == []
    torn = made(2, allocated=100 * MIB, reserved=1000 * MIB, gaps=450 * MIB)
    (finding,) = findings([cached, torn])
    assert finding.kind == "fragmentation" and "45 %" in finding.text and "step 2" in finding.text
    assert kinds([made(3, allocated=10, reserved=20 * MIB, gaps=15 * MIB)]) == [], "too little to matter"


def test_spills_are_found_or_said_to_be_unknown(made: Made) -> None:
    assert kinds([made(1, spill="none")]) == []
    found, unknown = findings([made(1, spill="found", spilled=300 * MIB)]) + findings([made(7, spill="unknown")])
    assert "300.0 MiB" in found.text
    assert "cannot be seen here (step 7)" in unknown.text


def test_large_tensors_without_an_owner_are_named(made: Made) -> None:
    stray = {"name": "unnamed float32 [9]", "category": "other", "bytes": 30 * MIB}
    (finding,) = findings([made(1, parameters=10, other=30, largest=[stray])])
    assert finding.kind == "large" and "unnamed float32 [9] (30.0 MiB)" in finding.text


def test_figures_that_contradict_each_other_are_suspect(made: Made) -> None:
    sound = made(1, parameters=10, allocated=11 * MIB, reserved=20 * MIB, gaps=0, device_used=500 * MIB)
    peaks = {"train": {"tensors": 15 * MIB}}
    assert doubts(made(1, **_like(sound), phases=peaks), True) == []
    assert "is below the tensors" in doubts(made(1, **_like(sound), phases={"train": {"tensors": 5 * MIB}}), True)[0]
    other_gpu = {**_like(sound), "device_used": 15 * MIB}
    assert "less than torch has reserved" in doubts(made(1, **other_gpu, phases=peaks), True)[0]
    assert "swapped" in doubts(made(1, parameters=10, resident=MIB), False)[0]
    assert kinds([made(1, suspect=["a figure is off"])]) == ["suspect"]


def _like(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "parameters": 10,
        **{name: getattr(snapshot, name) for name in ("allocated", "reserved", "gaps", "device_used")},
    }
