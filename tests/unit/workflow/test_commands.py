"""Commands: logs, events, failures as one sentence, time limits, Ctrl-C."""

import io
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from f3rm_ext.workflow.commands import Command, CommandError, program, run_command

TELL = "from f3rm_ext import events; "
PATIENT = """
import signal, sys, time
from f3rm_ext import events
def stop(number, frame):
    print("saved", flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
events.progress(events.STEPS, 1, 2)
time.sleep(60)
"""


CALLER = """
import sys
from pathlib import Path
from rich.console import Console
from f3rm_ext.workflow.commands import Command, run_command
command = Command("Working", [sys.executable, "-c", {code!r}], Path({log!r}))
try:
    run_command(command, Path.cwd(), Console(file=sys.stderr))
except KeyboardInterrupt:
    sys.exit(77)
"""


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def python(code: str, tmp_path: Path, **options: object) -> Command:
    return Command("Working", [sys.executable, "-c", code], tmp_path / "logs" / "work.log", **options)  # type: ignore[arg-type]


def test_output_goes_to_the_log_and_time_to_the_console(tmp_path: Path, console: Console) -> None:
    outcome = run_command(
        python("import sys; print('out'); print('err', file=sys.stderr)", tmp_path), tmp_path, console
    )
    log = (tmp_path / "logs" / "work.log").read_text()
    assert log.startswith("$ python -c ") and "out\n" in log and "err\n" in log
    assert outcome.seconds > 0 and not outcome.stopped_by_limit
    assert "done Working" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_second_run_keeps_the_first_log(tmp_path: Path, console: Console) -> None:
    for word in ("first", "second"):
        run_command(python(f"print('{word}'); open('{word}', 'w').close()", tmp_path), tmp_path, console)
    log = (tmp_path / "logs" / "work.log").read_text()
    assert log.index("first") < log.index("second") and log.count("$ python") == 2
    assert (tmp_path / "first").is_file(), "it runs in the folder"


def test_notes_and_results_come_by_events(tmp_path: Path, console: Console) -> None:
    code = "[events.note(text) for text in ('seen', 'seen', 'kept')]; events.result(a=1); events.result(b=2)"
    outcome = run_command(python(f"{TELL}{code}; print('Error: no event')", tmp_path), tmp_path, console)
    assert outcome.notes == ["seen", "kept"] and outcome.result == {"a": 1, "b": 2}


@pytest.mark.parametrize("made_progress", [False, True])
def test_a_user_error_of_the_command_is_passed_on(tmp_path: Path, console: Console, made_progress: bool) -> None:
    code = "from f3rm_ext.errors import *; install_excepthook(); "
    code += "events.progress('Steps', 1, 9); " if made_progress else ""
    code += "print('noise'); raise DoubtfulPosesError('The photo a.png is missing: copy it back.')"
    with pytest.raises(CommandError, match=r"^The photo a\.png.*back \(from") as caught:
        run_command(python(TELL + code, tmp_path), tmp_path, console)
    assert str(tmp_path / "logs" / "work.log") in str(caught.value) and "noise" not in str(caught.value)
    assert caught.value.exit_code == 3 and caught.value.made_progress == made_progress


def test_an_old_error_in_the_log_is_not_taken_for_a_new_one(tmp_path: Path, console: Console) -> None:
    with pytest.raises(CommandError, match="first"):
        run_command(python("print('the first'); raise SystemExit(2)", tmp_path), tmp_path, console)
    with pytest.raises(CommandError) as caught:
        run_command(python("print('something else'); raise SystemExit(3)", tmp_path), tmp_path, console)
    assert "first" not in str(caught.value) and "something else" in str(caught.value)


def test_a_log_that_cannot_be_written(tmp_path: Path, console: Console) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(CommandError, match=r"work\.log"):
        run_command(python("", tmp_path), tmp_path, console)


def test_a_crash_shows_the_end_of_the_log_and_where_it_is(tmp_path: Path, console: Console) -> None:
    code = "for i in range(50): print('line', i)\nraise ValueError('broken tensor')"
    with pytest.raises(CommandError) as caught:
        run_command(python(code, tmp_path), tmp_path, console)
    message = str(caught.value)
    assert "failed with exit code 1" in message and "ValueError: broken tensor" in message
    assert "line 10" not in message and str(tmp_path / "logs" / "work.log") in message


def test_a_silent_death_by_signal_is_named(tmp_path: Path, console: Console) -> None:
    with pytest.raises(CommandError, match=r"signal 9(.|\n)*no output"):
        run_command(python("import os; os.kill(os.getpid(), 9)", tmp_path), tmp_path, console)


def test_the_limit_counts_from_the_first_step_and_is_no_failure(tmp_path: Path, console: Console) -> None:
    command = python(PATIENT, tmp_path, limit_s=0.05)
    start = time.monotonic()
    outcome = run_command(command, tmp_path, console)
    assert outcome.stopped_by_limit and time.monotonic() - start < 30
    assert 0.05 <= outcome.working_s <= outcome.seconds
    assert "saved" in command.log.read_text()


def test_what_cannot_be_saved_at_the_limit_is_a_failure(tmp_path: Path, console: Console) -> None:
    code = PATIENT.replace("sys.exit(130)", "events.error('The disk is full: make room.'); sys.exit(2)")
    with pytest.raises(CommandError, match="The disk is full"):
        run_command(python(code, tmp_path, limit_s=0.05), tmp_path, console)


def test_preparations_have_no_limit(tmp_path: Path, console: Console) -> None:
    code = TELL + "import time; events.progress('Finding features', 1, 2); time.sleep(0.6)"
    outcome = run_command(python(code, tmp_path, limit_s=0.01), tmp_path, console)
    assert not outcome.stopped_by_limit and outcome.working_s == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 77), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_reach_the_command_once_and_wait_for_it(
    tmp_path: Path, wait_until: Callable[..., None], number: int, code: int
) -> None:
    log = tmp_path / "work.log"
    process = subprocess.Popen([sys.executable, "-c", CALLER.format(code=PATIENT, log=str(log))])
    wait_until(lambda: log.exists() and "ready" in log.read_text().split("\n"), 60, "it began")
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    assert re.search(r"ready\n\^C", log.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a command with the program that started it")
def test_a_command_dies_with_the_program_that_started_it(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    log, code = tmp_path / "log", "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", CALLER.format(code=code, log=str(log))])
    wait_until(lambda: log.exists() and "\npid " in log.read_text(), 60, "it began")
    child = psutil.Process(int(log.read_text().splitlines()[1].split()[1]))
    process.kill()
    process.wait(timeout=60)
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_the_peak_of_memory_is_kept_although_it_is_freed(tmp_path: Path, console: Console) -> None:
    code = "import time; a = bytearray(200 << 20); del a; time.sleep(1)"
    outcome = run_command(python(code, tmp_path), tmp_path, console)
    assert 200 < outcome.peak_mib < 300


def test_programs_beside_this_python_come_first() -> None:
    name = Path(sys.executable).name
    assert program(name) == str(Path(sys.executable).parent / name)
    assert program("no-such-program-here") == "no-such-program-here"
