"""The end of a test run says what was left out, and how to have it."""

import subprocess
import sys
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


@pytest.fixture
def run(tmp_path: Path):
    """Runs some tests in a process of their own with this project's root conftest; gives what is printed."""

    def run(tests: str, *options: str) -> str:
        (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    shapes\n")
        (tmp_path / "test_it.py").write_text(tests)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_reasons_are_counted_and_answered(run, options: tuple[str, ...]) -> None:
    end = run(SKIPPED, *options).partition("left out")[2]
    assert "    3  there is no chromium on the PATH → install Chromium (Debian: apt-get install chromium)\n" in end
    assert "    1  it is Sunday\n" in end


def test_nothing_is_said_where_nothing_was_skipped(run) -> None:
    assert "left out" not in run("def test_it(): ...")
