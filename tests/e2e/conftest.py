"""The real viewer, in this process or as a command, and pages of it; screenshot and HTML of pages of failed tests."""

import importlib.util
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

FAILED = pytest.StashKey[bool]()


def _load_driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("viewer_page", Path(__file__).with_name("viewer_page.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRIVER = _load_driver()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Lets fixtures know whether their test failed."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    if reason := DRIVER.why_not():
        pytest.skip(reason)
    with DRIVER.chromium() as browser:
        yield browser


@pytest.fixture
def check_without_webgl2(browser: Any) -> Callable[[Path], None]:
    """Checks that a page shows its picture and says why, in a browser without WebGL2."""

    def check(file: Path) -> None:
        page = browser.new_page()
        page.add_init_script("HTMLCanvasElement.prototype.getContext = () => null")
        page.goto(file.as_uri())
        page.locator("body[data-state=failed]").wait_for(timeout=60_000)
        assert page.locator("#poster").is_visible() and "WebGL2" in page.locator("#problem").inner_text()
        page.close()

    return check


@pytest.fixture(scope="module")
def kept_pages() -> Iterator[dict[str, Any]]:
    """The page that the test before has left open, by its address."""
    kept: dict[str, Any] = {}
    yield kept
    for view in kept.values():
        view.close()


@pytest.fixture
def open_page(
    browser: Any, request: pytest.FixtureRequest, tmp_path: Path, kept_pages: dict[str, Any]
) -> Iterator[Callable[..., Any]]:
    """Opens pages of a viewer; closes them after the test, and keeps what a failed test saw. One that is to be kept is
    that of the test before, if it passed: a page takes seconds to open."""
    pages: list[tuple[str, Any]] = []

    def open_one(url: str, keep: bool = False) -> Any:
        view = kept_pages.pop(url, None) if keep else None
        while kept_pages:  # it would draw on
            kept_pages.popitem()[1].close()
        pages.append((url if keep else "", view or DRIVER.ViewerPage(browser, url)))
        return pages[-1][1]

    yield open_one
    failed = request.node.stash.get(FAILED, False)
    for number, (url, view) in enumerate(pages):
        if failed:
            with suppress(Exception):  # a page may have crashed
                view.page.screenshot(path=tmp_path / f"page-{number}.png", timeout=10_000)
                (tmp_path / f"page-{number}.html").write_text(view.page.content())
                print(f"What the page showed: {tmp_path}/page-{number}.png")
        if url and not failed:
            kept_pages[url] = view
        else:
            view.close()


@pytest.fixture(scope="session")
def difference() -> Callable[..., float]:
    """Mean absolute difference of two pictures, 0 to 1."""
    return DRIVER.difference


@pytest.fixture(scope="package")
def serve(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Any]:
    """Gives the viewer of a run in this process, with small pictures, for as long as its context lasts."""

    @contextmanager
    def serve_one(config: Path) -> Iterator[Any]:
        with DRIVER.served_run(config, tmp_path_factory.mktemp("viewer") / "viewer.log") as viewer:
            viewer.control_panel._max_res.value = 64
            yield viewer

    return serve_one


@pytest.fixture(scope="package")
def viewer(serve: Callable[[Path], Any], trained: Any) -> Iterator[Any]:
    """The viewer of the trained run."""
    with serve(trained.config) as viewer:
        yield viewer


@pytest.fixture(scope="package")
def labelled_viewer(
    serve: Callable[[Path], Any],
    train: Callable[..., Any],
    tiny_capture: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """The viewer of a run whose features are the capture's classes: texts can be asked without weights."""
    options = (
        *("--pipeline.datamanager.features.extractors", f"labels:data={tiny_capture}"),
        *("--pipeline.datamanager.feature-ray-fraction", 1.0, "--pipeline.model.feature-loss-mult", 0.1),
    )
    with serve(train(tmp_path_factory.mktemp("labelled"), 400, *options).config) as viewer:
        yield viewer


@pytest.fixture(scope="package")
def labelled_splat_viewer(
    serve: Callable[[Path], Any], make_once: Callable[..., Path], train_splats: Callable[..., Any], tiny_capture: Path
) -> Iterator[Any]:
    """The viewer of splats with the capture's classes lifted onto them."""

    def fill(out: Path) -> None:
        count = ("--pipeline.model.num-random", 3000, "--pipeline.model.densify.max-gaussians", 3000)
        train_splats(out, *count, "--pipeline.model.features", f"labels:data={tiny_capture}", steps=400).succeeds()

    config = make_once("seen-splats", fill) / "e" / "sugar-ext-lite" / "t" / "config.yml"
    with serve(config) as viewer:
        yield viewer


@pytest.fixture(scope="session")
def look_through() -> Callable[[Any, int], None]:
    """Moves the page's camera to where a training image was taken."""
    return DRIVER.look_through


class Started:
    """A command that goes on until it is stopped, or its test ends."""

    def __init__(self, server: Any, name: str, arguments: tuple[object, ...]) -> None:
        self._server = server
        self.pid = server.start(name, *arguments)

    def said(self) -> str:
        """What it has said so far."""
        return self._server.said()

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return psutil.pid_exists(self.pid)

    def interrupt(self, timeout_s: float) -> Any:
        """Interrupts it as Ctrl-C does; gives how it ended."""
        os.kill(self.pid, signal.SIGINT)
        return self._server.finish(timeout_s)


@pytest.fixture
def start_command(command_server: Any) -> Callable[..., Started]:
    """Starts a command that goes on until it is stopped; one at a time."""
    return lambda name, *arguments: Started(command_server, name, arguments)


if os.name != "posix":
    collect_ignore_glob = ["test_*.py"]
