"""Has the shapes and types of f3rm_ext's functions checked while tests run; says at the end what was left out."""

import re
import sys
from collections import Counter

import pytest

CHECKED = sys.version_info >= (3, 11)

# Before any test or other conftest imports the package. The jaxtyping that Python 3.10 gets wraps functions before
# numba compiles them, whatever @no_type_check says, so that the tests go without there.
if CHECKED:
    from jaxtyping import install_import_hook

    install_import_hook("f3rm_ext", "beartype.beartype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves tests of these checks out where nothing is checked."""
    for item in items:
        if not CHECKED and item.get_closest_marker("shapes"):
            item.add_marker(pytest.mark.skip(reason="shapes are checked from Python 3.11 on"))


REMEDIES = {  # part of a reason: how to have these tests
    "chromium": "install Chromium (Debian: apt-get install chromium)",
    "open3d": "install libusb, which open3d needs (Debian: apt-get install libusb-1.0-0)",
    "playwright|extractor_conse|transformers|trimesh": "make install",
    "CUDA device|gsplat": "run them on a machine with an NVIDIA GPU: pytest tests/gpu",
    "tinycudann": "install tiny-cuda-nn (github.com/NVlabs/tiny-cuda-nn)",
    "F3RM_EXT_TEST_DATA|no fox|no chair|real weights|is not there": "set F3RM_EXT_TEST_DATA to captures and weights",
    "one thread only": "NUMBA_NUM_THREADS=2 pytest tests/unit/splat/rasterize",
    "Python 3.11": "make PYTHON=python3.11",
    "needs root": "run them as root",
}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason why tests were skipped: how many, and how to have them."""
    skipped: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped[reason.removeprefix("Skipped: ")] += 1
    if not skipped:
        return
    terminalreporter.section("left out")
    for reason, count in skipped.most_common():
        remedy = next((remedy for part, remedy in REMEDIES.items() if re.search(part, reason)), "")
        terminalreporter.write_line(f"{count:>5}  {reason}{f' → {remedy}' if remedy else ''}")
