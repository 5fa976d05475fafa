"""Runs nerfstudio's commands and ours in forks of one process, as the installed scripts would: imports cost time once.

As a program this is the server: it reads a task a line (JSON) and answers with the process id and then the exit code.
:class:`CommandServer` is its client. Loaded by file name from ``conftest.py``.
"""

import ctypes
import gc
import importlib
import itertools
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

BIN = Path(sys.executable).parent
MAINS = {
    "ns-train": "nerfstudio.scripts.train:entrypoint",
    "ns-eval": "nerfstudio.scripts.eval:entrypoint",
    "ns-render": "nerfstudio.scripts.render:entrypoint",
    "ns-viewer": "nerfstudio.scripts.viewer.run_viewer:entrypoint",
    "f3rm-ext": "f3rm_ext.scripts.cli:main",
}
LATER_IMPORTS = ("torchmetrics.functional.image", "f3rm_ext.mesh.semantics.mesh_run", "f3rm_ext.nerf.hash_kernels")
"""What commands import where they need it, which takes them seconds."""
IMPORT_S = 240
"""Patience with the imports of a busy machine."""


@dataclass
class Finished:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """Both streams."""
        return self.stdout + self.stderr

    def succeeds(self) -> "Finished":
        """Itself, of a command that has to end well."""
        assert self.code == 0, f"exit code {self.code}\n{self.text[-4000:]}"
        return self

    def refuses(self, pattern: str = "") -> str:
        """The one sentence of a command that failed as it should, in which the pattern is found."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("Error: ")]
        assert self.code == 2, f"exit code {self.code}\n{self.stdout[-1500:]}\n{self.stderr[-3000:]}"
        assert "Traceback" not in self.text and len(lines) == 1, self.stderr[-3000:]
        assert lines[0].endswith(".") and re.search(pattern, lines[0]), lines[0]
        return lines[0]


class CommandServer:
    """Starts commands, one at a time.

    Args:
        environment: of the server; a command may have variables of its own, which count from the end of imports on.
        folder: where the streams of commands are kept.
    """

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self._streams = {name: folder / name for name in ("stdout", "stderr")}
        self._said = b""
        self._running: list[int] = []
        with (folder / "server").open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=dict(environment),
                start_new_session=True,
            )
        self._is_ready = False

    def start(self, *argv: object, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> int:
        """Starts a command and returns its process id.

        Args:
            folder: where it works; the tests' own by default.
            environment: variables of its own.
        """
        return self.start_ranks(1, *argv, folder=folder, environment=environment)[0]

    def start_ranks(
        self, ranks: int, *argv: object, folder: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> list[int]:
        """Starts a command as torchrun would, in several processes that know of each other; returns their ids.

        Args:
            ranks: number of processes; 1 is a plain command.
        """
        assert not self._running, "finish the command before"
        if not self._is_ready:
            assert self._answer(IMPORT_S) == "ready"
            self._is_ready = True
        words = [str(word) for word in argv]
        port = free_port()
        streams = [self._streams_of(rank) for rank in range(ranks)]
        for path in itertools.chain(*streams):
            path.unlink(missing_ok=True)  # what a command before has said
        task = {
            "main": MAINS.get(words[0], words[0]),
            "argv": [str(BIN / words[0]), *words[1:]],
            "folder": str(folder or Path.cwd()),
            "environment": dict(environment or {}),
            "ranks": [_torchrun(rank, ranks, port) if ranks > 1 else {} for rank in range(ranks)],
            "streams": [[str(path) for path in paths] for paths in streams],
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        self._process.stdin.flush()
        self._running = json.loads(self._answer(30))
        return self._running

    def finish(self, timeout_s: float) -> Finished:
        """Waits for the command that was started last; kills it and its children where it takes too long."""
        return self.finish_ranks(timeout_s)[0]

    def finish_ranks(self, timeout_s: float) -> list[Finished]:
        """Waits for all processes of :meth:`start_ranks`; kills them where they take too long."""
        try:
            codes = json.loads(self._answer(timeout_s))
        except BaseException as error:  # a test's own limit comes as an exception, too
            self._kill()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"{error}; it said:\n{self.said()[-4000:]}") from None
            raise
        self._running = []
        return [
            Finished(code, *(path.read_text(errors="replace") for path in self._streams_of(rank)))
            for rank, code in enumerate(codes)
        ]

    def said(self) -> str:
        """What the running command has said so far."""
        paths = (path for rank in range(len(self._running)) for path in self._streams_of(rank))
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    def abandon(self) -> None:
        """Kills a command that a failed test did not finish; does nothing where none runs."""
        if self._running:
            self._kill()

    def stop(self) -> None:
        """Ends the server."""
        self.abandon()
        self._process.kill()
        self._process.communicate()

    def _streams_of(self, rank: int) -> list[Path]:
        return [path.with_name(f"{path.name}.{rank}") for path in self._streams.values()]

    def _kill(self) -> None:
        for process in self._running:
            try:
                os.killpg(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._answer(30)
        self._running = []

    def _answer(self, timeout_s: float) -> str:
        """The server's next line."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._said:
            if not select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError(f"no end after {timeout_s} s")
            more = os.read(descriptor, 4096)
            assert more, "the server of commands has died"
            self._said += more
        line, self._said = self._said.split(b"\n", 1)
        return line.decode()


def free_port() -> int:
    """Names a port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables by which torchrun tells a process its place."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}


def run_to_the_end(
    argv: list[str], environment: Mapping[str, str], timeout_s: float, folder: Path | None = None
) -> Finished:
    """Runs a program in a process of its own; none of its children outlives it, also where it takes too long."""
    with subprocess.Popen(
        argv,
        env=dict(environment),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
    return Finished(process.returncode, stdout, stderr)


def _become(task: dict, rank: int) -> None:
    """In the fork: runs a command as its script would; does not return."""
    os.setsid()
    os.chdir(task["folder"])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor, path in zip((1, 2), task["streams"][rank], strict=True):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.update({**task["environment"], **task["ranks"][rank]})
    subprocess.Popen = CommandFork
    _run(task["argv"], task["main"])


class CommandFork(subprocess.Popen):
    """The commands that a command starts: forks of it where they are among :data:`MAINS` or a program of Python.

    All else is as :class:`subprocess.Popen` does it. Open files are closed, as they would be in a new program.
    """

    def __init__(self, args: object, **options: Any) -> None:
        words = [str(word) for word in args] if isinstance(args, list | tuple) else []
        dies_with_us = words[1:4] == ["-I", "-S", "-c"] and "prctl(1, 9)" in words[4]  # f3rm_ext.workflow.commands
        words = words[6:] if dies_with_us else words
        name = Path(words[0]).name if words else ""
        is_program = words[:1] == [sys.executable] and words[1:2] in (["-c"], ["-m"])
        if not options.get("start_new_session") or not (is_program or name in MAINS):
            super().__init__(args, **options)
            return

        def run() -> None:
            _close_files(options.get("pass_fds", ()))
            if dies_with_us:
                ctypes.CDLL(None).prctl(1, 9)
            os.environ.clear()
            os.environ.update(options["env"])
            for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                signal.signal(number, handler)
            gc.enable()  # Popen disables it
            _run(words, MAINS.get(name, ""))

        sys.stdout.flush()
        sys.stderr.flush()
        super().__init__(args, preexec_fn=run, **options)


def _close_files(kept: Iterable[int]) -> None:
    """Closes all descriptors but the streams and those to keep; by that Popen knows that its program has begun."""
    first = 3
    for number in sorted(kept):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _run(argv: list[str], main: str) -> NoReturn:
    """Runs a command in this process as its script would, and leaves."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    sys.argv = argv
    code: object = 0
    try:
        try:
            if sys.argv[1:2] == ["-c"]:
                program, sys.argv = sys.argv[2], ["-c", *sys.argv[3:]]
                exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
            elif sys.argv[1:2] == ["-m"]:
                module, sys.argv = sys.argv[2], sys.argv[2:]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                module, _, name = main.partition(":")
                code = getattr(importlib.import_module(module), name)()
        except SystemExit as leaving:
            code = leaving.code
        except BaseException:
            code = 1
            sys.excepthook(*sys.exc_info())
    except SystemExit as leaving:  # an excepthook may leave, too
        code = leaving.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0))


def _warm_up() -> None:
    """Does what each fork would do again, and starts no threads, which forks would miss."""
    import numba

    from f3rm_ext.utils.open3d_library import open3d

    open3d()
    numba.njit(lambda number: number + 1)(1)  # numba learns its types and operations when it compiles first
    gc.collect()
    gc.freeze()  # forks need not search what they share


def serve() -> None:
    """Imports everything, then runs what it reads."""
    answers = os.dup(1)
    os.dup2(2, 1)
    os.set_inheritable(answers, False)
    for module in (*(main.partition(":")[0] for main in MAINS.values()), *LATER_IMPORTS):
        importlib.import_module(module)
    _warm_up()
    os.write(answers, b"ready\n")
    for line in sys.stdin.buffer:
        task = json.loads(line)
        pids = []
        for rank in range(len(task["ranks"])):
            pid = os.fork()
            if pid == 0:
                os.close(answers)
                _become(task, rank)
            pids.append(pid)
        os.write(answers, json.dumps(pids).encode() + b"\n")
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        os.write(answers, json.dumps(codes).encode() + b"\n")


if __name__ == "__main__":
    serve()
