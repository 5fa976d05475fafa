"""The versions of gsplat that splats work with, one of which is installed."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSIONS = ("1.4.0", "1.5.3")


def download(version: str, folder: Path) -> str:
    """Installs the Python code of a version of gsplat into a folder of its own.

    Returns:
        Why it failed; empty if it did not.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-input", "--retries", "1"]
    command += ["--disable-pip-version-check", "--target", str(folder), f"gsplat=={version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "the package index does not answer"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


@contextmanager
def imported_from(folder: Path) -> Iterator[None]:
    """While this is entered, gsplat is the one in a folder, also for our module that derives a class from one of it.

    The modules are put back afterwards, so that other tests find their own.
    """
    rooms = ("gsplat", "f3rm_ext.splat.densify.default")
    mine = {name: module for name, module in sys.modules.items() if name.startswith(rooms)}
    for name in mine:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.startswith(rooms)]:
            del sys.modules[name]
        sys.modules.update(mine)
