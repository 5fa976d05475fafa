"""What the processes of a run tell each other: two processes on the CPU, started as torchrun would."""

from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).with_name("rank_programs.py")


def run(command_server: Any, program: str) -> list[Any]:
    code = f"import runpy; runpy.run_path({str(PROGRAMS)!r}, run_name='__main__')"
    command_server.start_ranks(2, "python", "-c", code, program)
    return command_server.finish_ranks(60)


@pytest.mark.parametrize("program", ["messages", "same_parameters", "gradients", "weights", "shards"])
def test_two_processes(command_server: Any, program: str) -> None:
    for done in run(command_server, program):
        done.succeeds()


def test_where_the_first_cannot_begin_the_others_end_silently(command_server: Any) -> None:
    first, second = run(command_server, "failing_first")
    assert (first.code, second.code) == (2, 2)
    assert "Error: There is a reason." in first.stderr and "Error" not in second.stderr
