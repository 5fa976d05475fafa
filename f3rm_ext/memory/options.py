"""Memory options: options of a run that lower its memory, and what quality each of them costs."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable


class QualityImpact(IntEnum):
    """What a memory option costs, from least to most; options are suggested in this order."""

    NONE = 0
    """At most speed."""
    PRECISION = 1
    """Parameters or moments have fewer bits."""
    NOISE = 2
    """Steps see less data, so gradients are noisier; more steps make up for it."""
    DETAIL = 3
    """The model can represent less detail."""
    RESTART = 4
    """Detail, and the run cannot be resumed but has to start anew."""

    @property
    def description(self) -> str:
        """The cost, as a clause."""
        return (
            "costs at most speed",
            "lowers precision",
            "makes gradients noisier",
            "lowers detail",
            "lowers detail and needs a new run",
        )[self]


class MemoryOption(NamedTuple):
    """An option that lowers the memory of training."""

    quality_impact: QualityImpact
    """Effect of the lower value on the quality of the result."""
    name: str
    """Name on the command line, without the leading dashes."""
    now: object
    """Value of the option in this run."""
    lower: object
    """A value that takes less memory. More options may follow, as ``6 --repeat 100``."""

    def __str__(self) -> str:
        return f"--{self.name} {self.lower} (now {self.now})"

    def settings(self) -> tuple[tuple[str, str], ...]:
        """Returns the names, without dashes, and values of all options to set.

        >>> MemoryOption(QualityImpact.NOISE, "window", "12 of 12", "6 --repeat 100").settings()
        (('window', '6'), ('repeat', '100'))
        """
        first, *more = str(self.lower).split(" --")
        pairs = [(self.name, first), *(words.split(" ", 1) for words in more)]
        return tuple((name, value) for name, value in pairs)


@dataclass(frozen=True)
class RunState:
    """What decides which memory options a run has, besides its configuration."""

    device_type: str
    """Type of the device that the run is on, e.g. "cuda"."""
    train_images: int
    """Number of training images."""
    images_on_device: bool = False
    """Whether training images are kept on a GPU."""
    images_in_memory: int | None = None
    """Number of training images that are whole in memory at a time; None for all that the options ask for."""
    has_features: bool = False
    """Whether a field learns 2D features."""
    gaussians: int = 0
    """Number of Gaussians; 0 for fields."""
    growing: bool = False
    """Whether Gaussians will still be added."""


@runtime_checkable
class HasMemoryOptions(Protocol):
    """Configuration of a datamanager or a model that knows which of its options lower the memory of training."""

    def memory_options(self, state: RunState) -> list[MemoryOption]:
        """Returns the options that can still be lowered, in any order."""
        ...


def halve(impact: QualityImpact, option: str, now: int, least: int) -> Iterable[MemoryOption]:
    """Returns the memory option that halves a value, or none if the result would be below the least useful value.

    >>> [str(option) for option in halve(QualityImpact.DETAIL, "pipeline.model.num-samples", 48, least=16)]
    ['--pipeline.model.num-samples 24 (now 48)']
    >>> halve(QualityImpact.DETAIL, "pipeline.model.num-samples", 24, least=16)
    []
    """
    return [MemoryOption(impact, option, now, now // 2)] if now // 2 >= least else []
