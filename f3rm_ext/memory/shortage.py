"""The error of a training step that runs out of memory, with the options that lower it, the least harmful first."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from f3rm_ext.errors import MemoryShortageError
from f3rm_ext.memory.options import MemoryOption, QualityImpact


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception says that device or host memory ran out."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    # The last two are what torch says of main memory, on Linux and on Windows.
    phrases = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in phrases)


def shortage_error(
    step: int,
    device: str | torch.device,
    options: Iterable[MemoryOption],
    *,
    resume: str | None = None,
    restart: str = "nothing was saved yet, so start again",
    form: Callable[[MemoryOption], str] = str,
) -> MemoryShortageError:
    """Returns the error for a training step in which memory ran out.

    Args:
        options: memory options of all parts of the run, in any order. Those that need a new run are left out if there
            is a checkpoint.
        resume: command that continues from the last checkpoint; None if there is none.
        restart: what to do without such a command.
        form: writes an option as it is typed.
    """
    advice, action = sorted(options, key=lambda option: option.quality_impact), restart
    if resume is not None:
        action = f"the last checkpoint is intact, so continue by running `{resume}`"
        advice = [option for option in advice if option.quality_impact < QualityImpact.RESTART]
    end = f"with one or more of these options, the least harmful first: {', '.join(map(form, advice))}"
    if not advice:
        end = "where there is more memory"
    return MemoryShortageError(f"Memory ran out in training step {step} on {device}: {action} {end}.")


@contextmanager
def report_shortage(error: Callable[[], MemoryShortageError]) -> Iterator[None]:
    """While this is entered, running out of memory raises a :class:`MemoryShortageError`."""
    try:
        yield
    except Exception as cause:
        if not is_out_of_memory(cause):
            raise
        raise error() from cause
