"""Which options make a run fit, those that lose least first, and how much more would fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from f3rm_ext.engine.shortage import HasLevers, Lever, Loss, RunFacts
from f3rm_ext.planning.estimate import MemoryEstimate
from f3rm_ext.planning.request import PlanRequest

Options = tuple[tuple[str, str], ...]
"""Names without dashes, and values."""
Requester = Callable[[Options], PlanRequest]
"""Makes the request of the run with other values for some options."""
Estimator = Callable[[PlanRequest], MemoryEstimate]

LEAST_SHARE = 0.005
"""Share of the peak that a lever has to save to be worth its name."""
MOST_LEVERS = 40
"""Levers after which the search gives up."""


@dataclass(frozen=True)
class Saving:
    """One option of the advice."""

    options: Options
    """What to set."""
    now: str
    """The present value of the first option."""
    loss: Loss
    """What is lost."""
    saved_bytes: int
    """How much lower the peak of training gets, after the options before it."""


@dataclass(frozen=True)
class Advice:
    """Options with which a run fits, or the lowest that the search found."""

    savings: tuple[Saving, ...]
    """In the order in which they were found, one for each option. Empty if the run fits as it is."""
    request: PlanRequest
    """The run with these options."""
    estimate: MemoryEstimate
    """Its memory."""

    @property
    def fits(self) -> bool:
        """Whether training fits with these options."""
        return self.estimate.peak("train") <= self.request.device.memory_bytes

    @property
    def options(self) -> Options:
        """All options to set."""
        return tuple(option for saving in self.savings for option in saving.options)


def find_levers(request: PlanRequest, estimate: MemoryEstimate) -> list[Lever]:
    """Returns the levers of a run: those that its model and its datamanager name when memory runs out in training."""
    pipeline = request.config.pipeline
    on_device = request.device.type != "cpu" and bool(
        estimate.device["train"].get("images") or estimate.device["train"].get("features")
    )
    facts = RunFacts(
        request.device.type,
        request.capture.train_images,
        images_on_device=on_device,
        has_features=bool(getattr(getattr(pipeline.datamanager, "features", None), "extractors", ())),
        gaussians=request.gaussians or 0,
        growing=bool(request.gaussians),
    )
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

    Levers are pulled class by class, those that lose least first. Of one class, the lever comes first that saves just
    enough, otherwise the one that saves most. In the end, those that turn out to be unnecessary are left out.

    Args:
        request_with: makes the request with some options changed.
        estimate: predicts its memory.
    """
    estimates: dict[Options, tuple[PlanRequest, MemoryEstimate]] = {}

    def at(options: Options) -> tuple[PlanRequest, MemoryEstimate]:
        if options not in estimates:
            request = request_with(options)
            estimates[options] = (request, estimate(request))
        return estimates[options]

    def fits(options: Options) -> bool:
        request, memory = at(options)
        return memory.peak("train") <= request.device.memory_bytes

    pulled: list[Saving] = []
    useless: set[str] = set()

    def options_now() -> Options:
        return tuple(option for saving in pulled for option in saving.options)

    while not fits(options_now()) and len(pulled) < MOST_LEVERS:
        request, memory = at(options_now())
        levers = [lever for lever in find_levers(request, memory) if lever.option not in useless]
        if not levers:
            break
        lowest = min(lever.loss for lever in levers)
        best: tuple[bool, int, Saving] | None = None
        for lever in (lever for lever in levers if lever.loss == lowest):
            saving = Saving(options_of(lever), str(lever.now), lever.loss, 0)
            options = (*_without(options_now(), saving.options), *saving.options)
            saved = memory.peak("train") - at(options)[1].peak("train")
            if saved < LEAST_SHARE * memory.peak("train"):
                useless.add(lever.option)
                continue
            enough = fits(options)
            rank = (enough, -saved if enough else saved)
            if best is None or rank > best[:2]:
                best = (*rank, Saving(saving.options, saving.now, lever.loss, saved))
        if best is not None:
            _pull(pulled, best[2])
    if fits(options_now()):
        _drop_unnecessary(pulled, fits)
    return Advice(tuple(_with_savings(pulled, at)), *at(options_now()))


def _pull(pulled: list[Saving], saving: Saving) -> None:
    """Adds a saving; one that changes the same option further takes its place."""
    names = {name for name, _ in saving.options}
    for index, before in enumerate(pulled):
        if before.options[0][0] == saving.options[0][0]:
            pulled[index] = Saving(saving.options, before.now, saving.loss, 0)
            return
        assert not names & {name for name, _ in before.options}
    pulled.append(saving)


def _without(options: Options, replaced: Options) -> Options:
    names = {name for name, _ in replaced}
    return tuple((name, value) for name, value in options if name not in names)


def _drop_unnecessary(pulled: list[Saving], fits: Callable[[Options], bool]) -> None:
    """Leaves out, those that lose most first, what the run fits without."""
    for saving in sorted(pulled, key=lambda saving: -saving.loss):
        rest = tuple(option for other in pulled if other is not saving for option in other.options)
        if fits(rest):
            pulled.remove(saving)


def _with_savings(
    pulled: Sequence[Saving], at: Callable[[Options], tuple[PlanRequest, MemoryEstimate]]
) -> list[Saving]:
    """The savings with what each saves after those before it."""
    found: list[Saving] = []
    options: Options = ()
    for saving in pulled:
        before = at(options)[1].peak("train")
        options = (*options, *saving.options)
        saved = before - at(options)[1].peak("train")
        found.append(Saving(saving.options, saving.now, saving.loss, saved))
    return found


def largest(bytes_at: Callable[[int], int], memory_bytes: int, now: int, *, unit: int = 1, most: int = 1 << 40) -> int:
    """Returns the largest number with which a run fits, if memory grows in proportion to it above a constant part.

    Args:
        bytes_at: memory with some number.
        memory_bytes: that there is.
        now: a number to begin with, ≥ unit.
        unit: the result is a multiple of it; 0 if not even one unit fits.
        most: upper limit of the result.
    """
    low, high = now, 2 * now
    per_one = (bytes_at(high) - bytes_at(low)) / (high - low)
    if per_one <= 0:
        return 0 if bytes_at(now) > memory_bytes else most
    found = min(low + int((memory_bytes - bytes_at(low)) / per_one), most) // unit * unit
    for _ in range(8):  # memory is not quite proportional
        if found <= 0 or bytes_at(found) <= memory_bytes:
            break
        found = (found - max(unit, found // 50)) // unit * unit
    return max(0, found)
