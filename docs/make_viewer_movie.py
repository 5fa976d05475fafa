"""Makes images/viewer-query.webp: a text query in nerfstudio's viewer, recorded in headless Chromium.

    python docs/make_viewer_movie.py RUN/config.yml

Needs `pip install f3rm-ext[e2e]` and a `chromium` on the PATH. The recording in the documentation shows the fox of
instant-ngp's repository at a quarter of its size: 1500 steps of `f3rm-ext-lite` with DINOv2 and `conse` features.
"""

import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from make_viewer_screenshots import DOCS, _driver, _wait_until_sharp
from PIL import Image

KEY_MS = 120
"""How long the movie shows each typed letter."""
MOVE_MS = 110
"""How long the movie shows each place of the camera."""
REST_MS = 1200
"""How long the movie rests before and after something happens."""


@dataclass
class Options:
    """What to record."""

    load_config: tyro.conf.Positional[Path]
    """config.yml of a finished run."""
    query: str = "fox"
    """Text to type."""
    feature: str = "conse"
    """Head that reads the text."""
    threshold: float = 0.5
    """Least relevancy that the overlay shows, 0 to 1."""
    temperature: float = 0.1
    """Temperature of the relevancy."""
    frame: int = 0
    """Training camera to start from."""
    places: int = 16
    """Places of the camera on its way around; each takes seconds to render on a CPU."""
    swing: float = 0.35
    """Half width of the camera's way, as a share of its distance from the point it looks at."""
    distance: float = 8.0
    """Distance of that point from the first camera, in the viewer's units (a tenth of a scene unit)."""
    fov_deg: float = 75.0
    """Vertical field of view, degrees."""
    max_res: int = 360
    """Longer side of the rendered picture, px."""
    size_px: tuple[int, int] = (860, 600)
    """Size of the page."""
    quality: int = 70
    """Of the WebP frames, 0 to 100."""
    out: Path = field(default_factory=lambda: DOCS / "images" / "viewer-query.webp")
    """Where the movie goes."""
    patience_s: float = 600
    """How long one picture may take."""


class Recorder:
    """Frames of a page, each with the time it is shown.

    Args:
        view: the page, a ``ViewerPage`` of tests/e2e/viewer_page.py.
        options: of the recording.
    """

    def __init__(self, view: Any, options: Options) -> None:
        self.view, self.options = view, options
        self.frames: list[Image.Image] = []
        self.durations_ms: list[int] = []

    def shoot(self, duration_ms: int) -> None:
        """Adds the page as it is now."""
        self.frames.append(Image.open(io.BytesIO(self.view.page.screenshot())).convert("RGB"))
        self.durations_ms.append(duration_ms)

    def wait_for_change(self, action: Any) -> None:
        """Calls `action`, and waits until the rendered picture is another one and sharp."""
        before = np.asarray(self.view.image(), dtype=np.int16)
        action()
        for _ in range(int(self.options.patience_s / 0.2)):
            self.view.page.wait_for_timeout(200)
            if np.abs(np.asarray(self.view.image(), dtype=np.int16) - before).mean() > 0.5:
                break
        _wait_until_sharp(self.view, self.options.max_res, self.options.patience_s)

    def save(self, path: Path) -> None:
        """Writes all frames as an animated WebP that runs for ever."""
        first, *others = self.frames
        first.save(
            path,
            save_all=True,
            append_images=others,
            duration=self.durations_ms,
            loop=0,
            quality=self.options.quality,
            method=6,
        )


def _camera_path(client: Any, options: Options) -> list[tuple[np.ndarray, np.ndarray]]:
    """Positions of the camera on its way to both sides and back, and the point it looks at."""
    position = np.asarray(client.camera.position)
    w, x, y, z = client.camera.wxyz
    right = np.array([1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)])
    down = np.array([2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)])
    forward = np.cross(right, down)
    target = position + options.distance * forward
    way = []
    for place in range(1, options.places + 1):
        angle = 2 * math.pi * place / options.places
        sideways = options.swing * options.distance * math.sin(angle)
        upwards = options.swing * options.distance * 0.3 * (1 - math.cos(angle))
        way.append((position + sideways * right - upwards * down, target))
    return way


def main(options: Options) -> None:
    """Opens the run in the viewer, types the query, moves the camera, and saves the movie."""
    driver = _driver()
    if reason := driver.why_not():
        raise SystemExit(reason)
    log = options.load_config.parent / "viewer_log_filename.txt"
    with driver.served_run(options.load_config, log) as viewer, driver.chromium() as browser:
        viewer.control_panel._max_res.value = options.max_res
        url = f"http://127.0.0.1:{viewer.config.websocket_port}"
        view = driver.ViewerPage(browser, url, options.size_px, device_scale=5)
        _wait_until_sharp(view, options.max_res, options.patience_s)
        recorder = Recorder(view, options)
        (client,) = viewer.viser_server.get_clients().values()

        def start() -> None:
            driver.look_through(viewer, options.frame)
            client.camera.fov = math.radians(options.fov_deg)

        recorder.wait_for_change(start)
        panel = viewer.pipeline.model.queries
        names = [name for name in panel.ask_04_feature.options if options.feature in name]
        if len(names) != 1:
            raise SystemExit(f"--feature {options.feature}: the run has {', '.join(panel.ask_04_feature.options)}.")
        view.input("Feature").click()
        view.page.get_by_role("option", name=names[0], exact=True).click()
        view.write("Threshold", str(options.threshold))
        view.write("Temperature", str(options.temperature))
        text = view.input("Query")
        text.evaluate("element => element.scrollIntoView({block: 'start'})")
        view.page.mouse.move(5, 5)

        recorder.shoot(REST_MS)
        text.click()
        for letter in options.query:
            text.press_sequentially(letter)
            recorder.shoot(KEY_MS)
        recorder.wait_for_change(lambda: text.press("Tab"))
        text.evaluate("element => element.scrollIntoView({block: 'start'})")
        recorder.shoot(REST_MS)
        for number, (position, target) in enumerate(_camera_path(client, options), start=1):

            def move(position: np.ndarray = position, target: np.ndarray = target) -> None:
                with client.atomic():
                    client.camera.position = position
                    client.camera.look_at = target

            recorder.wait_for_change(move)
            recorder.shoot(MOVE_MS)
            print(f"place {number} of {options.places}", flush=True)
        recorder.durations_ms[-1] = REST_MS
        recorder.save(options.out)
        print(f"{options.out} ({options.out.stat().st_size // 1024} kB, {len(recorder.frames)} frames)")


if __name__ == "__main__":
    main(tyro.cli(Options))
