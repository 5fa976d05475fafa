"""Makes images/overview.jpg (photo, rendering, depth, features) from the pictures of `ns-eval --render-output-path`.

python docs/make_overview.py FOLDER --view 2
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro
from PIL import Image

DOCS = Path(__file__).parent
GAP_PX = 8


@dataclass
class Options:
    """What to put together."""

    folder: tyro.conf.Positional[Path]
    """Folder of ns-eval's pictures."""
    view: int = 0
    """Number of the held-out view."""
    height_px: int = 420
    """Height of the picture."""
    out: Path = field(default_factory=lambda: DOCS / "images" / "overview.jpg")
    """Where it goes."""


def halves(path: Path) -> list[Image.Image]:
    """The true and the predicted half of a comparison."""
    image = Image.open(path).convert("RGB")
    width, height = image.size
    return [image.crop((0, 0, width // 2, height)), image.crop((width // 2, 0, width, height))]


def main(options: Options) -> None:
    """Writes the picture."""
    photo, rendering = halves(options.folder / f"eval_img_{options.view:04d}.png")
    depth = Image.open(options.folder / f"eval_depth_{options.view:04d}.png").convert("RGB")
    _, features = halves(options.folder / f"eval_feature_pca_{options.view:04d}.png")
    width = round(photo.width * options.height_px / photo.height)
    strip = np.full((options.height_px, 4 * width + 3 * GAP_PX, 3), 255, dtype=np.uint8)
    for index, panel in enumerate((photo, rendering, depth, features)):
        left = index * (width + GAP_PX)
        strip[:, left : left + width] = np.asarray(panel.resize((width, options.height_px), Image.Resampling.BICUBIC))
    options.out.parent.mkdir(exist_ok=True)
    Image.fromarray(strip).save(options.out, quality=88)
    print(f"{options.out} ({options.out.stat().st_size // 1024} kB)")


if __name__ == "__main__":
    main(tyro.cli(Options))
