"""Timing of a run's training steps, and counts of what a step asks of the device: operators, launches, waits."""

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation

from f3rm_ext.engine.cost import device_time

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of the CUDA runtime that hold the host until the device has finished. The profiler itself ends with
cudaDeviceSynchronize, so that is not among them."""
SYNC_WARNING = "synchronizing CUDA operation"
"""What torch says of an operator that waits, in its debug mode for synchronisations."""


class RunIsOver(Exception):
    """Ends a run before its last step."""


class StepWatch:
    """Times the steps of a run, ends it, and counts what its last steps ask of the device.

    A step lasts from the first callback before it to the first callback before the next one, so it includes what the
    trainer does in between. The device is waited for at both ends of the timed part alone. Of the counted steps, which
    are not timed, every other one runs under torch's profiler; the rest run in its debug mode for synchronisations.

    Args:
        steps: steps until the counting begins, at most.
        warm_up: steps at the beginning that are not timed.
        seconds: of the timed steps, after which the counting begins earlier, but not before the second of them; 0 for
            no limit.
        counted: steps to count, 2 or more; 0 for none.
    """

    def __init__(self, device: torch.device, steps: int, warm_up: int, seconds: float = 0.0, counted: int = 0) -> None:
        self.device = device
        self.steps, self.warm_up, self.seconds, self.counted = steps, min(warm_up, max(0, steps - 2)), seconds, counted
        self.starts: list[float] = []
        self.timed_s = 0.0
        """Seconds of the timed steps."""
        self._over = False
        self._counts: list[Counter[str]] = []
        self._warnings: list[int] = []
        self._open: Any = None

    def attach(self, trainer: Any) -> None:
        """Adds the first and the last of a trainer's callbacks. Call it between ``setup`` and ``train``."""
        before, after = TrainingCallbackLocation.BEFORE_TRAIN_ITERATION, TrainingCallbackLocation.AFTER_TRAIN_ITERATION
        first = TrainingCallback([before], self._before, update_every_num_iters=1)
        last = TrainingCallback([after], self._after, update_every_num_iters=1)
        trainer.callbacks = [first, *trainer.callbacks, last]

    def run(self, train: Callable[[], None]) -> None:
        """Trains until the watch ends it."""
        try:
            train()
        except RunIsOver:
            return
        if not self._over:
            raise RuntimeError(f"The run ended by itself after {len(self.starts)} of {self.steps} steps.")

    def result(self) -> dict[str, Any]:
        """Returns the figures, for JSON; counts are None where they cannot be had."""
        timed = max(1, len(self.starts) - 1 - self.warm_up)
        ms = [1e3 * (b - a) for a, b in zip(self.starts, self.starts[1:], strict=False)][self.warm_up :]
        q1, _, q3 = statistics.quantiles(ms, n=4) if len(ms) > 1 else (ms * 3)
        cuda = self.device.type == "cuda"
        return {
            "steps": len(self.starts) - 1,
            "timed_steps": timed,
            "timed_s": round(self.timed_s, 3),
            "it_per_s": timed / self.timed_s,
            "step_ms": round(1e3 * self.timed_s / timed, 3),
            "host_step_ms_q1": round(q1, 3),
            "host_step_ms_q3": round(q3, 3),
            "operators_per_step": _mean(count["operators"] for count in self._counts),
            "launches_per_step": _mean(count["launches"] for count in self._counts) if cuda else None,
            "synchronisations_per_step": _mean(count["waits"] for count in self._counts) if cuda else None,
            "sync_warnings_per_step": _mean(self._warnings) if cuda else None,
        }

    def _before(self, step: int) -> None:
        if self._over:
            done = len(self._counts) + len(self._warnings)
            if done >= self.counted:
                raise RunIsOver
            self._open = self._profile() if done % 2 == 0 else SyncWarnings(self.device)
            self._open.__enter__()
            return
        done = len(self.starts)
        now = device_time(self.device) if done == self.warm_up else time.perf_counter()
        late = self.seconds and done > self.warm_up and now - self.starts[self.warm_up] > self.seconds
        if (late or done >= self.steps) and done > self.warm_up + 1:
            now, self._over = device_time(self.device), True
            self.starts.append(now)
            self.timed_s = now - self.starts[self.warm_up]
            self._before(step)
            return
        self.starts.append(now)

    def _after(self, step: int) -> None:
        if self._open is None:
            return
        opened, self._open = self._open, None
        opened.__exit__(None, None, None)
        if isinstance(opened, torch.profiler.profile):
            self._counts.append(tally(event.name for event in opened.events() or ()))
        else:
            self._warnings.append(opened.found)

    def _profile(self) -> torch.profiler.profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        return torch.profiler.profile(activities=activities)


class SyncWarnings:
    """Counts the warnings of torch's debug mode for synchronisations; ``found`` has their number in the end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.found = 0

    def __enter__(self) -> "SyncWarnings":
        self._caught = warnings.catch_warnings(record=True)
        self._said: Any = self._caught.__enter__()
        warnings.simplefilter("always")
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(None, None, None)
        self.found = sum(SYNC_WARNING in str(warning.message) for warning in self._said)


def tally(names: Iterable[str]) -> Counter[str]:
    """Counts a profile's events by kind.

    >>> sorted(tally(["aten::add", "cudaLaunchKernel", "cuLaunchKernelEx", "cudaStreamSynchronize"]).items())
    [('launches', 2), ('operators', 1), ('waits', 1)]
    """
    counts: Counter[str] = Counter()
    for name in names:
        if name.startswith("aten::"):
            counts["operators"] += 1
        elif name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch")):
            counts["launches"] += 1
        elif name in WAITS:
            counts["waits"] += 1
    return counts


def time_ms(call: Callable[[], object], device: torch.device, repeats: int, seconds: float = 10.0) -> dict[str, float]:
    """Returns median and quartiles of the time of a call, ms, after one call that is not counted.

    Args:
        device: waited for before and after each call.
        repeats: calls at most, 1 or more.
        seconds: time after which no further call begins.
    """

    def once() -> float:
        begin = device_time(device)
        call()
        return 1e3 * (device_time(device) - begin)

    begin = time.perf_counter()
    once()
    times: list[float] = []
    while not times or (len(times) < repeats and time.perf_counter() - begin < seconds):
        times.append(once())
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {"ms": round(median, 3), "ms_q1": round(q1, 3), "ms_q3": round(q3, 3), "repeats": len(times)}


def _mean(values: Iterable[int]) -> float | None:
    found = list(values)
    return round(sum(found) / len(found), 1) if found else None
