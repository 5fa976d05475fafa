"""Which options make a run fit, those that lose least first, and how much more would fit."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from f3rm_ext.engine.shortage import HasLevers, Lever, Loss, RunFacts
from f3rm_ext.planning.estimate import MemoryEstimate
from f3rm_ext.planning.gaussians import growth_of
from f3rm_ext.planning.request import PlanRequest

Options = tuple[tuple[str, str], ...]
"""Names without dashes, and values."""
Requester = Callable[[Options], PlanRequest]
"""Makes the request of the run with other values for some options."""
Estimator = Callable[[PlanRequest], MemoryEstimate]

Peak = Literal["training", "pictures"]
"""Training steps, or pictures of evaluation and of the viewer."""
LEAST_SHARE = 0.005
"""Share of the peak that a lever has to save to be worth its name."""
UNPREDICTED = ("pipeline.model.expandable-segments", "pipeline.model.fragmentation")
"""Levers on gaps in the allocator's memory. Gaps are an allowance in an estimate, so nobody knows what these save."""
MOST_LEVERS = 24
"""Levers after which the search gives up."""


def peak_of(estimate: MemoryEstimate, what: Peak) -> int:
    """Returns the bytes at the peak of training steps, or of pictures."""
    return max(
        (estimate.peak(phase) for phase in estimate.device if (phase == "train") == (what == "training")), default=0
    )


@dataclass(frozen=True)
class Saving:
    """One option of the advice."""

    options: Options
    """What to set."""
    now: str
    """The present value of the first option."""
    loss: Loss
    """What is lost."""
    what: Peak
    """Whose peak it lowers."""
    saved_bytes: int
    """How much lower that peak gets, after the options before it."""


@dataclass(frozen=True)
class Advice:
    """Options with which a run fits, or the lowest that the search found; none for pictures that do not fit anyway."""

    savings: tuple[Saving, ...]
    """In the order in which they were found, one for each option. Empty if the run fits as it is."""
    request: PlanRequest
    """The run with these options."""
    estimate: MemoryEstimate
    """Its memory."""

    @property
    def fits(self) -> bool:
        """Whether training fits with these options."""
        return peak_of(self.estimate, "training") <= self.request.device.usable_bytes

    @property
    def pictures_fit(self) -> bool:
        """Whether pictures of evaluation and of the viewer fit with these options."""
        return peak_of(self.estimate, "pictures") <= self.request.device.usable_bytes

    @property
    def options(self) -> Options:
        """All options to set."""
        return tuple(option for saving in self.savings for option in saving.options)


def find_levers(request: PlanRequest, estimate: MemoryEstimate, what: Peak = "training") -> list[Lever]:
    """Returns the levers of a run: those that its model and its datamanager name when memory runs out in training.

    For pictures, those of the model.
    """
    pipeline, growth = request.config.pipeline, growth_of(request)
    on_device = request.device.type != "cpu" and bool(
        estimate.device["train"].get("images") or estimate.device["train"].get("features")
    )
    facts = RunFacts(
        request.device.type,
        request.capture.train_images,
        images_on_device=on_device,
        has_features=bool(getattr(getattr(pipeline.datamanager, "features", None), "extractors", ())),
        gaussians=0 if growth is None else growth.last,
        growing=growth is not None and growth.end > growth.begin,
    )
    if what == "pictures":
        picture_levers = getattr(pipeline.model, "picture_levers", None)
        return [] if picture_levers is None else picture_levers(facts)
    parts = (pipeline.model, pipeline.datamanager)
    return [lever for part in parts if isinstance(part, HasLevers) for lever in part.memory_levers(facts)]


def options_of(lever: Lever) -> Options:
    """Returns what a lever sets.

    >>> options_of(Lever(Loss.NOISE, "window", "12 of 12", "6 --repeat 100"))
    (('window', '6'), ('repeat', '100'))
    """
    first, *more = str(lever.lower).split(" --")
    pairs = [(lever.option, first), *(tuple(words.split(" ", 1)) for words in more)]
    return tuple((name, value) for name, value in pairs)


def advise(request_with: Requester, estimate: Estimator) -> Advice:
    """Searches the options that make a run fit.

    Levers are pulled class by class, those that lose least first. Within a class they take turns, in the order in which
    the parts of the run name them. In the end, those that turn out to be unnecessary are left out, those that lose most
    first.

    Args:
        request_with: makes the request with some options changed.
        estimate: predicts its memory.
    """
    search = _Search(request_with, estimate)
    search.pull_until_it_fits("training")
    if search.fits(search.pulled, "training"):
        search.drop_unnecessary()
        enough = search.pulled
        search.pulled = enough.copy()
        search.pull_until_it_fits("pictures")
        if not search.fits(search.pulled, "pictures"):
            search.pulled = enough
    return search.advice()


class _Search:
    def __init__(self, request_with: Requester, estimate: Estimator) -> None:
        self._request_with, self._estimate = request_with, estimate
        self._known: dict[Options, tuple[PlanRequest, MemoryEstimate]] = {}
        self._lowered: dict[str, Peak] = {}
        self.pulled: list[Lever] = []
        """In this order; a lever that was pulled twice is there twice."""

    def at(self, pulled: Sequence[Lever]) -> tuple[PlanRequest, MemoryEstimate]:
        """The run with some levers pulled, and its memory."""
        options = tuple({name: value for lever in pulled for name, value in options_of(lever)}.items())
        if options not in self._known:
            request = self._request_with(options)
            self._known[options] = (request, self._estimate(request))
        return self._known[options]

    def peak(self, pulled: Sequence[Lever], what: Peak) -> int:
        return peak_of(self.at(pulled)[1], what)

    def fits(self, pulled: Sequence[Lever], what: Peak) -> bool:
        return self.peak(pulled, what) <= self.at(pulled)[0].device.usable_bytes

    def pull_until_it_fits(self, what: Peak) -> None:
        """Pulls levers until the run fits or nothing helps any more."""
        useless: set[str] = set(UNPREDICTED)
        while not self.fits(self.pulled, what) and len(self.pulled) < MOST_LEVERS:
            levers = [lever for lever in find_levers(*self.at(self.pulled), what) if lever.option not in useless]
            if not levers:
                return
            lowest = min(lever.loss for lever in levers)
            times = Counter(lever.option for lever in self.pulled)
            lever = min((lever for lever in levers if lever.loss == lowest), key=lambda lever: times[lever.option])
            before = self.peak(self.pulled, what)
            if before - self.peak([*self.pulled, lever], what) < LEAST_SHARE * before:
                useless.add(lever.option)
            else:
                self.pulled.append(lever)
                self._lowered[lever.option] = what

    def drop_unnecessary(self) -> None:
        """Leaves out what training fits without."""
        for lever in sorted(reversed(self.pulled), key=lambda lever: -lever.loss):
            rest = [other for other in self.pulled if other is not lever]
            if self.fits(rest, "training"):
                self.pulled = rest

    def advice(self) -> Advice:
        """The options in the order in which they were pulled, with what each saves after those before it."""
        by_option: dict[str, list[Lever]] = {}
        for lever in self.pulled:
            by_option.setdefault(lever.option, []).append(lever)
        savings: list[Saving] = []
        before: list[Lever] = []
        for option, levers in by_option.items():
            what = self._lowered[option]
            saved = self.peak(before, what) - self.peak([*before, *levers], what)
            savings.append(Saving(options_of(levers[-1]), str(levers[0].now), levers[0].loss, what, saved))
            before += levers
        return Advice(tuple(savings), *self.at(before))


def largest(bytes_at: Callable[[int], int], memory_bytes: int, now: int, *, unit: int = 1, most: int = 1 << 40) -> int:
    """Returns the largest number with which a run fits, if memory grows in proportion to it above a constant part.

    Args:
        bytes_at: memory with some number.
        memory_bytes: that there is.
        now: a number to begin with, ≥ unit.
        unit: the result is a multiple of it; 0 if not even one unit fits.
        most: upper limit of the result.
    """
    at_now = bytes_at(now)
    other = max(unit, min(most, now * memory_bytes // max(1, at_now))) or 1  # near the result, so few estimates follow
    other += other == now
    at_other = bytes_at(other)
    for _ in range(8):  # memory is not quite proportional
        per_one = (at_other - at_now) / (other - now)
        if per_one <= 0:
            return 0 if at_now > memory_bytes else most
        found = min(now + math.floor((memory_bytes - at_now) / per_one), most) // unit * unit
        if found <= 0 or found == now:
            return max(0, found)
        other, at_other = found, bytes_at(found)
        if at_other <= memory_bytes:
            return found
    return 0
