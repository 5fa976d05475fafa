"""One view at several scales as a picture: photos above, drawings below."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from f3rm_ext.splat.multiscale_eval import ScaleResult

HEIGHT_PX = 256
"""Of every picture in the strip, so that the view can be compared; small ones are magnified with their pixels seen."""
GAP_PX = 4
LABEL_PX = 18
_INK, _PAPER = (30, 30, 30), (255, 255, 255)


def strip_png(results: "Sequence[ScaleResult]") -> bytes:
    """The examples of some scales side by side, PNG.

    Args:
        results: with their examples.
    """
    columns = [column for result in results if (column := _column(result)) is not None]
    width = sum(picture.width for picture, _ in columns) + GAP_PX * max(0, len(columns) - 1)
    height = LABEL_PX + 2 * HEIGHT_PX + GAP_PX
    strip = Image.new("RGB", (max(1, width), height), _PAPER)
    draw, font, left = ImageDraw.Draw(strip), ImageFont.load_default(), 0
    for picture, label in columns:
        draw.text((left + 2, 3), label, fill=_INK, font=font)
        strip.paste(picture, (left, LABEL_PX))
        left += picture.width + GAP_PX
    stream = io.BytesIO()
    strip.save(stream, "PNG")
    return stream.getvalue()


def _column(result: "ScaleResult") -> tuple[Image.Image, str] | None:
    """Photo above drawing, and what to call them; None where no example was kept."""
    if result.example is None:
        return None
    pixels = (result.example.clamp(0, 1).numpy() * 255).round().astype(np.uint8)
    height, both, _ = pixels.shape
    width_px = max(1, round(both / 2 * HEIGHT_PX / height))
    resampling = Image.Resampling.NEAREST if height < HEIGHT_PX else Image.Resampling.BOX
    column = Image.new("RGB", (width_px, 2 * HEIGHT_PX + GAP_PX), _PAPER)
    for row, half in enumerate((pixels[:, : both // 2], pixels[:, both // 2 :])):
        small = Image.fromarray(half).resize((width_px, HEIGHT_PX), resampling)
        column.paste(small, (0, row * (HEIGHT_PX + GAP_PX)))
    return column, f"x{result.scale:g}  {both // 2} x {height} px"
