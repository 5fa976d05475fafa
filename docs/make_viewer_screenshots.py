"""Makes the pictures of docs/viewer.md: a run's outputs in nerfstudio's viewer, in headless Chromium.

    python docs/make_viewer_screenshots.py RUN/config.yml

Needs `pip install f3rm-ext[e2e]` and a `chromium` on the PATH. The pictures in the documentation are of the fox of
instant-ngp's repository at a quarter of its size, 1500 steps of `f3rm-ext-lite` with DINOv2 features.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from make_pictures import browser_driver

DOCS = Path(__file__).parent


@dataclass
class ViewOptions:
    """What a page shows."""

    load_config: tyro.conf.Positional[Path]
    """config.yml of a finished run."""
    threshold: float = 0.5
    """Least relevancy that is shown, 0 to 1."""
    frame: int = 0
    """Training camera to look through first."""
    fov_deg: float = 75.0
    """Vertical field of view, degrees; clicks are meant for it."""
    max_res: int = 564
    """Longer side of the rendered picture, px."""
    size_px: tuple[int, int] = (860, 640)
    """Size of the page."""
    patience_s: float = 600
    """How long a picture may take."""


@dataclass
class Options(ViewOptions):
    """What to photograph."""

    outputs: tuple[str, ...] = ("rgb", "depth", "feature_pca", "relevancy_overlay", "labels")
    """One picture each."""
    clicks: tuple[tuple[float, float], ...] = ((0.5, 0.36), (0.26, 0.66), (0.38, 0.19))
    """Where to click to ask, as shares of the picture's width and height; each is named, and the first one is shown."""
    far: float = 2.8
    """Depth that gets the last colour of the map, scene units."""
    folder: Path = field(default_factory=lambda: DOCS / "images")
    """Where viewer-OUTPUT.jpg are written."""


@contextmanager
def open_page(options: ViewOptions) -> Iterator[tuple[Any, Any, Any]]:
    """Gives the module that drives the browser, the viewer of a run, and a page of it with a sharp picture."""
    driver = browser_driver()
    if reason := driver.why_not():
        raise SystemExit(reason)
    log = options.load_config.parent / "viewer_log_filename.txt"
    with driver.served_run(options.load_config, log) as viewer, driver.chromium() as browser:
        viewer.control_panel._max_res.value = options.max_res
        # Drawn in software the page lowers its own resolution to a fifth: of five times as much.
        url = f"http://127.0.0.1:{viewer.config.websocket_port}"
        view = driver.ViewerPage(browser, url, options.size_px, device_scale=5)
        wait_until_sharp(view, options)
        yield driver, viewer, view


def wait_until_sharp(view: Any, options: ViewOptions) -> None:
    """Waits for the panel to report the full resolution and for the picture to stand still."""
    deadline = time.monotonic() + options.patience_s
    previous = None
    while time.monotonic() < deadline:
        now = np.asarray(view.image(), dtype=np.int16)
        is_full = max(view.resolution()) >= options.max_res - 1
        if is_full and previous is not None and np.abs(now - previous).mean() < 0.2:
            return
        previous = now
        view.page.wait_for_timeout(500)
    raise TimeoutError("the picture never became sharp")


def _ask(view: Any, options: Options) -> None:
    """Clicks, names what was clicked, and asks for the first again."""
    view.write("Threshold", str(options.threshold))
    for number, place in enumerate((*options.clicks, options.clicks[0]), start=1):
        view.press("Click to query")
        view.page.get_by_text("Click on the scene").wait_for()
        view.click_at(*place)
        view.page.get_by_text(f"click {number} at").wait_for()
        if number <= len(options.clicks):
            view.press("Add to named queries")
            view.page.locator("p", has_text="Named").get_by_text(f"click {number}").last.wait_for()
        print(view.status())


def main(options: Options) -> None:
    """Starts the viewer, and saves one picture per output."""
    with open_page(options) as (driver, viewer, view):
        driver.look_through(viewer, options.frame)
        (client,) = viewer.viser_server.get_clients().values()
        client.camera.fov = math.radians(options.fov_deg)
        # One far pixel would leave all others a single colour.
        viewer.control_panel._normalize.value = False
        viewer.control_panel._max.value = 1.0 / options.far
        asks = {"relevancy", "relevancy_overlay", "labels"}
        for name in options.outputs:
            if name in asks and options.clicks:
                _ask(view, options)
                asks.clear()
            if view.output() != name:
                view.choose_output(name)
                view.page.mouse.move(5, 5)  # away from the panel, whose hints would cover it
            view.page.wait_for_timeout(1000)  # until the viewer has begun with what was asked for
            wait_until_sharp(view, options)
            if not asks:
                view.page.get_by_role("button", name="Refit PCA").scroll_into_view_if_needed()
            path = options.folder / f"viewer-{name.replace('_', '-')}.jpg"
            view.page.screenshot(path=path, type="jpeg", quality=80)
            print(f"{path} ({path.stat().st_size // 1024} kB)")


if __name__ == "__main__":
    main(tyro.cli(Options))
