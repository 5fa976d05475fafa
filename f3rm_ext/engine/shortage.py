"""Advice for when memory runs out in training: options that lower it, those that lose least first."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from f3rm_ext.errors import MemoryShortageError


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception says that device or host memory ran out."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


class Loss(IntEnum):
    """What is lost by pulling a lever, in the order in which levers are named."""

    NOTHING = 0
    """At most speed."""
    ROUNDING = 1
    """Precision: parameters or moments have fewer bits."""
    NOISE = 2
    """Steps see less data, so gradients are noisier; more steps make up for it."""
    DETAIL = 3
    """The model can represent less detail."""
    NEW_START = 4
    """Detail, and the run cannot be resumed but has to start anew."""


class Lever(NamedTuple):
    """An option that lowers the memory of training."""

    loss: Loss
    """What is lost."""
    option: str
    """Its name on the command line, without the leading dashes."""
    now: object
    """Its present value."""
    lower: object
    """A value that takes less memory."""

    def __str__(self) -> str:
        return f"--{self.option} {self.lower} (now {self.now})"


@dataclass(frozen=True)
class RunFacts:
    """What decides which levers a run has, besides its options."""

    device_type: str
    """Type of the device the run is on, e.g. "cuda"."""
    train_images: int
    """Number of training images."""
    images_on_device: bool = False
    """Whether training images are kept on a GPU."""
    has_features: bool = False
    """Whether a field learns 2D features."""
    gaussians: int = 0
    """Number of Gaussians; 0 for fields."""
    growing: bool = False
    """Whether Gaussians will still be added."""


@runtime_checkable
class HasLevers(Protocol):
    """Options of a datamanager or a model that say which of them lower the memory of training."""

    def memory_levers(self, facts: RunFacts) -> list[Lever]:
        """Returns the options that can still be lowered, in any order."""
        ...


def halved(loss: Loss, option: str, now: int, least: int) -> Iterable[Lever]:
    """Returns the lever that halves an option, or none if the result would be below the least useful value.

    >>> [str(lever) for lever in halved(Loss.DETAIL, "pipeline.model.num-samples", 48, least=16)]
    ['--pipeline.model.num-samples 24 (now 48)']
    >>> halved(Loss.DETAIL, "pipeline.model.num-samples", 24, least=16)
    []
    """
    return [Lever(loss, option, now, now // 2)] if now // 2 >= least else []


def shortage(step: int, device: str, resume: str | None, levers: Iterable[Lever]) -> MemoryShortageError:
    """Returns the error for a training step in which memory ran out.

    Args:
        step: number of the step.
        device: on which it ran.
        resume: command that continues from the last checkpoint; None if there is none.
        levers: of all parts of the run, in any order. Those that need a new start are left out if there is a
            checkpoint.
    """
    wanted = sorted(levers, key=lambda lever: lever.loss)
    if resume is None:
        begin = "nothing was saved yet, so start again"
    else:
        begin = f"the last checkpoint is intact, so continue by running `{resume}`"
        wanted = [lever for lever in wanted if lever.loss < Loss.NEW_START]
    listed = ", ".join(map(str, wanted))
    end = f" with one or more of these options, those that lose least first: {listed}"
    if not wanted:
        end = " where there is more memory"
    return MemoryShortageError(f"Memory ran out in training step {step} on {device}: {begin}{end}.")


@contextmanager
def told_shortage(step: int, device: torch.device, advice: Callable[[], str]) -> Iterator[None]:
    """While this is entered, memory that runs out is one sentence.

    Args:
        step: number of the training step.
        device: on which it runs.
        advice: returns what to do, as the end of the sentence.

    Raises:
        MemoryShortageError: it did.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryShortageError(f"Memory ran out in training step {step} on {device}: {advice()}.") from error
