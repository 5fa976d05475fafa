"""Starts commands in forks of one process that has imported what they share, so that imports take time only once.

Every command is a process of its own all the same, which the system ends with the program that started it. Forks are
made on Linux, and only where there is no graphics card, because a driver that was asked for its cards cannot be used
after a fork. The process that forks is the fork server of Python's multiprocessing.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from glob import glob
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

PRELOADED = ["f3rm_ext.workflow.fork_server"]
"""Modules that the server imports."""
STARTING = ("ns-train", "ns-eval", sys.executable)
"""Commands that need all that the server imports. Others are forked only if it is there already."""
DRIVERS = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""Files through which graphics cards are reached."""
_PR_SET_PDEATHSIG = 1
_made: list[int] = []
"""Process ids of the forks so far; without any, there is no server yet."""


class Fork:
    """A command that was started; has the methods of :class:`subprocess.Popen` that are needed."""

    def __init__(self, process: BaseProcess, stdout: TextIO) -> None:
        self._process = process
        self.stdout = stdout
        """Both streams of the command, as text."""
        self.pid = process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns the exit code, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code.

        Raises:
            TimeoutExpired: of subprocess; it still runs.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


def can_fork() -> bool:
    """Tells whether commands are started in forks on this machine."""
    return sys.platform == "linux" and not any(glob(pattern) for pattern in DRIVERS)


def start_fork(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Fork | None:
    """Starts a command.

    Args:
        words: a console script that was installed in this environment, or this Python with ``-m``, and arguments.
        folder: working directory.
        environment: of the command.

    Returns:
        None where forks are not made, would not save time, or the command is another program.
    """
    if not can_fork() or not _is_known(words) or not (_made or words[0] in STARTING):
        return None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_become, args=(list(words), str(folder), dict(environment), writer))
    try:
        process.start()
    except (OSError, EOFError):  # the server did not come up
        return None
    finally:
        writer.close()
    stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace")
    reader.close()
    fork = Fork(process, stdout)
    _made.append(fork.pid)
    return fork


def _is_known(words: Sequence[str]) -> bool:
    if words[0] == sys.executable:
        return words[1:2] == ["-m"]
    return bool(entry_points(group="console_scripts", name=words[0]))


def _become(words: list[str], folder: str, environment: dict[str, str], output: Connection) -> None:
    """In the fork: runs a command as its script would; does not return."""
    die_with_parent()
    starter = multiprocessing.parent_process()
    if starter is None or not starter.is_alive():
        os._exit(1)
    os.setsid()
    os.chdir(folder)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    # The old ones may believe that they write to a file.
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    sys.stdin = open(os.devnull, encoding="utf-8")
    os.environ.clear()
    os.environ.update(environment)
    code: object = 0
    try:
        try:
            code = _run(words)
        except SystemExit as leaving:
            code = leaving.code
        except BaseException as error:
            code = 1
            sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as leaving:  # ours says so for a mistake of the user
        code = leaving.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()  # type: ignore[union-attr]
    os._exit(int(code or 0))  # type: ignore[arg-type]


def _stream(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _run(words: list[str]) -> object:
    if words[0] == sys.executable:
        sys.argv = words[2:]
        sys.path.insert(0, "")  # as Python does
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        return 0
    (script,) = entry_points(group="console_scripts", name=words[0])
    sys.argv = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    return script.load()()


def die_with_parent() -> None:
    """Lets the kernel kill this process when the one that started it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
