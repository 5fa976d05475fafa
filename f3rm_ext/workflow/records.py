"""Reading what a run has written: JSON files, checkpoints, TensorBoard scalars."""

import json
import re
from pathlib import Path
from typing import Any

_CHECKPOINT = re.compile(r"step-(\d+)\.ckpt")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; an empty one if the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def steps_of(checkpoint: Path) -> int:
    """Returns the number of steps in a checkpoint, by its name; 0 if it has another name.

    >>> steps_of(Path("nerfstudio_models/step-000000999.ckpt"))
    1000
    """
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) + 1 if match else 0


def newest_checkpoint(run: Path) -> Path | None:
    """Returns the newest checkpoint of a run, by its name; None without one."""
    checkpoints = [path for path in (run / "nerfstudio_models").glob("*.ckpt") if steps_of(path)]
    return max(checkpoints, key=steps_of, default=None)


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
