"""Timing of the steps of a training, in its process."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from f3rm_ext.engine.cost import MIB, TrainingCost, device_time
from f3rm_ext.profiling.device import DeviceSampler, drivers_spill, judge_spill, start_sampler

LOSS_STEPS = 50
"""Number of steps at the end over which the loss is averaged."""
REPORT_EVERY_S = 0.5


class Stopwatch:
    """Times the steps of a window, without those of the warm-up, which compile and load, and without the last one,
    after which a run cleans splats and lifts features.

    The clock is monotonic, and is read when the device has finished its work.

    Args:
        report: called now and then with the number of steps done, and of all.
        save_after: step of the whole run after which a checkpoint is saved, while the clock stands still; 0 for none.
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
        self._rays = 0
        """Rays of the steps that are timed."""
        self._began = self._reported = 0.0
        self._sampler: DeviceSampler | None = None
        self._spilled: float | None = 0.0
        """Lower bound of the bytes that have moved to main memory; None if unknown."""

    def attach(self, trainer: Any, steps: int) -> None:
        """Makes a nerfstudio trainer, which is set up, call the stopwatch around each of its ``steps`` steps."""
        from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation

        self.first_step, self.last_step = trainer._start_step, trainer._start_step + steps
        self.device, self._save = trainer.pipeline.device, trainer.save_checkpoint
        self._count_rays = trainer.pipeline.datamanager.get_train_rays_per_batch
        self._sampler, _ = start_sampler(self.device)
        before, after = TrainingCallbackLocation.BEFORE_TRAIN_ITERATION, TrainingCallbackLocation.AFTER_TRAIN_ITERATION
        # Growth and the like happen in callbacks and belong to a step, so these are the outermost.
        trainer.callbacks = [
            TrainingCallback([before], self.before),
            *trainer.callbacks,
            TrainingCallback([after], self.after),
        ]
        train_iteration = trainer.train_iteration

        def record_loss(step: int) -> Any:
            result = train_iteration(step)
            self.losses.append(torch.as_tensor(result[0]).detach())
            return result

        trainer.train_iteration = record_loss

    def before(self, step: int) -> None:
        """Runs at the very beginning of a step."""
        if step < self.last_step - 1:
            self.cost.step_pre_backward(self.device)
        if step == self.first_step + self.warm_up:
            self._began = device_time(self.device)

    def after(self, step: int) -> None:
        """Runs at the very end of a step."""
        if step == self.last_step - 2:
            self.seconds = device_time(self.device) - self._began
        if step < self.last_step - 1:
            self.cost.step_post_backward(step, self.device)
            self._rays += self._count_rays() * (step >= self.first_step + self.warm_up)
        now = time.perf_counter()
        if now - self._reported >= REPORT_EVERY_S or step == self.last_step - 1:
            self._reported = now
            self._update_spill()
            self.report(step + 1 - self.first_step, self.last_step - self.first_step)
        if step + 1 == self.save_after:
            began = device_time(self.device)
            self._save(step)
            self._began += device_time(self.device) - began

    def _update_spill(self) -> None:
        if self.device.type == "cuda" and self._spilled is not None:
            used = None if self._sampler is None else self._sampler.now
            verdict, least = judge_spill(used, torch.cuda.memory_reserved(self.device), drivers_spill())
            self._spilled = None if verdict == "unknown" else max(self._spilled, least)

    def figures(self) -> dict[str, float]:
        """Returns ``it_per_s``, ``rays_per_s``, ``loss`` and ``train_peak_mib``; on CUDA also ``device_mib``,
        ``device_peak_mib`` (all programs) and ``spilled_mib`` (into main memory, at least).

        Figures that were not measured are absent: the speed of a run that ended early, the peak of a GPU without NVML.
        """
        figures = {"train_peak_mib": self.cost.peak_mib}
        if self.seconds > 0:
            figures["it_per_s"] = (self.last_step - 1 - self.first_step - self.warm_up) / self.seconds
            if self._rays:
                figures["rays_per_s"] = self._rays / self.seconds
        if self.losses:
            figures["loss"] = float(torch.stack([loss.float().cpu() for loss in self.losses]).mean())
        if self.device.type == "cuda":
            figures["device_mib"] = torch.cuda.get_device_properties(self.device).total_memory / MIB
            if self._sampler is not None:
                figures["device_peak_mib"] = self._sampler.take_peak() / MIB
                self._sampler.close()
            if self._spilled is not None:
                figures["spilled_mib"] = self._spilled / MIB
        return figures
