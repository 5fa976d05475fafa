"""How long the trainings of the chain will take on a CPU, by a few steps of the first one."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from f3rm_ext.workflow.commands import Command, CommandError, Progress, run_command
from f3rm_ext.workflow.options import STAGES, ChainOptions, words_of
from f3rm_ext.workflow.stages import Stage

if TYPE_CHECKING:
    from rich.console import Console

REFINING_COST = 3.3
"""A refining step takes about so many times as long as a coarse one on a CPU: 11.7 and 3.6 steps per second in
``benchmarks/refinement.py``."""
LIMIT_S = 120.0
_SAID = re.compile(r"^Steps: (\d+), seconds: ([\d.]+)")


def estimate_minutes(
    stage: Stage, options: ChainOptions, folder: Path, log: Path, console: "Console"
) -> tuple[float, float] | None:
    """Trains a few coarse steps, which are thrown away, and returns how long the trainings will take.

    Args:
        stage: the coarse training.
        options: of the chain, with defaults.
        folder: in which the command runs.
        log: for what the command says.
        console: shows progress.

    Returns:
        Minutes of the coarse training and of the refinement; None if they cannot be told.
    """
    found: list[tuple[int, float]] = []

    def on_line(line: str) -> Progress | None:
        if match := _SAID.match(line):
            found.append((int(match[1]), float(match[2])))
        return (0, 1, "") if line.startswith("progress:") else None

    words = [
        sys.executable,
        "-m",
        "f3rm_ext.planning.duration",
        *stage.program[1:],
        *stage.places,
        *words_of(stage.options),
    ]
    command = Command("Estimate of the time", words, log, on_line, is_forked=True, limit_s=LIMIT_S)
    try:
        run_command(command, folder, console)
    except CommandError:
        return None
    if not found:
        return None
    steps, seconds = found[-1]
    return seconds / 60, _refining_steps(options) * REFINING_COST * seconds / steps / 60


def _refining_steps(options: ChainOptions) -> int:
    if options.skip_refine or STAGES.index(options.until_stage or STAGES[-1]) < STAGES.index("refine"):
        return 0
    from f3rm_ext.mesh.bound.model import STEPS

    given = options.passed_on.get("refine", {}).get("max-num-iterations")
    if given and given[0].isdigit():
        return int(given[0])
    return STEPS[options.refinement_time or "long"]
