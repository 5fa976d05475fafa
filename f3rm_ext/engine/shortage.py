"""When memory runs out in training: which options lower it, those first that lose least."""

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import torch

from f3rm_ext.errors import MemoryShortageError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that device or host memory ran out."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


class Loss(IntEnum):
    """What a lever costs; the order in which levers are named."""

    NOTHING = 0
    """Speed at most."""
    ROUNDING = 1
    """The same is optimised with fewer bits."""
    NOISE = 2
    """A step sees less: more noise, which more steps make up for."""
    DETAIL = 3
    """What is trained can show less."""
    NEW_START = 4
    """The same, and a run that has begun cannot be gone on with."""


class Lever(NamedTuple):
    """An option that lowers what training takes."""

    loss: Loss
    option: str
    """Its name on the command line, without the dashes."""
    now: object
    """Its present value."""
    lower: object
    """A value that takes less."""

    def __str__(self) -> str:
        return f"--{self.option} {self.lower} (now {self.now})"


def halved(loss: Loss, option: str, now: int, least: int) -> Iterable[Lever]:
    """The lever to half of a number; none where that would be below the least that makes sense."""
    return [Lever(loss, option, now, now // 2)] if now // 2 >= least else []


def shortage(step: int, device: str, resume: str | None, levers: Iterable[Lever]) -> MemoryShortageError:
    """The error for a training step for which memory did not suffice.

    Args:
        step: its number.
        device: what it ran on.
        resume: the command that goes on from the last checkpoint; None where there is none.
        levers: of all parts of the run, in any order; those that need a new start are left out where there is a
            checkpoint.
    """
    wanted = sorted(levers, key=lambda lever: lever.loss)
    if resume is None:
        begin = "nothing was saved yet, so start again"
    else:
        begin = f"what was saved is intact, so go on by `{resume}`"
        wanted = [lever for lever in wanted if lever.loss < Loss.NEW_START]
    ways = ", ".join(map(str, wanted))
    end = f" with one or more of these, which lose least first: {ways}" if wanted else " where there is more memory"
    return MemoryShortageError(f"Memory ran out in training step {step} on {device}: {begin}{end}.")
