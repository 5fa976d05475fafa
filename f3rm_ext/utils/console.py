"""Nerfstudio's console, and a progress bar on it."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from f3rm_ext import events

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task, TaskID
    from rich.text import Text

StageProgress = Callable[[str, int, int], None]
"""Called with the name of a stage, the units done and the units to do."""


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


def say(*texts: str, style: str = "") -> None:
    """Prints each text as it is, without markup and without breaking its lines."""
    for text in texts:
        console().print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def note(*sentences: str) -> None:
    """Prints sentences that the user should read, and tells them to the program that started this one."""
    for sentence in sentences:
        events.note(sentence)
        say(sentence)


def image_progress(unit: str = "images", on: "Console | None" = None, *, disable: bool = False) -> "Progress":
    """Returns a progress bar that shows how many units (a noun in the plural) are done, the rate and the time left.

    It also tells the progress to the program that started this one, see :mod:`f3rm_ext.events`.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: "Task") -> "Text":
            speed = task.finished_speed or task.speed
            return Text(f"    - {unit}/s" if speed is None else f"{speed:5.1f} {unit}/s")

    class Bars(Progress):
        def update(self, task_id: "TaskID", **changes: Any) -> None:
            super().update(task_id, **changes)
            self._tell(task_id)

        def advance(self, task_id: "TaskID", advance: int | float = 1) -> None:
            super().advance(task_id, advance)
            self._tell(task_id)

        def _tell(self, task_id: "TaskID") -> None:
            task = self._tasks[task_id]
            if task.total is not None:
                events.progress(task.description, task.completed, task.total)

    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=on or console(),
        disable=disable,
    )


def show_stages(progress: "Progress") -> StageProgress:
    """Returns a function that shows each stage as a bar of a progress display."""
    tasks: dict[str, TaskID] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = progress.add_task(stage, total=total)
        progress.update(tasks[stage], completed=done, total=total)

    return show
