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
from processes import write_report

from f3rm_ext.viewer import first_view

HERE = Path(__file__).parent
RESULT = HERE / "results" / "viewer_time.json"
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""Of the rows of the whole picture."""


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
            for way, divisor in (("at once", 1), ("in passes", first_view.FIRST_DIVISOR)):
                with mock.patch.object(first_view, "FIRST_DIVISOR", divisor):
                    rows.append({"run": name, "way": way, **self._measure(Path(config))})
                print(rows[-1], flush=True)
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
            whole = page.resolution()[1]
            (client,) = viewer.viser_server.get_clients().values()
            shown: list[tuple[float, int]] = []
            show = client.scene.set_background_image

            def note(picture: Any, **options: Any) -> None:
                show(picture, **options)
                shown.append((time.perf_counter(), len(picture)))

            client.scene.set_background_image = note
            messages: list[float] = []
            client.camera.on_update(lambda _: messages.append(time.perf_counter()))
            waits: dict[float, list[float]] = {share: [] for share in SHARES}
            firsts, pages = [], []
            for frame in sorted(viewer.camera_handles)[: self.moves]:
                shown.clear()
                messages.clear()
                told = time.perf_counter()
                driver.look_through(viewer, frame)
                self._wait(page, lambda: any(rows >= whole for _, rows in shown))
                begin = messages[0]
                pages.append(begin - told)
                firsts.append(shown[0][0] - begin)
                for share in SHARES:
                    waits[share].append(min(at for at, rows in shown if rows >= int(share * whole)) - begin)
        medians = {f"rows_{share:g}_s": round(statistics.median(times), 2) for share, times in waits.items()}
        page, first = (round(statistics.median(times), 2) for times in (pages, firsts))
        return {"rows": whole, "page_s": page, "first_s": first, **medians}

    def _wait(self, page: Any, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.patience_s
        while not done():
            if time.monotonic() > deadline:
                raise SystemExit(f"No whole picture within {self.patience_s:g} s.")
            page.page.wait_for_timeout(20)


if __name__ == "__main__":
    tyro.cli(Measure).main()
