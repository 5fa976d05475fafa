"""Timing of a window of training steps, in the process that trains."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from f3rm_ext.engine.cost import MIB, TrainingCost, device_time
from f3rm_ext.profiling.device import DeviceSampler, drivers_spill, spill_of, start_sampler

LOSS_STEPS = 50
"""The loss is the mean over this many steps at the end."""
REPORT_EVERY_S = 0.5


class Stopwatch:
    """Measures the steps of a window but its first ones, which compile and load.

    The clock is monotonic, and the device has finished its work when it is read.

    Args:
        warm_up: steps at the beginning that do not count.
        report: called now and then with the steps done and their number.
        save_after: steps of the whole run after which a checkpoint is saved, which does not count; 0 for none.
    """

    def __init__(
        self,
        warm_up: int,
        report: Callable[[int, int], None] = lambda done, total: None,
        save_after: int = 0,
    ) -> None:
        self.warm_up, self.report, self.save_after = warm_up, report, save_after
        self.cost = TrainingCost()
        self.losses: deque[torch.Tensor] = deque(maxlen=LOSS_STEPS)
        self.first_step = self.last_step = 0
        self.seconds = 0.0
        self._began = self._reported = 0.0
        self._sampler: DeviceSampler | None = None
        self._spilled: float | None = 0.0
        """Bytes that have moved to main memory, at least; None if that cannot be seen."""

    def attach(self, trainer: Any, steps: int) -> None:
        """Has a nerfstudio trainer call this around its steps; call it when the trainer is set up.

        Args:
            trainer: about to train.
            steps: number of steps it will make.
        """
        from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation

        self.first_step, self.last_step = trainer._start_step, trainer._start_step + steps
        self.device, self._save = trainer.pipeline.device, trainer.save_checkpoint
        self._sampler, _ = start_sampler(self.device)
        before, after = TrainingCallbackLocation.BEFORE_TRAIN_ITERATION, TrainingCallbackLocation.AFTER_TRAIN_ITERATION
        # Growth and the like happen in callbacks and belong to a step, so these are the outermost.
        trainer.callbacks = [
            TrainingCallback([before], self.before),
            *trainer.callbacks,
            TrainingCallback([after], self.after),
        ]
        inner = trainer.train_iteration

        def watched(step: int) -> Any:
            result = inner(step)
            self.losses.append(torch.as_tensor(result[0]).detach())
            return result

        trainer.train_iteration = watched

    def before(self, step: int) -> None:
        """Runs before everything else of a step."""
        self.cost.before_step(self.device)
        if step == self.first_step + self.warm_up:
            self._began = device_time(self.device)

    def after(self, step: int) -> None:
        """Runs after everything else of a step."""
        if step == self.last_step - 1:
            self.seconds = device_time(self.device) - self._began
        self.cost.after_step(step, self.device)
        now = time.perf_counter()
        if now - self._reported >= REPORT_EVERY_S or step == self.last_step - 1:
            self._reported = now
            self._look_for_spill()
            self.report(step + 1 - self.first_step, self.last_step - self.first_step)

        if step + 1 == self.save_after:
            began = device_time(self.device)
            self._save(step)
            self._began += device_time(self.device) - began

    def _look_for_spill(self) -> None:
        if self.device.type == "cuda" and self._spilled is not None:
            used = None if self._sampler is None else self._sampler.now
            verdict, least = spill_of(used, torch.cuda.memory_reserved(self.device), drivers_spill())
            self._spilled = None if verdict == "unknown" else max(self._spilled, least)

    def figures(self) -> dict[str, float]:
        """Returns what was measured: ``it_per_s``, ``loss``, ``train_peak_mib``; on CUDA also ``device_mib``,
        ``device_peak_mib`` (all programs) and ``spilled_mib`` (into main memory, at least).

        What was not measured is left out: a run that ended early has no speed, a GPU without NVML no peak of its own.
        """
        found = {"train_peak_mib": self.cost.peak_mib}
        if self.seconds > 0:
            found["it_per_s"] = (self.last_step - self.first_step - self.warm_up) / self.seconds
        if self.losses:
            found["loss"] = float(torch.stack([loss.float().cpu() for loss in self.losses]).mean())
        if self.device.type == "cuda":
            found["device_mib"] = torch.cuda.get_device_properties(self.device).total_memory / MIB
            if self._sampler is not None:
                found["device_peak_mib"] = self._sampler.take_peak() / MIB
                self._sampler.close()
            if self._spilled is not None:
                found["spilled_mib"] = self._spilled / MIB
        return found
