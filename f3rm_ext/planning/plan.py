"""Makes a plan: memory, coverage of the images, time, and advice."""

import copy
import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.memory.estimate import MemoryEstimate
from f3rm_ext.planning.advice import Advice, Peak, advise, largest, sum_peak
from f3rm_ext.planning.coverage import PlannedCoverage, plan_coverage
from f3rm_ext.planning.estimator import Estimator
from f3rm_ext.planning.gaussians import Growth, plan_growth
from f3rm_ext.planning.question import Question
from f3rm_ext.planning.request import ImageSizes, PlanRequest
from f3rm_ext.planning.throughput import Throughput

RAYS_OPTION = "pipeline.datamanager.train-num-rays-per-batch"
RAYS_UNIT, GAUSSIANS_UNIT = 256, 10_000
"""The largest numbers that fit are rounded down to multiples of these."""


@dataclass(frozen=True)
class Plan:
    """Memory, coverage and time of a run, with advice."""

    question: Question
    request: PlanRequest
    sizes: ImageSizes
    estimate: MemoryEstimate
    coverage: PlannedCoverage
    growth: Growth | None
    """Predicted number of Gaussians; None for fields."""
    advice: Advice
    most: tuple[str, int] | None
    """The option with the largest effect on memory, and its largest value that fits; 0 if none does."""
    throughput: Throughput | None
    """None if the speed was not measured."""
    wanted_epochs: float | int | None = None
    """Epochs for which to compute the steps."""

    @property
    def fits(self) -> bool:
        """Whether training and pictures fit with the options as they are."""
        return not self.advice.savings and self.advice.fits and self.advice.pictures_fit

    @property
    def command(self) -> str:
        """The command to type, with the advised options."""
        return shlex.join(self.question.command(self.advice.options))

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data, for JSON. Bytes are whole numbers, times seconds."""
        estimate, device, advice = self.estimate, self.request.device, self.advice
        peaks: tuple[Peak, ...] = ("training", "pictures")
        coverage, speed = self.coverage, self.throughput
        goal = None if self.wanted_epochs is None else coverage.epochs_to_steps(self.wanted_epochs)
        return {
            "method": self.question.method,
            "command": shlex.join(self.question.command()),
            "device": {
                **dataclasses.asdict(device),
                "usable_bytes": device.usable_bytes,
                "bandwidth_gb_s": device.bandwidth_gb_s,
            },
            "processes": self.request.processes,
            "capture": {**dataclasses.asdict(self.request.capture), "source": self.sizes.source},
            "memory": {
                "fits": self.fits,
                "peak_bytes": {phase: estimate.peak(phase) for phase in estimate.device},
                "device_bytes": {phase: dict(items) for phase, items in estimate.device.items()},
                "host_bytes": dict(estimate.host),
            },
            "gaussians": None if self.growth is None else dataclasses.asdict(self.growth),
            "coverage": {
                **dataclasses.asdict(coverage),
                "steps_per_epoch": coverage.steps_per_epoch,
                "coverage": coverage.coverage,
                "wanted_epochs": self.wanted_epochs,
                "steps_for_wanted_epochs": goal,
            },
            "time": None if speed is None else {**dataclasses.asdict(speed), "eta_s": speed.duration_s(coverage.steps)},
            "advice": {
                "fits": advice.fits,
                "command": self.command,
                "pictures_fit": advice.pictures_fit,
                "peak_bytes": {peak: sum_peak(advice.estimate, peak) for peak in peaks},
                "options": [
                    {
                        "set": dict(saving.options),
                        "now": saving.now,
                        "quality_impact": saving.quality_impact.name.lower(),
                        "lowers": saving.peak,
                        "saved_bytes": saving.saved_bytes,
                    }
                    for saving in advice.savings
                ],
            },
            "most_that_fits": None if self.most is None else {self.most[0]: self.most[1]},
        }


def make_plan(
    question: Question,
    estimate: Estimator,
    *,
    measure: Callable[[F3rmTrainerConfig, ImageSizes], Throughput | None] | None = None,
    wanted_epochs: float | int | None = None,
) -> Plan:
    """Plans a run.

    Args:
        measure: returns the measured speed of a run, or None; None to go without.

    Raises:
        UserError: an option, the card or the capture cannot be used.
    """
    request = question.request()
    sizes, growth = question.sizes(request.config), plan_growth(request)
    speed = None if measure is None else measure(request.config, sizes)
    return Plan(
        question=question,
        request=request,
        sizes=sizes,
        estimate=estimate(request),
        coverage=plan_coverage(request.config, sizes, request.processes),
        growth=growth,
        advice=advise(lambda options: question.request(options) if options else request, estimate),
        most=most_that_fits(request, growth, estimate),
        throughput=speed,
        wanted_epochs=wanted_epochs,
    )


def most_that_fits(request: PlanRequest, growth: Growth | None, estimate: Estimator) -> tuple[str, int] | None:
    """Returns the option with the largest effect on memory, and its largest value that fits with the others unchanged.

    That is the number of Gaussians or of rays per step; None where a run has neither.
    """
    splats, manager = growth is not None, request.config.pipeline.datamanager
    now = getattr(manager, "train_num_rays_per_batch", None) if growth is None else growth.last
    if not isinstance(now, int):
        return None

    def bytes_with(count: int) -> int:
        changed = dataclasses.replace(request, pictures=False)
        if splats and count != now:
            changed = dataclasses.replace(changed, gaussians=count)
        elif count != now:
            changed = dataclasses.replace(changed, config=copy.deepcopy(request.config))
            changed.config.pipeline.datamanager.train_num_rays_per_batch = count  # type: ignore[attr-defined]
        return estimate(changed).peak("train")

    value = largest(bytes_with, request.device.usable_bytes, now, unit=GAUSSIANS_UNIT if splats else RAYS_UNIT)
    return "gaussians" if splats else RAYS_OPTION, value
