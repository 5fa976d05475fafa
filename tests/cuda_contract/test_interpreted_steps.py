"""Whole steps with Triton's kernels, in a process where Triton interprets them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.4", reason="triton is not installed")


def test_interpreted(tmp_path: Path) -> None:
    """Triton decides when it is imported whether it interprets."""
    here = Path(__file__).parent
    checks = here / "interpreted_steps.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", checks],
        env={**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(
            [str(here), *filter(None, [os.environ.get("PYTHONPATH")])])},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-1000:]
