"""What a report says, apart from how it looks."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Stage:
    """One part of the work."""

    name: str
    """What it was, for people."""
    seconds: float
    """How long it took, over all runs of it."""
    command: str = ""
    """The command that did it, as one would type it."""
    reused: bool = False
    """Whether it was done before and only looked up this time."""
    note: str = ""
    """Anything to know about it."""


@dataclass
class ReportContent:
    """Everything that goes into a report."""

    title: str
    """Headline."""
    data_name: str
    """Name of the capture."""
    synthetic: bool
    """Whether it is the made-up room."""
    measured: dict[str, Any]
    """Content of measure.json."""
    pictures: Path
    """Folder of the pictures that names."""
    metrics: dict[str, float]
    """Means over the held-out views, as ns-eval names them."""
    lpips_note: str = ""
    """Why LPIPS is missing."""
    coverage: dict[str, Any] = field(default_factory=dict)
    """Content of coverage.json."""
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """TensorBoard scalars by tag."""
    stages: list[Stage] = field(default_factory=list)
    """What was done, in order."""
    folder: str = "."
    """Where the commands were run, as the user would name it."""
    next_commands: list[tuple[str, str]] = field(default_factory=list)
    """What to do next: (why, command)."""
    facts: list[tuple[str, str]] = field(default_factory=list)
    """Versions, device and the like."""


def plural(count: int, thing: str) -> str:
    """``1 image``, ``2 images``."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """``42 s`` or ``3 min 20 s``."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"
