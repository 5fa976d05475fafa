"""Reading what a training run left behind: TensorBoard scalars, coverage, metrics, and what its log says."""

import json
import re
from pathlib import Path
from typing import Any

_LPIPS = re.compile(r"Warning: (LPIPS is left out.*)")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_scalars(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Curves (step, value) by tag from all event files of a run; a later file wins where a run was resumed.

    Empty where TensorBoard is not installed or nothing was recorded.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    except ImportError:
        return {}
    curves: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime):
        try:
            for event in LegacyEventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    if value.HasField("simple_value"):
                        curves.setdefault(value.tag, {})[event.step] = value.simple_value
        except Exception:  # a file cut short by a kill; what was read of it counts
            continue
    return {tag: sorted((float(step), value) for step, value in points.items()) for tag, points in curves.items()}


def plain_text(text: str) -> str:
    """A log without colour codes."""
    return _ANSI.sub("", text)


def lpips_reason(log: Path) -> str:
    """Why a log of ns-eval says that LPIPS is missing; empty where it says nothing."""
    try:
        found = _LPIPS.search(plain_text(log.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return ""
    # A report is for others to see: they need not know where this machine keeps its home folders.
    return found[1].strip().replace(str(Path.home()), "~") if found else ""
