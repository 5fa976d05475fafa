"""Commands and measurements in processes of their own, which may fail or be ended without harm to the rest."""

import datetime
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from f3rm_ext.utils.atomic_files import write_atomic

MARK = "RESULT "
"""Begins the line with which a process hands over its result as JSON."""


class MeasurementError(Exception):
    """A measurement failed; the message is one sentence.

    Args:
        log: the end of what the process said.
    """

    def __init__(self, sentence: str, log: str = "") -> None:
        super().__init__(sentence)
        self.log = log


def write_report(report: Mapping[str, Any], path: Path, machine: Mapping[str, Any] | None = None) -> None:
    """Writes JSON, with the date and the machine, so that the file is whole whenever the program ends.

    Args:
        report: a date and a machine in it, of an earlier report, are replaced.
        machine: what is said of it; None for its processor and cores.
    """
    machine = machine or {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    head = {"date": datetime.date.today().isoformat(), "machine": machine}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(head | {**report, **head}, indent=1, ensure_ascii=False) + "\n").encode())


def read_report(path: Path) -> dict[str, Any]:
    """Returns a report; nothing where there is none yet."""
    return json.loads(path.read_text()) if path.is_file() else {}


def print_table(name: str, report: Mapping[str, Any]) -> None:
    """Prints a report as the table of the documentation."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
    print(importlib.import_module("make_benchmarks").TABLES[name](report))


def report_result(result: Mapping[str, Any]) -> None:
    """Hands a result over to the process that waits for it."""
    print(MARK + json.dumps(result), flush=True)


def call(command: Sequence[object]) -> None:
    """Runs a command beside this Python; what it says goes to standard error, and a failure is raised."""
    program, *arguments = map(str, command)
    subprocess.run([str(Path(sys.executable).parent / program), *arguments], check=True, stdout=sys.stderr)


def run(command: Sequence[object], timeout_s: float | None, environment: Mapping[str, str]) -> tuple[int, str]:
    """Runs a command to its end, or ends it with all its children when the time is over.

    Args:
        timeout_s: seconds it may take; None for as long as it takes.

    Returns:
        Exit code and both streams. Exit code 124 means that the time was over, as of the command timeout.
    """
    # Not a pipe, which a child in a session of its own may hold open for longer.
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            list(map(str, command)),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=None if timeout_s is None else max(timeout_s, 0.1))
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = 124
        said.seek(0)
        return code, said.read()


def require_result(command: Sequence[object], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Runs a command, and returns the last result it handed over; ends this program if it fails."""
    code, said = run(command, None, environment)
    result = _find_result(said)
    if code or result is None:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{said[-6000:]}")
    return result


def result_of(command: Sequence[object], timeout_s: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs a command and returns the last result it handed over; see :func:`report_result`.

    What failed after it, or ran out of time, is in its ``problem_of_all``.

    Raises:
        MeasurementError: it failed, or its time was over, before a result.
    """
    code, said = run(command, timeout_s, environment)
    problem = f"It was ended after {timeout_s:.0f} s." if code == 124 else last_words(said, code)
    if (result := _find_result(said)) is None:
        raise MeasurementError(problem, said[-2000:])
    return {**result, **({"problem_of_all": problem} if code else {})}


def _find_result(said: str) -> dict[str, Any] | None:
    results = [line.removeprefix(MARK) for line in said.splitlines() if line.startswith(MARK)]
    return json.loads(results[-1]) if results else None


def last_words(said: str, code: int) -> str:
    """Returns the sentence with which a process failed: its last line that says something.

    >>> last_words("Traceback\\n  File\\nValueError: no such thing\\n\\n", 1)
    'ValueError: no such thing'
    """
    lines = [line.strip() for line in said.splitlines() if line.strip(" ─╰╯│")]
    return lines[-1][:500] if lines else f"The process ended with exit code {code} and said nothing."


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns a measurement, or ``problem`` and ``log`` if it fails."""
    try:
        return measure()
    except MeasurementError as error:
        return {"problem": str(error), **({"log": error.log} if error.log else {})}
