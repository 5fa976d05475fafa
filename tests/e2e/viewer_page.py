"""Nerfstudio's viewer, and a page of it in headless Chromium: what a user sees and does, as methods.

Loaded by file name: from ``conftest.py`` and from ``docs/make_viewer_screenshots.py``.
"""

import io
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CHROMIUM_OPTIONS = (
    "--no-sandbox",
    "--disable-dev-shm-usage",  # a container's /dev/shm may be small or missing
    "--use-angle=swiftshader",  # WebGL in software
    "--enable-unsafe-swiftshader",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
TIMEOUT_MS = 120_000
"""Patience with busy machines; costs nothing on quiet ones."""
RETRY_MS = 10_000
"""How long one try to hide the cameras may take."""
BLOCKS = (32, 24)
"""Columns and rows a picture is averaged to, so that neither the page's own scaling nor JPEG counts as a change."""
EMPTY_IMAGE = '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>'
SLOW_FRAMES = """
const request = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (draw) => window.setTimeout(() => request(draw), 200);
window.cancelAnimationFrame = (frame) => window.clearTimeout(frame);
"""
"""Has the page draw five frames a second at most: without a GPU, it would keep a core busy while nothing changes."""


def why_not() -> str:
    """What keeps a browser from being started here, or nothing."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed (pip install f3rm-ext[e2e])"
    return "" if shutil.which("chromium") else "there is no chromium on the PATH"


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser; see :func:`why_not` first."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(CHROMIUM_OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served_run(config_path: Path, log: Path) -> Iterator[Any]:
    """Nerfstudio's viewer of a run in this process, set up as `ns-viewer` does, without the training cameras.

    Args:
        log: file the viewer may write to.
    """
    from nerfstudio.utils.eval_utils import eval_setup
    from nerfstudio.viewer.viewer import Viewer

    config, pipeline, _, step = eval_setup(config_path, test_mode="test")
    config.viewer.websocket_port = free_port()
    viewer = Viewer(
        config.viewer,
        log_filename=log,
        datapath=pipeline.datamanager.get_datapath(),
        pipeline=pipeline,
        train_lock=threading.Lock(),  # type: ignore[arg-type]
    )
    viewer.init_scene(
        train_dataset=pipeline.datamanager.train_dataset,  # type: ignore[arg-type]
        train_state="completed",
        eval_dataset=pipeline.datamanager.eval_dataset,  # type: ignore[attr-defined]
    )
    viewer.update_scene(step=step)
    viewer.set_camera_visibility(False)
    try:
        yield viewer
    finally:
        threads = list(viewer.render_statemachines.values())
        viewer.viser_server.stop()
        for thread in threads:
            thread.running = False
            thread.join(timeout=60)


def look_through(viewer: Any, frame: int) -> None:
    """Moves the page's camera to where a training image was taken, as a click on its frustum does."""
    (client,) = viewer.viser_server.get_clients().values()
    camera = viewer.camera_handles[frame]
    with client.atomic():
        client.camera.wxyz, client.camera.position = camera.wxyz, camera.position


def difference(one: np.ndarray, two: np.ndarray) -> float:
    """Mean absolute difference of two pictures, 0 to 1."""
    return float(np.abs(one - two).mean())


class ViewerPage:
    """A page of the viewer.

    Args:
        browser: from :func:`chromium`.
        device_scale: pixels per CSS pixel that the page is told; the viewer lowers its own resolution to a fifth of
            that where drawing is slow.
    """

    def __init__(self, browser: Any, url: str, size_px: tuple[int, int] = (1000, 600), device_scale: int = 1) -> None:
        self.page = browser.new_page(viewport={"width": size_px[0], "height": size_px[1]})
        self.page.set_default_timeout(TIMEOUT_MS)
        # The logo of the title bar is on the web; nothing else is.
        self.page.route(
            lambda address: not address.startswith(url),
            lambda route: route.fulfill(content_type="image/svg+xml", body=EMPTY_IMAGE),
        )
        if device_scale != 1:
            fixed = f"{{get: () => {device_scale}}}"
            self.page.add_init_script(f"Object.defineProperty(window, 'devicePixelRatio', {fixed})")
        self.page.add_init_script(SLOW_FRAMES)
        self.page.goto(url)
        self._wait_for_connection()

    def _wait_for_connection(self) -> None:
        self.page.get_by_text("Connected", exact=True).wait_for()

    def close(self) -> None:
        """Closes the page; the viewer sees its client leave."""
        self.page.close()

    def input(self, label: str) -> Any:
        """The input beside a label, by where it is: viser 0.2.7's labels do not refer to their inputs."""
        row = self.page.locator("label", has_text=label).locator("xpath=ancestor::div[contains(@class,'Flex-root')][1]")
        return row.locator("input:not([type=hidden])").last

    def output(self) -> str:
        """The output that the panel says is shown."""
        return self.input("Output type").input_value()

    def outputs(self) -> list[str]:
        """The outputs one can choose from."""
        self.input("Output type").click()
        options = self.page.get_by_role("option")
        options.first.wait_for()
        names = options.all_text_contents()
        self.page.keyboard.press("Escape")
        options.first.wait_for(state="hidden")
        return names

    def choose_output(self, name: str) -> None:
        """Chooses an output as a user does."""
        self.input("Output type").click()
        self.page.get_by_role("option", name=name, exact=True).click()

    def set_max_res(self, pixels: int) -> None:
        """Sets how many pixels the longer side of a picture gets."""
        self.write("Max res", str(pixels))

    def write(self, label: str, text: str) -> None:
        """Writes into the input beside a label."""
        field = self.input(label)
        field.fill(text)
        field.press("Tab")

    def press(self, name: str) -> None:
        """Presses the button of this name."""
        self.page.get_by_role("button", name=name, exact=True).click()

    def status(self) -> str:
        """What the query panel's status says."""
        line = self.page.locator("strong", has_text=re.compile("^(Feature|No features)$"))
        return line.locator("xpath=ancestor::p").inner_text()

    def click_at(self, x: float, y: float) -> None:
        """Clicks on the picture.

        Args:
            x: 0 at its left edge, 1 at its right.
            y: 0 at its top edge, 1 at its bottom.
        """
        box = self._box()
        self.page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])

    def hide_cameras(self) -> None:
        """Takes the training cameras out of the picture.

        Nerfstudio serves the page before it has the cameras, and fails to hide what it has not; a page opened while the
        panel is being built may miss parts of it for good. So again, on a fresh page, until it works.
        """
        from playwright.sync_api import TimeoutError as NotYet

        hidden = self.page.get_by_text("Show Train Cams")
        for _ in range(TIMEOUT_MS // RETRY_MS):
            if hidden.is_visible():
                return
            self.page.get_by_text("Hide Train Cams").click()
            try:
                hidden.wait_for(timeout=RETRY_MS)
                return
            except NotYet:
                self.page.reload()
                self._wait_for_connection()
        raise AssertionError("the training cameras were never hidden")

    def drag(self, right_px: int, down_px: int = 0) -> None:
        """Turns the view by dragging the picture."""
        box = self._box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        self.page.mouse.move(x + right_px, y + down_px, steps=5)
        self.page.mouse.up()

    def resolution(self) -> tuple[int, int]:
        """Width and height of the last picture, px, as the panel shows them; zeros before the first."""
        text = self.page.get_by_text("Resolution:").first.inner_text().split("Resolution:")[1]
        width, height = text.strip().removesuffix("px").split("x")
        return int(width), int(height)

    def step(self) -> int:
        """The training step that the panel shows."""
        text = self.page.get_by_text("Step:").first.inner_text()
        return int(text.split("Step:")[1].split()[0])

    def _box(self) -> dict[str, float]:
        box = self.page.locator("canvas[data-engine]").bounding_box()
        assert box is not None, "the page has no picture"
        return box

    def image(self) -> Image.Image:
        """What the page shows in place of the scene, without the panel."""
        return Image.open(io.BytesIO(self.page.screenshot(clip=self._box(), timeout=TIMEOUT_MS))).convert("RGB")

    def picture(self) -> np.ndarray:
        """The middle of :meth:`image` averaged over blocks, (rows, cols, 3) in 0–1; without the axes in the corner."""
        image = self.image()
        width, height = image.size
        middle = image.crop((width // 5, height // 6, width - width // 5, height - height // 6))
        return np.asarray(middle.resize(BLOCKS, Image.Resampling.BOX), dtype=np.float32) / 255.0
