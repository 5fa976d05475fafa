"""Makes the picture of docs/sugar-run.md: a report of `f3rm-ext sugar run` in headless Chromium, opened as a file.

    python docs/make_sugar_run_picture.py FOLDER/report.html

Needs `pip install f3rm-ext[e2e]` and a `chromium` on the PATH.
"""

import importlib.util
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from PIL import Image

DOCS = Path(__file__).parent
DRIVER = DOCS.parent / "tests" / "e2e" / "viewer_page.py"


@dataclass
class Options:
    """What to photograph."""

    report: tyro.conf.Positional[Path]
    """report.html of a chain."""
    out: Path = field(default_factory=lambda: DOCS / "images" / "sugar-run-report.jpg")
    """Picture to write."""
    width_px: int = 1180
    """Width of the page."""
    height_px: int = 1780
    """Height of the picture."""
    scale: float = 0.75
    """Factor on the size of the picture."""


def _driver() -> Any:
    spec = importlib.util.spec_from_file_location("viewer_page", DRIVER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(options: Options) -> None:
    """Takes the picture."""
    driver = _driver()
    if reason := driver.why_not():
        raise SystemExit(reason)
    with driver.chromium() as browser:
        page = browser.new_page(viewport={"width": options.width_px, "height": options.height_px})
        page.goto(options.report.resolve().as_uri())
        page.locator("[data-mesh][data-state=shown]").wait_for(timeout=driver.TIMEOUT_MS)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    size = (round(picture.width * options.scale), round(picture.height * options.scale))
    picture.resize(size, Image.Resampling.LANCZOS).save(options.out, quality=86)
    print(f"Wrote {options.out}.")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
