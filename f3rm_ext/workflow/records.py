"""Reading what a run has written: JSON files and TensorBoard scalars."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; an empty one if the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_scalars(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Reads curves (step, value) by tag from all event files of a run. Where files overlap, the later one wins.

    Empty if TensorBoard is not installed or nothing was recorded.
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
        except Exception:  # the file was cut short by a kill; keep what was read
            continue
    return {tag: sorted((float(step), value) for step, value in points.items()) for tag, points in curves.items()}
