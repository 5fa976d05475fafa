"""Runs a command with a log file, a progress bar and clean interruption, and collects what it tells by events."""

import contextlib
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from f3rm_ext.errors import UserError
from f3rm_ext.events import STEPS, EventPipe
from f3rm_ext.utils.signals import handle_signals

if TYPE_CHECKING:
    from rich.console import Console

_POLL_S = 0.25
_TAIL_LINES = 6
_LIMIT_GRACE_S, _LEAVE_GRACE_S = 60.0, 30.0
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_DIES_WITH_US = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Linux: has the kernel end a command when the program that started it is killed. Another one may run it again then."""


class CommandError(UserError):
    """A command failed."""

    def __init__(self, sentence: str, *, exit_code: int = UserError.exit_code, made_progress: bool = False) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
        self.made_progress = made_progress
        """Whether it had made steps."""


@dataclass
class Command:
    """A command to run, as a user would type it."""

    title: str
    """Name for the progress bar."""
    arguments: Sequence[str]
    """Program and arguments. The program is searched beside this Python first, so no environment has to be active."""
    log: Path
    """File to which the output is appended."""
    limit_s: float = float("inf")
    """Time after the first step at which the command is stopped with SIGINT, which is a failure only if it says so."""
    on_poll: Callable[[], None] = lambda: None
    """Called a few times a second."""

    @property
    def text(self) -> str:
        """The command line."""
        return shlex.join(["python" if part == sys.executable else part for part in self.arguments])


@dataclass
class Outcome:
    """Times, peak memory and result of a command that has ended."""

    seconds: float = 0.0
    working_s: float = 0.0
    """Wall time since the first step (:data:`f3rm_ext.events.STEPS`), without preparations; 0 without steps."""
    stopped_by_limit: bool = False
    peak_mib: float = 0.0
    """Peak resident memory of its process, MiB; 0 where the system does not tell."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user, each once."""
    result: dict[str, Any] = field(default_factory=dict)
    """Values that it was run for."""
    error: str = ""
    """Why it ended."""


def run_command(command: Command, folder: Path, console: "Console") -> Outcome:
    """Runs a command to its end, with a progress bar on a console and, at the end, a line with the time taken.

    Raises:
        CommandError: the command failed. The message is its own error sentence, if it told one.
        KeyboardInterrupt: the user pressed Ctrl-C; the command had time to save.
        SystemExit: this process got SIGTERM; the command had time to save.
    """
    start_s, outcome, events = time.monotonic(), Outcome(), EventPipe()
    with contextlib.closing(events), _open_log(command) as log:
        position = log.tell()
        # The command, in a session of its own, would outlive this process.
        with handle_signals(_leave, signal.SIGTERM):
            process = _start(command, folder, log, events)
            try:
                _follow(process, command, events, outcome, console)
            except (KeyboardInterrupt, SystemExit):
                log.write(b"^C\n")
                log.flush()
                _interrupt(process)
                raise
            except BaseException:
                process.kill()
                process.wait()
                raise
    if process.returncode and (outcome.error or not outcome.stopped_by_limit):
        raise _failure(command, process.returncode, position, outcome)
    outcome.seconds = time.monotonic() - start_s
    console.print(f"  [green]done[/] {command.title} [dim]({outcome.seconds:.0f} s)[/]", highlight=False)
    return outcome


def program(name: str) -> str:
    """Returns the path of a program beside this Python, or its plain name if it is not there."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else name


def _open_log(command: Command) -> BufferedWriter:
    try:
        command.log.parent.mkdir(parents=True, exist_ok=True)
        log = command.log.open("ab")
        log.write(f"$ {command.text}\n".encode(errors="backslashreplace"))
        log.flush()
    except OSError as error:
        raise CommandError(f"{command.log} cannot be written ({error.strerror}): make room, then try again.") from error
    return log


def _start(command: Command, folder: Path, log: BufferedWriter, events: EventPipe) -> subprocess.Popen[bytes]:
    first, *rest = command.arguments
    words = [first if Path(first).is_absolute() else program(first), *rest]
    if sys.platform == "linux":
        words = [sys.executable, "-I", "-S", "-c", _DIES_WITH_US, str(os.getpid()), *words]
    return subprocess.Popen(
        words,
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "160", "TQDM_DISABLE": "1", **events.variable},
        pass_fds=[events.writer],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Ctrl-C must reach it only once: from us, and not from the terminal as well.
        start_new_session=True,
    )


def _follow(
    process: subprocess.Popen[bytes], command: Command, events: EventPipe, outcome: Outcome, console: "Console"
) -> None:
    """Shows progress and fills in the outcome until the process ends."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("  {task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    columns = (*columns, TextColumn("ETA"), TimeRemainingColumn())
    first_s: float | None = None
    stopped_s: float | None = None
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(command.title, total=None, note="")
        is_running = True
        while is_running:
            is_running = process.poll() is None  # before reading, so that nothing is left in the pipe at the end
            outcome.peak_mib = max(outcome.peak_mib, _peak_mib(process.pid))
            for event in events.read():
                match event["event"]:
                    case "progress":
                        if event["stage"] == STEPS and first_s is None:
                            first_s = time.monotonic()
                        count = f"{event['stage']}: {event['done']:,.0f} of {event['total']:,.0f}"
                        bar.update(task, completed=event["done"], total=event["total"], note=count)
                    case "note" if event["text"] not in outcome.notes:
                        outcome.notes.append(event["text"])
                    case "result":
                        outcome.result |= event["values"]
                    case "error":
                        outcome.error = event["text"]
            now = time.monotonic()
            outcome.working_s = 0.0 if first_s is None else now - first_s
            if stopped_s is None and outcome.working_s > command.limit_s:
                stopped_s, outcome.stopped_by_limit = now, True
                process.send_signal(signal.SIGINT)
            elif stopped_s is not None and now - stopped_s > _LIMIT_GRACE_S:
                process.kill()
            command.on_poll()
            if is_running:
                select.select([events.reader], [], [], _POLL_S)


def _peak_mib(pid: int) -> float:
    """The peak resident memory of a process since its start or last reset, MiB; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError, ValueError):
        return 0.0


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Passes Ctrl-C on and waits. A second Ctrl-C, SIGTERM or a long wait kills the process."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=_LEAVE_GRACE_S)
    except (KeyboardInterrupt, SystemExit, subprocess.TimeoutExpired):
        process.kill()
        process.wait()


def _failure(command: Command, code: int, position: int, outcome: Outcome) -> CommandError:
    """Quotes the command's own error sentence, or else the end of its output, and names the log."""
    made_progress = outcome.working_s > 0
    if outcome.error:
        sentence = outcome.error.strip().removesuffix(".")
        text = f"{sentence} (from `{Path(command.arguments[0]).name}`, log in {command.log})."
        return CommandError(text, exit_code=max(code, UserError.exit_code), made_progress=made_progress)
    with command.log.open("rb") as log:
        log.seek(position)
        output = _ANSI.sub("", log.read().decode("utf-8", errors="replace"))
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    tail = "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:]) or "  | (no output)"
    how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
    return CommandError(
        f"`{Path(command.arguments[0]).name}` {how} ({command.title}): its log is {command.log} "
        f"and ends as follows. Fix the cause, then run the same command again.\n{tail}",
        made_progress=made_progress,
    )
