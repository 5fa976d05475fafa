"""Makes images/viewer-query.webp: a text query in nerfstudio's viewer, recorded in headless Chromium.

    python docs/make_viewer_movie.py RUN/config.yml

Needs `pip install f3rm-ext[e2e]` and a `chromium` on the PATH. The recording in the documentation shows the fox of
instant-ngp's repository at a quarter of its size: 1500 steps of `f3rm-ext-lite` with DINOv2 and `conse` features.
"""

import io
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from make_viewer_screenshots import DOCS, ViewOptions, open_page
from PIL import Image

KEY_MS = 120
"""How long the movie shows each typed letter."""
MOVE_MS = 110
"""How long the movie shows each place of the camera."""
REST_MS = 1200
"""How long the movie rests before and after something happens."""
SETTLE_MS = 700
"""How long the page gets to show what it was sent."""
CALM_POLLS = 10
"""How many times in a row, so long apart, a picture has to stand still before the movie rests on it."""


@dataclass
class Options(ViewOptions):
    """What to record."""

    query: str = "fox"
    """Text to type."""
    feature: str = "conse"
    """Head that reads the text."""
    temperature: float = 0.1
    """Temperature of the relevancy."""
    places: int = 8
    """Places of the camera on its way to either side; each takes seconds to render on a CPU."""
    swing: float = 0.35
    """Half width of the camera's way, as a share of its distance from the point it looks at."""
    distance: float = 8.0
    """Distance of that point from the first camera, in the viewer's units (a tenth of a scene unit)."""
    max_res: int = 360
    """Height of the rendered picture, px."""
    size_px: tuple[int, int] = (860, 600)
    """Size of the page."""
    quality: int = 70
    """Of the WebP frames, 0 to 100."""
    out: Path = field(default_factory=lambda: DOCS / "images" / "viewer-query.webp")
    """Where the movie goes."""


class Recorder:
    """Frames of a page, each with the time it is shown.

    Args:
        view: the page, a ``ViewerPage`` of tests/e2e/viewer_page.py.
        machine: the thread of nerfstudio's viewer that renders for this page.
    """

    def __init__(self, view: Any, machine: Any, patience_s: float) -> None:
        self.view, self.machine, self.patience_s = view, machine, patience_s
        self.frames: list[Image.Image] = []
        self.durations_ms: list[int] = []
        self.sharp_pictures, send = 0, machine._send_output_to_viewer

        def counting(*args: Any, **kwargs: Any) -> None:
            send(*args, **kwargs)
            self.sharp_pictures += machine.state == "high"

        machine._send_output_to_viewer = counting

    def shoot(self, duration_ms: int) -> Image.Image:
        """Adds the page as it is now, and returns the frame."""
        self.frames.append(Image.open(io.BytesIO(self.view.page.screenshot())).convert("RGB"))
        self.durations_ms.append(duration_ms)
        return self.frames[-1]

    def show(self, frame: Image.Image, duration_ms: int) -> None:
        """Adds a frame again."""
        self.frames.append(frame)
        self.durations_ms.append(duration_ms)

    def wait_for_change(self, action: Callable[[], object], calm_polls: int = 4) -> None:
        """Calls `action`, and waits until the rendered picture is another one and at full resolution."""
        before, pictures = self._picture(), self.sharp_pictures
        action()

        def changed(now: np.ndarray) -> bool:
            return self.sharp_pictures > pictures and bool(np.abs(now - before).mean() > 0.5)

        self.wait_until_calm(calm_polls, changed)

    def wait_until_calm(self, calm_polls: int, accept: Callable[[np.ndarray], bool] = lambda now: True) -> None:
        """Waits until the rendered picture stands still at full resolution.

        Args:
            calm_polls: how many times in a row nothing may have happened; more where one change brings about another.
            accept: whether this is the picture to wait for.
        """
        calm = 0
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline:
            seen, now = self.sharp_pictures, self._picture()
            self.view.page.wait_for_timeout(SETTLE_MS)
            quiet = self.machine.state == "high" and self.machine.next_action is None
            still = seen == self.sharp_pictures and np.abs(self._picture() - now).mean() < 0.2
            calm = calm + 1 if quiet and still and accept(now) else 0
            if calm >= calm_polls:
                return
        raise TimeoutError("the picture never changed")

    def _picture(self) -> np.ndarray:
        return np.asarray(self.view.image(), dtype=np.int16)

    def save(self, path: Path, quality: int) -> None:
        """Writes all frames as an animated WebP that runs for ever."""
        first, *others = self.frames
        durations = self.durations_ms
        first.save(path, save_all=True, append_images=others, duration=durations, loop=0, quality=quality, method=6)


def _camera_axes(client: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Position of the page's camera, and the directions right, down and forward."""
    w, x, y, z = client.camera.wxyz
    right = np.array([1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)])
    down = np.array([2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)])
    return np.asarray(client.camera.position), right, down, np.cross(right, down)


def _type_query(recorder: Recorder, options: Options) -> Image.Image:
    """Chooses the feature, types the text letter by letter, and returns the frame with the result."""
    view, panel = recorder.view, recorder.machine.viewer.pipeline.model.queries
    names = [name for name in panel.ask_04_feature.options if options.feature in name]
    if len(names) != 1:
        raise SystemExit(f"--feature {options.feature}: the run has {', '.join(panel.ask_04_feature.options)}.")
    view.input("Feature").click()
    view.page.get_by_role("option", name=names[0], exact=True).click()
    view.write("Threshold", str(options.threshold))
    view.write("Temperature", str(options.temperature))
    text = view.input("Query")

    def tidy() -> None:
        view.page.mouse.move(5, 5)  # away from the panel, whose hints would cover it
        view.page.evaluate("document.activeElement.blur()")
        text.evaluate("element => element.scrollIntoView({block: 'start'})")
        view.page.wait_for_timeout(SETTLE_MS)

    tidy()
    recorder.wait_until_calm(CALM_POLLS)
    recorder.shoot(REST_MS)
    text.click()
    view.page.mouse.move(5, 5)
    for letter in options.query:
        text.press_sequentially(letter)
        recorder.shoot(KEY_MS)
    recorder.wait_for_change(lambda: text.press("Tab"), calm_polls=CALM_POLLS)
    tidy()
    recorder.wait_until_calm(CALM_POLLS)
    return recorder.shoot(REST_MS)


def _swing(recorder: Recorder, client: Any, middle: Image.Image, options: Options) -> None:
    """Moves the camera to both sides and back. Each place is rendered once and shown twice.

    Args:
        middle: frame of the place where the camera is.
    """
    position, right, down, forward = _camera_axes(client)
    target = position + options.distance * forward
    reach = options.swing * options.distance

    def move_to(place: np.ndarray) -> None:
        with client.atomic():
            client.camera.position = place
            client.camera.look_at = target

    for side in (1, -1):
        way = []
        for number in range(1, options.places + 1):
            angle = math.pi / 2 * number / options.places
            offset = side * math.sin(angle) * right - 0.3 * (1 - math.cos(angle)) * down
            recorder.wait_for_change(partial(move_to, position + reach * offset))
            way.append(recorder.shoot(MOVE_MS))
            print(f"place {number} of {options.places}, side {side}", flush=True)
        for frame in [*way[-2::-1], middle]:
            recorder.show(frame, MOVE_MS)
    recorder.durations_ms[-1] = REST_MS


def main(options: Options) -> None:
    """Opens the run in the viewer, types the query, moves the camera, and saves the movie."""
    with open_page(options) as (driver, viewer, view):
        (client,) = viewer.viser_server.get_clients().values()
        (machine,) = viewer.render_statemachines.values()
        recorder = Recorder(view, machine, options.patience_s)

        def start() -> None:
            driver.look_through(viewer, options.frame)
            client.camera.fov = math.radians(options.fov_deg)

        recorder.wait_for_change(start, calm_polls=CALM_POLLS)
        found = _type_query(recorder, options)
        _swing(recorder, client, found, options)
        recorder.save(options.out, options.quality)
        print(f"{options.out} ({options.out.stat().st_size // 1024} kB, {len(recorder.frames)} frames)")


if __name__ == "__main__":
    main(tyro.cli(Options))
