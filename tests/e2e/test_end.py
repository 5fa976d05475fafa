"""What browser tests share ends with them: Chromium does not go on beside the tests that follow."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DURING = """
import psutil

def chromium():
    return [p.pid for p in psutil.Process().children(recursive=True) if "chromium" in p.name()]

def test_it_runs(browser):
    browser.new_page().set_content("<canvas></canvas>")  # left open
    assert chromium()
"""
AFTER = """
import psutil

def test_it_has_ended():
    left = [p.name() for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not left
"""


def test_chromium_ends_with_the_last_browser_test(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("viewer_page", HERE / "viewer_page.py")
    assert spec is not None and spec.loader is not None
    driver = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(driver)
    if reason := driver.why_not():
        pytest.skip(reason)
    shutil.copytree(HERE, tmp_path / "tests" / "e2e", ignore=shutil.ignore_patterns("test_*", "__pycache__"))
    (tmp_path / "tests" / "unit").mkdir()
    (tmp_path / "tests" / "e2e" / "test_during.py").write_text(DURING)
    (tmp_path / "tests" / "unit" / "test_after.py").write_text(AFTER)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/e2e", "tests/unit"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
