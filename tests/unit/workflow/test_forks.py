"""Commands in forks, of a server that imports nothing."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from f3rm_ext.workflow import forks
from f3rm_ext.workflow.commands import Command, CommandError, run_command
from f3rm_ext.workflow.forks import Fork, start_fork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux")
SLEEP = "import time; print('asleep', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def no_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "PRELOADED", [])
    monkeypatch.setattr(forks, "DRIVERS", ())


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Fork]:
    """Starts a module with this code in a fork."""

    def start(code: str) -> Fork:
        (tmp_path / "forked_module.py").write_text(code)
        fork = start_fork([sys.executable, "-m", "forked_module", "a b"], tmp_path, {**os.environ, "NEW": "one"})
        assert fork is not None
        return fork

    return start


def test_it_runs_as_a_command_does(program: Callable[[str], Fork], tmp_path: Path) -> None:
    fork = program(
        "import os, sys\nprint(sys.argv[1:], __name__, os.environ['NEW'], os.getcwd())\n"
        "print('said', file=sys.stderr)\nos.system('echo child')\nsys.exit(3)"
    )
    assert fork.stdout.read().splitlines() == [f"['a b'] __main__ one {tmp_path}", "said", "child"]
    assert fork.wait(20.0) == 3 == fork.poll()


@pytest.mark.parametrize(
    ("code", "exit_code", "says"),
    [
        ("pass", 0, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        (
            "from f3rm_ext.errors import ConfigError, install_excepthook\n"
            "install_excepthook()\nraise ConfigError('Wrong: do right.')",
            2,
            "Error: Wrong: do right.\n",
        ),
        ("import atexit\natexit.register(print, 'left')", 0, "left\n"),
    ],
)
def test_how_it_ends(program: Callable[[str], Fork], code: str, exit_code: int, says: str) -> None:
    fork = program(code)
    said = fork.stdout.read()
    assert fork.wait(20.0) == exit_code and (said == says or says in said != "")


def test_signals(program: Callable[[str], Fork]) -> None:
    fork = program(SLEEP)
    assert fork.stdout.readline() == "asleep\n" and fork.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.05)
    fork.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in fork.stdout.read() and fork.wait(20.0) == 1
    fork.kill()  # nothing is left to kill
    other = program(SLEEP)
    other.stdout.readline()
    other.kill()
    assert other.wait(20.0) == -signal.SIGKILL


def test_it_ends_with_a_starter_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "forked_module.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    (tmp_path / "light_server.py").write_text("from f3rm_ext.workflow.forks import die_with_parent\ndie_with_parent()")
    (tmp_path / "starter.py").write_text(
        "import os, sys\nfrom pathlib import Path\nfrom f3rm_ext.workflow import forks\n"
        "if __name__ == '__main__':\n"
        "    forks.PRELOADED, forks.DRIVERS = ['light_server'], ()\n"
        "    fork = forks.start_fork([sys.executable, '-m', 'forked_module'], Path.cwd(), {**os.environ})\n"
        "    print(fork.stdout.readline(), flush=True)\n    fork.wait()\n"
    )
    with subprocess.Popen([sys.executable, "starter.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        os.kill(pid, 0)
        starter.kill()
    deadline = time.monotonic() + 20
    while _is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_where_there_is_a_card_or_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_fork(["ls"], tmp_path, {**os.environ}) is None
    assert start_fork([sys.executable, "-c", "pass"], tmp_path, {**os.environ}) is None
    monkeypatch.setattr(forks, "DRIVERS", (str(tmp_path / "nvidia*"),))
    assert forks.can_fork()
    (tmp_path / "nvidia0").touch()
    assert not forks.can_fork() and start_fork([sys.executable, "-m", "this"], tmp_path, {**os.environ}) is None


def test_a_command_with_log(tmp_path: Path) -> None:
    (tmp_path / "forked_module.py").write_text("print('working'); raise SystemExit(2)")
    command = Command("Work", [sys.executable, "-m", "forked_module"], tmp_path / "log", is_forked=True)
    with pytest.raises(CommandError, match="exit code 2 while work"):
        run_command(command, tmp_path, Console(file=io.StringIO()))
    assert (tmp_path / "log").read_text().splitlines()[-1] == "working"
