"""How long a page of the viewer waits for a picture after it has told that its camera moved: in passes, and at once.

    ns-train f3rm-ext-lite --data fox --resolution-scale 0.25 --max-num-iterations 300
    python benchmarks/viewer_time.py --runs field=outputs/.../config.yml splats=outputs/.../config.yml

Headless Chromium shows nerfstudio's viewer, which is told to look through training cameras, one after the other. For
each picture that reaches the page it notes rows and time, from the page's first message about the camera. `at once` is
nerfstudio's way: a picture of a thirtieth of a second, then the whole one. Prints medians and writes
results/viewer_time.json.
"""

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import tyro
from nerfstudio.viewer.render_state_machine import RenderStateMachine
from processes import write_report

from f3rm_ext import compat

HERE = Path(__file__).parent
RESULT = HERE / "results" / "viewer_time.json"
NERFSTUDIOS = vars(RenderStateMachine)["_render_img"]
"""What passes replace, as it is before."""
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""Of the rows of the whole picture."""
STILL_S = 1.0
"""A page that sends nothing for so long stands still, seconds."""


@dataclass(kw_only=True)
class Measure:
    """Measures the viewer's patience."""

    runs: tuple[str, ...]
    """Finished runs, as NAME=config.yml."""
    max_res: int = 512
    """Longer side of the whole picture, px."""
    moves: int = 5
    """Cameras that are looked through."""
    patience_s: float = 120
    """How long a picture may take, seconds."""

    def main(self) -> None:
        """Measures all runs, with and without passes."""
        rows = []
        for given in self.runs:
            name, _, config = given.partition("=")
            with (
                mock.patch.object(compat, "render_in_passes", lambda *_: None),
                mock.patch.object(RenderStateMachine, "_render_img", NERFSTUDIOS),
            ):
                rows.append({"run": name, "way": "at once", **self._measure(Path(config))})
            rows.append({"run": name, "way": "in passes", **self._measure(Path(config))})
            print(*rows[-2:], sep="\n", flush=True)
        write_report({"max_res": self.max_res, "moves": self.moves, "rows": rows}, RESULT)

    def _measure(self, config: Path) -> dict[str, Any]:
        sys.path.insert(0, str(HERE.parent / "docs"))
        driver = importlib.import_module("make_pictures").browser_driver()
        if reason := driver.why_not():
            raise SystemExit(reason)
        with (
            driver.served_run(config, config.parent / "viewer_log_filename.txt") as viewer,
            driver.chromium() as browser,
        ):
            viewer.control_panel._max_res.value = self.max_res
            page = driver.ViewerPage(browser, f"http://127.0.0.1:{viewer.config.websocket_port}", (860, 640))
            self._wait(page, lambda: max(page.resolution()) == self.max_res)
            (client,) = viewer.viser_server.get_clients().values()
            shown: list[tuple[float, int, bool]] = []
            show = client.scene.set_background_image

            def note(picture: Any, **options: Any) -> None:
                show(picture, **options)
                shown.append((time.perf_counter(), len(picture), max(picture.shape) >= self.max_res))

            client.scene.set_background_image = note
            messages: list[float] = []
            client.camera.on_update(lambda _: messages.append(time.perf_counter()))
            begin = time.perf_counter()

            def is_whole() -> bool:
                """A slow page tells again that it moved, or was given another size, and gets the view anew."""
                last = max([begin, *messages])
                is_shown = not messages or any(whole and at > last for at, _, whole in shown)
                return is_shown and time.perf_counter() > last + STILL_S

            self._wait(page, is_whole)
            waits: dict[float, list[float]] = {share: [] for share in SHARES}
            firsts: list[float] = []
            pages: list[float] = []
            for frame in sorted(viewer.camera_handles)[: self.moves]:
                shown.clear()
                messages.clear()
                begin = time.perf_counter()
                driver.look_through(viewer, frame)
                self._wait(page, lambda: bool(messages) and is_whole())
                told, most = messages[0], max(rows for _, rows, _ in shown)
                pages.append(told - begin)
                for share, times in ((0.0, firsts), *waits.items()):
                    times.append(min(at for at, rows, _ in shown if at > told and rows >= int(share * most)) - told)
        medians = {f"rows_{share:g}_s": round(statistics.median(times), 2) for share, times in waits.items()}
        told_s, first_s = (round(statistics.median(times), 2) for times in (pages, firsts))
        return {"rows": most, "page_s": told_s, "first_s": first_s, **medians}

    def _wait(self, page: Any, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.patience_s
        while not done():
            if time.monotonic() > deadline:
                raise SystemExit(f"No whole picture within {self.patience_s:g} s.")
            page.page.wait_for_timeout(20)


if __name__ == "__main__":
    tyro.cli(Measure).main()
