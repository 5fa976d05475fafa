"""Runs the commands of the demo and of the chain with a log file, a progress bar and clean interruption."""

import contextlib
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOBase
from pathlib import Path
from typing import TYPE_CHECKING

from f3rm_ext.errors import UserError
from f3rm_ext.utils.console import PROGRESS_LINES
from f3rm_ext.workflow.forks import Fork, start_fork
from f3rm_ext.workflow.records import plain_text

if TYPE_CHECKING:
    from rich.console import Console

Progress = tuple[int | float, int | float, str]
"""Amount done, total amount, and a note."""

_COUNT = re.compile(r"^([A-Z][a-z]+ .*): (\d+) of (\d+)$")
_POLL_S = 0.25
_TAIL_LINES = 6
_LIMIT_GRACE_S, _LEAVE_GRACE_S = 60.0, 30.0
_DIES_WITH_US = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Linux: has the kernel end a command when the program that started it is killed. Another one may run it again then."""


class CommandError(UserError):
    """A command failed."""


@dataclass
class Command:
    """A command to run, as a user would type it."""

    name: str
    """Name of the stage, for the progress bar."""
    arguments: Sequence[str]
    """Program and arguments."""
    log: Path
    """File to which the output is appended."""
    on_line: Callable[[str], Progress | None] = lambda line: None
    """Reads progress from a line of output."""
    on_poll: Callable[[], Progress | None] = lambda: None
    """Reads progress from elsewhere; called a few times a second."""
    is_forked: bool = False
    """Start it in a fork of a process that has imported what commands share (:mod:`f3rm_ext.workflow.forks`)."""
    limit_s: float = float("inf")
    """Time after the first progress at which the command is stopped with SIGINT, which does not count as a failure."""

    @property
    def text(self) -> str:
        """The command line."""
        return shlex.join(["python" if part == sys.executable else part for part in self.arguments])


@dataclass
class Outcome:
    """How a command ended."""

    seconds: float
    """Wall time of the command."""
    working_s: float
    """Wall time since the first progress, without start-up."""
    stopped_by_limit: bool
    """Whether the command was stopped at its time limit."""
    peak_mib: float = 0.0
    """Most resident memory of its process, MiB; 0 where the system does not tell."""


def progress_of(line: str) -> Progress | None:
    """Reads the progress of a command that prints lines such as the following; None for other lines.

    >>> progress_of("Finding features: 3 of 16")
    (3, 16, 'Finding features: 3 of 16')
    """
    match = _COUNT.match(line)
    return (int(match[2]), int(match[3]), f"{match[1]}: {match[2]} of {match[3]}") if match else None


def run_command(command: Command, folder: Path, console: "Console") -> Outcome:
    """Runs a command to its end, with a progress bar.

    Args:
        command: the command. Its program is searched beside this Python first, so no environment has to be activated.
        folder: working directory.
        console: shows progress and, at the end, a line with the time taken.

    Raises:
        CommandError: the command failed. The message is its own error sentence, if it printed one.
        KeyboardInterrupt: the user pressed Ctrl-C; the command had time to save.
        SystemExit: this process got SIGTERM; the command had time to save.
    """
    command.log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with command.log.open("a", encoding="utf-8", errors="replace") as log:
        log.write(f"$ {command.text}\n")
        log.flush()
        position = log.tell()
        with _leaves_on_sigterm():
            process = _start(command, folder)
            try:
                working_s, stopped, peak_mib = _follow(process, command, log, console)
            except (KeyboardInterrupt, SystemExit):
                _leave(process, log)
                raise
            except BaseException:
                process.kill()
                process.wait()
                raise
    if process.returncode and not stopped:
        raise _failure(command, process.returncode, _since(command.log, position))
    seconds = time.monotonic() - start
    console.print(f"  [green]done[/] {command.name} [dim]({seconds:.0f} s)[/]", highlight=False)
    return Outcome(seconds, working_s, stopped, peak_mib)


def program(name: str) -> str:
    """Returns the path of a program beside this Python, or its plain name if it is not there."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else name


def _start(command: Command, folder: Path) -> "subprocess.Popen[str] | Fork":
    first, *rest = command.arguments
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "160", "TQDM_DISABLE": "1", PROGRESS_LINES: "1"}
    if command.is_forked and (fork := start_fork(command.arguments, folder, environment)) is not None:
        return fork
    words = [first if Path(first).is_absolute() else program(first), *rest]
    if sys.platform == "linux":
        words = [sys.executable, "-I", "-S", "-c", _DIES_WITH_US, str(os.getpid()), *words]
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        # Ctrl-C must reach it only once: from us, and not from the terminal as well.
        start_new_session=True,
    )


def _follow(
    process: "subprocess.Popen[str] | Fork", command: Command, log: TextIOBase, console: "Console"
) -> tuple[float, bool, float]:
    """Shows progress until the process ends.

    Returns:
        Seconds since the first progress, whether it hit the limit, and its peak of resident memory, MiB.
    """
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    began_s: float | None = None
    stopped_s: float | None = None
    columns = (TextColumn("  {task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    columns = (*columns, TextColumn("ETA"), TimeRemainingColumn())
    looked_s, peak_mib = 0.0, 0.0
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(command.name, total=None, note="")

        def show(progress: Progress | None) -> None:
            nonlocal began_s
            if progress is not None:
                began_s = time.monotonic() if began_s is None else began_s
                bar.update(task, completed=progress[0], total=progress[1], note=progress[2])

        while True:
            now = time.monotonic()
            if now - looked_s > _POLL_S:
                looked_s, peak_mib = now, max(peak_mib, _peak_mib(process.pid))
            if stopped_s is None and began_s is not None and now - began_s > command.limit_s:
                stopped_s = now
                process.send_signal(signal.SIGINT)
            elif stopped_s is not None and now - stopped_s > _LIMIT_GRACE_S:
                process.kill()
            try:
                line = lines.get(timeout=_POLL_S)
            except queue.Empty:
                if process.poll() is not None and not reader.is_alive():
                    break
                show(command.on_poll())
                continue
            if line is None:
                break
            log.write(line)
            log.flush()
            show(command.on_line(plain_text(line)))
    process.wait()
    return 0.0 if began_s is None else time.monotonic() - began_s, stopped_s is not None, peak_mib


def _peak_mib(pid: int) -> float:
    """The most resident memory of a process since its start or last reset, MiB; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError, ValueError):
        return 0.0


def _read(stream: Iterable[str], lines: "queue.SimpleQueue[str | None]") -> None:
    try:
        for line in stream:
            lines.put(line)
    finally:
        lines.put(None)


@contextlib.contextmanager
def _leaves_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit, since the command, in a session of its own, would outlive this process."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(process: "subprocess.Popen[str] | Fork", log: TextIOBase) -> None:
    """Passes Ctrl-C on and waits. A second Ctrl-C, SIGTERM or a long wait kills the process."""
    log.write("^C\n")
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=_LEAVE_GRACE_S)
    except (KeyboardInterrupt, SystemExit, subprocess.TimeoutExpired):
        process.kill()
        process.wait()


def _since(log: Path, position: int) -> str:
    with log.open("rb") as file:
        file.seek(position)
        return plain_text(file.read().decode("utf-8", errors="replace"))


def _failure(command: Command, code: int, output: str) -> CommandError:
    """Quotes the command's own error sentence, or else the end of its output, and names the log."""
    sentences = re.findall(r"^Error: (.+)$", output, re.MULTILINE)
    if sentences:
        sentence = sentences[-1].strip().removesuffix(".")
        error = CommandError(f"{sentence} (from `{command.arguments[0]}`, log in {command.log}).")
        error.exit_code = code
        return error
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    tail = "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:]) or "  | (no output)"
    how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
    return CommandError(
        f"`{Path(command.arguments[0]).name}` {how} while {command.name.lower()}: its log is {command.log} "
        f"and ends as follows. Fix the cause, then run the same command again.\n{tail}"
    )
