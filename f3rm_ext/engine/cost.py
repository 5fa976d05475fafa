"""Cost of training and rendering: peak memory of the device in use, and steps per second."""

import time
from collections.abc import Mapping
from contextlib import ExitStack

import torch

from f3rm_ext.profiling.memory import MIB, observed_resets, peak_bytes, reset_peak


def peak_mib(device: torch.device) -> float:
    """Returns the peak since the last reset, MiB: torch's allocations on CUDA, the process's resident memory on CPU."""
    return peak_bytes(device) / MIB


def device_time(device: torch.device) -> float:
    """Returns the time, seconds of :func:`time.perf_counter`, when a device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class TrainingCost:
    """Peak memory and speed of a run so far. The peak is that of training steps alone, not of renders between them."""

    def __init__(self) -> None:
        self.peak_mib = 0.0
        """Peak of all training steps, including those before a resume, MiB; 0 before training."""
        self.it_per_s = 0.0
        """Mean steps per second of the process that trained last, including saving and evaluation between steps; 0
        before its second step."""
        self._first: tuple[int, float] | None = None
        self._step = ExitStack()

    def step_pre_backward(self, device: torch.device) -> None:
        """Resets the peak; call it before every step, so that renders between steps do not count."""
        self._step.close()  # of a step that failed
        reset_peak(device)
        self._step.enter_context(observed_resets(self._note_peak))  # the tensor profiler resets it within a step

    def _note_peak(self, device: torch.device) -> None:
        self.peak_mib = max(self.peak_mib, peak_mib(device))

    def step_post_backward(self, step: int, device: torch.device) -> None:
        """Records a step; call it after every step. The first one compiles and loads, so its speed does not count."""
        self._note_peak(device)
        self._step.close()
        now = time.perf_counter()
        if self._first is None:
            self._first = (step, now)
            return
        first, began = self._first
        self.it_per_s = (step - first) / max(now - began, 1e-9)

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Returns the metrics for ns-eval: those of training, and the peak since the last :func:`reset_peak`."""
        return {
            "train_peak_memory_mib": self.peak_mib,
            "train_it_per_s": self.it_per_s,
            "eval_peak_memory_mib": peak_mib(device),
        }

    def state(self) -> dict[str, float]:
        return {"train_peak_mib": self.peak_mib, "train_it_per_s": self.it_per_s}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restores what :meth:`state` returned; ignores other entries and tolerates missing ones."""
        self.peak_mib = float(state.get("train_peak_mib", 0.0))
        self.it_per_s = float(state.get("train_it_per_s", 0.0))
