"""The progress bar: what it counts, and how fast; where messages go."""

import io

import pytest
from rich.console import Console

from f3rm_ext.utils.console import console, image_progress, messages_to_stderr


def drawn(count: int, **options: bool) -> str:
    stream = io.StringIO()
    with image_progress("points", Console(file=stream, width=120), **options) as progress:
        task = progress.add_task("Counting", total=4)
        for _ in range(count):
            progress.advance(task)
    return stream.getvalue()


def test_bar_shows_count_rate_and_time_left() -> None:
    last = drawn(4).strip().splitlines()[-1]
    assert last.startswith("Counting") and "4/4" in last and "points/s" in last and "ETA" in last


def test_rate_is_open_before_the_first_step() -> None:
    assert "- points/s" in drawn(0)


def test_messages_go_to_stderr_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err, later = io.StringIO(), io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    with messages_to_stderr():
        console().print("aside")
    monkeypatch.setattr("sys.stdout", later)
    console().print("here")
    assert (out.getvalue(), err.getvalue(), later.getvalue()) == ("", "aside\n", "here\n")
