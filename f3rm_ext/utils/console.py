"""Nerfstudio's console, and a progress bar on it."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task, TaskID
    from rich.text import Text

StageProgress = Callable[[str, int, int], None]
"""Called with the name of a stage, the units done and the units to do."""
PROGRESS_LINES = "F3RM_EXT_PROGRESS_LINES"
"""Variable of the environment: set by a program that reads progress as lines, since it shows the bars itself."""
_LINE_EVERY_S = 0.5


def console() -> "Console":
    """Returns nerfstudio's console, where all messages of nerfstudio go."""
    from nerfstudio.utils.rich_utils import CONSOLE

    return CONSOLE


@contextlib.contextmanager
def messages_to_stderr() -> "Iterator[None]":
    """Sends nerfstudio's messages to stderr, so that stdout has only what programs read."""
    log = console()
    before = log._file  # None where it follows sys.stdout, which its property `file` does not tell
    log.file = sys.stderr
    try:
        yield
    finally:
        log._file = before


@contextlib.contextmanager
def silence() -> "Iterator[None]":
    """Drops nerfstudio's messages."""
    log = console()
    before, log.quiet = log.quiet, True
    try:
        yield
    finally:
        log.quiet = before


def image_progress(unit: str = "images", on: "Console | None" = None, *, disable: bool = False) -> "Progress":
    """Returns a progress bar that shows how many units are done, the rate and the time left.

    Args:
        unit: What is counted, in the plural.
        on: Console to draw on; by default nerfstudio's.
        disable: Draw nothing.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: "Task") -> "Text":
            speed = task.finished_speed or task.speed
            return Text(f"    - {unit}/s" if speed is None else f"{speed:5.1f} {unit}/s")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=on or console(),
        disable=disable,
    )


def shown_on(progress: "Progress") -> StageProgress:
    """Returns a function that shows each stage as a bar of a progress display, or prints it in lines.

    Lines are for a program that has set :data:`PROGRESS_LINES`: ``progress: 3/12 Views``.
    """
    tasks: dict[str, TaskID] = {}
    printed: dict[str, float] = {}

    def show(stage: str, done: int, total: int) -> None:
        if os.environ.get(PROGRESS_LINES) and time.monotonic() - printed.get(stage, 0.0) > _LINE_EVERY_S:
            printed[stage] = time.monotonic()
            print(f"progress: {done}/{total} {stage}", flush=True)
        if stage not in tasks:
            tasks[stage] = progress.add_task(stage, total=total)
        progress.update(tasks[stage], completed=done, total=total)

    return show
