"""Has shapes and types checked while tests run; keeps the time limits; says what failed and what was left out."""

import re
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

CHECKED = sys.version_info >= (3, 11)

# Before any test or other conftest imports the package. The jaxtyping that Python 3.10 gets wraps functions before
# numba compiles them, whatever @no_type_check says, so that the tests go without there.
if CHECKED:
    from jaxtyping import install_import_hook

    package = Path(__file__).parent / "f3rm_ext"
    # Other modules have pyright: checking each of their calls, too, would make some tests ten times slower.
    shaped = [path for path in package.rglob("*.py") if "from jaxtyping import" in path.read_text(encoding="utf-8")]
    names = [".".join(path.relative_to(package.parent).with_suffix("").parts) for path in shaped]
    install_import_hook([name.removesuffix(".__init__") for name in names], "beartype.beartype")


class Watch:
    """Says at once what fails, so that a run that is killed has said it; ends a run that takes too long.

    It lives in the process that prints, xdist's controller where tests run in several.
    """

    def __init__(self, config: pytest.Config, limit_s: float) -> None:
        self._config, self._limit_s = config, limit_s
        self._running: dict[str, float] = {}
        self._began = time.monotonic()
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.daemon = True

    def pytest_sessionstart(self) -> None:
        if self._limit_s > 0:
            self._timer.start()

    def pytest_sessionfinish(self) -> None:
        self._timer.cancel()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            first = next((line for line in message.splitlines() if line.strip()), "")
            after_min = (time.monotonic() - self._began) / 60
            self._say(f"FAILED {report.nodeid} in {report.when} after {after_min:.0f} min: {first[:300]}")

    def _say(self, line: str) -> None:
        terminal: Any = self._config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(line)
            terminal.flush()

    def _end(self) -> None:
        """As Ctrl-C would, so that what was found until now is reported."""
        capture: Any = self._config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():  # a test of this process may be running
            self._say(f"The limit of {self._limit_s:g} s for all tests is over. What was running:")
            for name, began in self._running.items():
                self._say(f"  {name} for {time.monotonic() - began:.0f} s")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # wakes it, too


def pytest_addoption(parser: pytest.Parser) -> None:
    """The limit of a run; that of a test is pytest-timeout's."""
    parser.addini(
        "run_limit_s", "Seconds after which a run ends with a report of what it found; 0 for no limit", default="0"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Watches where the results come together."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Watch(config, float(config.getini("run_limit_s"))))


LONGEST_FIRST = (
    "tests/e2e",
    "tests/integration/test_eval_query.py",
    "tests/integration/test_masks.py",
    "tests/integration/test_demo.py",
    "tests/integration",
)
"""The rooms that take longest come first, so that both workers end at about the same time."""
TOGETHER = "tests/e2e/"
"""Browser tests share the browser, trainings and viewers: they run in one worker, one after the other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long rooms first, where everything is run; leaves tests of shapes out where these are not checked."""

    def rank(item: pytest.Item) -> int:
        starts = (rank for rank, room in enumerate(LONGEST_FIRST) if item.nodeid.startswith(room))
        return next(starts, len(LONGEST_FIRST))

    items.sort(key=rank)
    for item in items:
        if not CHECKED and item.get_closest_marker("shapes"):
            item.add_marker(pytest.mark.skip(reason="shapes are checked from Python 3.11 on"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile`` that keeps the order of files and hands the browser tests to one worker."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Rooms(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Rooms(config, log)


REMEDIES = {  # part of a reason: how to have these tests
    "chromium": "install Chromium (Debian: apt-get install chromium)",
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
