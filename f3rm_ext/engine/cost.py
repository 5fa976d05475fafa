"""What training and looking take: peak memory on whichever device works, and steps per second."""

import time
from collections.abc import Mapping
from pathlib import Path

import torch

MIB = 1024**2


def reset_peak(device: torch.device) -> None:
    """Starts a new stretch. On the CPU this needs Linux; elsewhere the peak since the start of the process stays."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak_mib(device: torch.device) -> float:
    """Peak since the last reset, MiB: memory allocated by torch on CUDA, resident memory of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError, ValueError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class TrainingCost:
    """What a run took so far. Its peak is that of training steps alone, whatever is drawn between them."""

    def __init__(self) -> None:
        self.peak_mib = 0.0
        """Peak of all training steps, also of those before a resume, MiB; 0 before training."""
        self.it_per_s = 0.0
        """Steps per second of the process that trained last, on average, saving and evaluation between steps included;
        0 before its second step."""
        self._first: tuple[int, float] | None = None

    def before_step(self, device: torch.device) -> None:
        """To be called before every step: what was held since the last one is not training's."""
        reset_peak(device)

    def after_step(self, step: int, device: torch.device) -> None:
        """To be called after every step; the first one, which compiles and loads, does not count for the speed."""
        self.peak_mib = max(self.peak_mib, peak_mib(device))
        now = time.perf_counter()
        if self._first is None:
            self._first = (step, now)
            return
        first, began = self._first
        self.it_per_s = (step - first) / max(now - began, 1e-9)

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Those of ns-eval: of the training, and of what was drawn since the last :func:`reset_peak`."""
        return {
            "train_peak_memory_mib": self.peak_mib,
            "train_it_per_s": self.it_per_s,
            "eval_peak_memory_mib": peak_mib(device),
        }

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"train_peak_mib": self.peak_mib, "train_it_per_s": self.it_per_s}

    def restore(self, state: Mapping[str, float]) -> None:
        """Takes over :meth:`state`, of which other entries and missing ones do no harm."""
        self.peak_mib = float(state.get("train_peak_mib", 0.0))
        self.it_per_s = float(state.get("train_it_per_s", 0.0))
