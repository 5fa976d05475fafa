"""What a test run says: failures at once, what was left out at the end, and how to have it; and its limit."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = """
import pytest

@pytest.mark.parametrize("number", range(3))
@pytest.mark.skip(reason="there is no chromium on the PATH")
def test_page(number): ...

def test_odd():
    pytest.skip("it is Sunday")
"""


Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs some tests in a process of their own with this project's root conftest; gives what is printed."""

    def run(tests: str, *options: str, expect: int = 0) -> str:
        (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    shapes\n")
        (tmp_path / "test_it.py").write_text(tests)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=200)
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout

    return run


WRONG = """
def test_wrong():
    assert 1 + 1 == 3, "arithmetic"
"""
WAITING = """
import time

def test_waiting():
    time.sleep(100)
"""
SAID_AT_ONCE = "FAILED test_it.py::test_wrong in call after 0 min: AssertionError: arithmetic\n"


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_failures_are_said_at_once_and_reasons_are_counted_and_answered(run: Run, options: tuple[str, ...]) -> None:
    said = run(SKIPPED + WRONG, *options, expect=1)
    assert SAID_AT_ONCE in said.partition("FAILURES")[0]
    end = said.partition("left out")[2]
    assert "    3  there is no chromium on the PATH → install Chromium (Debian: apt-get install chromium)\n" in end
    assert "    1  it is Sunday\n" in end


def test_the_limit_ends_a_run_with_its_report(run: Run) -> None:
    said = run(WRONG + WAITING, "-o", "run_limit_s=6", expect=2)
    at_once, _, report = said.partition("The limit of 6 s for all tests is over. What was running:\n")
    assert SAID_AT_ONCE in at_once
    assert report.startswith("  test_it.py::test_waiting for ") and "1 failed" in report and "FAILURES" in report


def test_a_test_has_a_limit(run: Run) -> None:
    said = run(WAITING, "--timeout=1", expect=1)
    assert "FAILED test_it.py::test_waiting in call after 0 min: Failed: Timeout (>1.0s) from pytest-timeout." in said
    assert "time.sleep(100)" in said
