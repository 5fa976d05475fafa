"""Events reach the program that started a command, and nothing else is written anywhere."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from f3rm_ext import events
from f3rm_ext.errors import ConfigError, report
from f3rm_ext.utils.console import image_progress, note


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[events.EventPipe]:
    """Events of this process arrive here."""
    pipe = events.EventPipe()
    for name, value in pipe.variable.items():
        monkeypatch.setenv(name, value)
    yield pipe
    pipe.close()


def test_all_kinds_arrive_in_order(pipe: events.EventPipe, capsys: pytest.CaptureFixture[str]) -> None:
    note("Two photos are blurred.")
    events.result(steps=3, seconds=0.5)
    report(ConfigError("--steps is -1."))
    assert pipe.read() == [
        {"event": "note", "text": "Two photos are blurred."},
        {"event": "result", "values": {"steps": 3, "seconds": 0.5}},
        {"event": "error", "text": "--steps is -1."},
    ]
    assert pipe.read() == []
    assert "--steps is -1." in capsys.readouterr().err


def test_bars_tell_the_first_and_the_last_of_quick_updates(pipe: events.EventPipe) -> None:
    with image_progress(disable=True) as bars:
        task = bars.add_task("Views of a test", total=50)
        for _ in range(50):
            bars.advance(task)
    done = [event["done"] for event in pipe.read()]
    assert done[0] == 1 and done[-1] == 50 and len(done) < 25


def test_children_inherit_the_pipe_or_find_it(pipe: events.EventPipe) -> None:
    code = "from f3rm_ext import events; events.note(events.__name__)"
    subprocess.run([sys.executable, "-c", code], pass_fds=[pipe.writer], check=True)
    assert len(pipe.read()) == 1
    if Path("/proc/self/fd").exists():
        process = multiprocessing.get_context("spawn").Process(target=events.note, args=("spawned",))
        process.start()
        process.join()
        assert [event["text"] for event in pipe.read()] == ["spawned"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the pipe cannot be found")
def test_a_reader_that_is_late_misses_nothing(pipe: events.EventPipe) -> None:
    code = "from f3rm_ext import events\nfor _ in range(1000): events.note(200 * 'a')\nevents.result(done=1)"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=3)  # the pipe is full
        arrived = []
        while child.poll() is None or len(arrived) < 1001:
            arrived += pipe.read()
    assert len(arrived) == 1001 and arrived[-1]["event"] == "result"


@pytest.mark.parametrize("place", [None, "", "nonsense", "FILE:0:0", "9999:1:0"])
def test_without_such_a_pipe_nothing_is_written(
    place: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "precious").open("wb") as file:
        if place is None:
            monkeypatch.delenv(events.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(events.VARIABLE, place.replace("FILE", str(file.fileno())))
        events.note("no one listens")
        events.progress("Steps", 1, 2)
    assert (tmp_path / "precious").read_bytes() == b""


def test_a_command_outlives_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = events.EventPipe()
    kept: Any = os.dup(pipe.writer)
    inode = os.fstat(kept).st_ino
    monkeypatch.setenv(events.VARIABLE, f"{kept}:{inode}:{os.getpid()}")
    pipe.close()
    events.note("first")  # the pipe is broken
    events.note("second")
    os.close(kept)
