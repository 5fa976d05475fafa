"""Tables of the docs are those that their scripts make."""

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.integration


@pytest.mark.parametrize("script", ["make_methods.py", "make_benchmarks.py", "make_planning.py"])
def test_tables_are_up_to_date(script: str) -> None:
    done = subprocess.run([sys.executable, str(DOCS / script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
