"""Searches for memory options that make a run fit, the least harmful first, and for how much more would fit."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from f3rm_ext.data.cycling_config import CyclingConfig
from f3rm_ext.errors import UserError
from f3rm_ext.memory.estimate import MemoryEstimate, Phase
from f3rm_ext.memory.options import HasMemoryOptions, MemoryOption, QualityImpact, RunState
from f3rm_ext.planning.estimator import Estimator
from f3rm_ext.planning.gaussians import plan_growth
from f3rm_ext.planning.request import Options, PlanRequest
from f3rm_ext.planning.traced_run import kept_bytes

Requester = Callable[[Options], PlanRequest]
"""Makes the request of the run with other values for some options."""

Peak = Literal["training", "pictures"]
"""Training steps, or pictures of evaluation and of the viewer."""
LEAST_SHARE = 0.005
"""Share of the peak that an option has to save to be advised."""
UNPREDICTED = ("pipeline.model.expandable-segments", "pipeline.model.fragmentation")
"""Options that lower the fragmentation of the allocator's memory. An estimate has an allowance for it, so their effect
cannot be predicted."""
MAX_OPTIONS = 24
"""Options after which the search gives up."""


def sum_peak(estimate: MemoryEstimate, peak: Peak) -> int:
    """Returns the bytes at the peak of training steps, or of pictures."""
    phases: tuple[Phase, ...] = ("train",) if peak == "training" else ("evaluation", "query")
    return max((estimate.peak(phase) for phase in phases if phase in estimate.device), default=0)


@dataclass(frozen=True)
class Saving:
    """One option of the advice."""

    options: Options
    now: str
    """Present value of the first option."""
    quality_impact: QualityImpact
    """Loss of quality that the option may bring."""
    peak: Peak
    """The peak of memory that it lowers."""
    saved_bytes: int
    """Bytes by which that peak falls, after all options before it are set."""


@dataclass(frozen=True)
class Advice:
    """Options with which a run fits, or the lowest that the search found; none for pictures that do not fit anyway."""

    savings: tuple[Saving, ...]
    """One for each option, in the order of the search. Empty if the run fits as it is."""
    request: PlanRequest
    """The run with these options."""
    estimate: MemoryEstimate

    @property
    def fits(self) -> bool:
        """Whether training fits with these options."""
        return sum_peak(self.estimate, "training") <= self.request.device.usable_bytes

    @property
    def pictures_fit(self) -> bool:
        """Whether pictures of evaluation and of the viewer fit with these options."""
        return sum_peak(self.estimate, "pictures") <= self.request.device.usable_bytes

    @property
    def options(self) -> Options:
        """All options to set."""
        return tuple(option for saving in self.savings for option in saving.options)


def list_options(request: PlanRequest, estimate: MemoryEstimate, peak: Peak = "training") -> list[MemoryOption]:
    """Returns the memory options of a run: for training those of its model and its datamanager, which a shortage in
    training suggests too; for pictures those of the model."""
    pipeline, growth = request.config.pipeline, plan_growth(request)
    on_device = request.device.type != "cpu" and bool(
        estimate.device["train"].get("images") or estimate.device["train"].get("features")
    )
    state = RunState(
        request.device.type,
        request.capture.train_images,
        images_on_device=on_device,
        images_in_memory=_whole_images(request),
        has_features=bool(getattr(getattr(pipeline.datamanager, "features", None), "extractors", ())),
        gaussians=0 if growth is None else growth.last,
        growing=growth is not None and growth.end > growth.begin,
    )
    if peak == "pictures":
        picture_options = getattr(pipeline.model, "picture_memory_options", None)
        return [] if picture_options is None else picture_options(state)
    parts = (pipeline.model, pipeline.datamanager)
    return [option for part in parts if isinstance(part, HasMemoryOptions) for option in part.memory_options(state)]


def _whole_images(request: PlanRequest) -> int | None:
    """Returns how many training images are whole in memory at a time, as the run counts them."""
    manager, images = request.config.pipeline.datamanager, request.capture.train_images
    if not isinstance(manager, CyclingConfig):
        return None
    place = (images, kept_bytes(manager, request.capture), request.config.machine.num_devices)
    return 0 if manager.pixel_stride("train", *place) > 1 else manager.image_cycle("train", *place).window_size


def advise(request_with: Requester, estimate: Estimator) -> Advice:
    """Searches for the options that make a run fit.

    Options are taken class by class, the least harmful first. Within a class they take turns, in the order in which
    the parts of the run list them. In the end, options that turn out to be unnecessary are dropped, the most harmful
    first.
    """
    search = _Search(request_with, estimate)
    search.run("training")
    if search.fits(search.chosen, "training"):
        search.drop_unnecessary()
        enough = search.chosen
        search.chosen = enough.copy()
        search.run("pictures")
        if not search.fits(search.chosen, "pictures"):
            search.chosen = enough
    return search.advice()


class _Search:
    def __init__(self, request_with: Requester, estimate: Estimator) -> None:
        self._request_with, self._estimate = request_with, estimate
        self._known: dict[Options, tuple[PlanRequest, MemoryEstimate]] = {}
        self._peaks: dict[str, Peak] = {}
        self._now: dict[str, str] = {}
        """Values of the options in the run as it is."""
        self.chosen: list[MemoryOption] = []
        """In this order; an option that was lowered twice is there twice."""

    def plan_with(self, chosen: Sequence[MemoryOption]) -> tuple[PlanRequest, MemoryEstimate]:
        """The run with some options, and its memory."""
        options = tuple({name: value for option in chosen for name, value in option.settings()}.items())
        if options not in self._known:
            request = self._request_with(options)
            self._known[options] = (request, self._estimate(request))
        return self._known[options]

    def peak(self, chosen: Sequence[MemoryOption], peak: Peak) -> int:
        return sum_peak(self.plan_with(chosen)[1], peak)

    def fits(self, chosen: Sequence[MemoryOption], peak: Peak) -> bool:
        return self.peak(chosen, peak) <= self.plan_with(chosen)[0].device.usable_bytes

    def run(self, peak: Peak) -> None:
        """Takes options until the run fits or nothing helps any more."""
        useless: set[str] = set(UNPREDICTED)
        while not self.fits(self.chosen, peak) and len(self.chosen) < MAX_OPTIONS:
            listed = list_options(*self.plan_with(self.chosen), peak)
            options = [option for option in listed if option.name not in useless]
            if not options:
                return
            least = min(option.quality_impact for option in options)
            times = Counter(option.name for option in self.chosen)
            candidates = [option for option in options if option.quality_impact == least]
            option = min(candidates, key=lambda candidate: times[candidate.name])
            before = self.peak(self.chosen, peak)
            try:
                saved = before - self.peak([*self.chosen, option], peak)
            except UserError:  # the option does not go with the others of the run
                saved = 0
            if saved < LEAST_SHARE * before:
                useless.add(option.name)
            else:
                self.chosen.append(option)
                self._peaks[option.name] = peak
                self._now.setdefault(option.name, str(option.now))

    def drop_unnecessary(self) -> None:
        """Leaves out options without which training fits, too."""
        # Of an option that was lowered twice, the lower value goes first: without it the higher one is left.
        for option in sorted(reversed(self.chosen), key=lambda option: -option.quality_impact):
            rest = [other for other in self.chosen if other is not option]
            with suppress(UserError):  # another option may need it
                if self.fits(rest, "training"):
                    self.chosen = rest

    def advice(self) -> Advice:
        """The options in the order in which they were taken, with what each saves after those before it."""
        savings: list[Saving] = []
        before: list[MemoryOption] = []
        for name, option in {option.name: option for option in self.chosen}.items():  # its lowest value
            peak = self._peaks[name]
            saved = self.peak(before, peak) - self.peak([*before, option], peak)
            savings.append(Saving(option.settings(), self._now[name], option.quality_impact, peak, saved))
            before.append(option)
        return Advice(tuple(savings), *self.plan_with(before))


def largest(bytes_at: Callable[[int], int], memory_bytes: int, now: int, *, unit: int = 1) -> int:
    """Returns the largest number with which a run fits, if memory grows in proportion to it above a constant part.

    Args:
        now: first number to try, ≥ unit.
        unit: the result is a multiple of it; 0 if not even one unit fits.
    """
    most = 1 << 40
    at_now = bytes_at(now)
    other = max(unit, min(most, now * memory_bytes // max(1, at_now))) or 1  # near the result, so few estimates follow
    other += other == now
    at_other = bytes_at(other)
    for _ in range(8):  # memory is not quite proportional
        per_one = (at_other - at_now) / (other - now)
        if per_one <= 0:
            return 0 if at_now > memory_bytes else most
        result = min(now + math.floor((memory_bytes - at_now) / per_one), most) // unit * unit
        if result <= 0 or result == now:
            return max(0, result)
        other, at_other = result, bytes_at(result)
        if at_other <= memory_bytes:
            return result
    return 0
