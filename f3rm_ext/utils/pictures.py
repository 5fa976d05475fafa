"""Pictures of a report: colour maps, heat maps laid over photos, and images that live inside the page."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw

HEAT_MAP, DEPTH_MAP = "inferno", "turbo"
JPEG_QUALITY = 86
MAX_SIDE_PX = 960
"""Longer images are reduced before they go into the page."""


def read_picture(path: Path) -> UInt8[np.ndarray, "h w 3"]:
    """An image file as RGB."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def to_bytes(image: Float[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "h w 3"]:
    """Values in [0, 1] as bytes; values outside are clipped, NaN is black."""
    return np.rint(np.clip(np.nan_to_num(image, nan=0.0), 0.0, 1.0) * 255.0).astype(np.uint8)


def color_map(values: Float[np.ndarray, "h w"], low: float, high: float, name: str) -> UInt8[np.ndarray, "h w 3"]:
    """Values from ``low`` to ``high`` in the colours of one of matplotlib's maps; those outside in its end colours.

    Args:
        values: any unit; NaN is shown as ``low``.
        low: shown in the first colour.
        high: shown in the last colour.
        name: of the colour map.
    """
    from matplotlib import colormaps

    table = np.rint(colormaps[name](np.linspace(0.0, 1.0, 256))[:, :3] * 255.0).astype(np.uint8)
    unit = np.nan_to_num((values - low) / max(high - low, 1e-12), nan=0.0)
    return table[np.rint(np.clip(unit, 0.0, 1.0) * 255.0).astype(np.uint8)]


def heat_overlay(
    photo: UInt8[np.ndarray, "h w 3"], score: Float[np.ndarray, "h w"], low: float, high: float
) -> UInt8[np.ndarray, "h w 3"]:
    """A greyed photo under a heat map: the photo shows where the score is low, the colours where it is high.

    Args:
        photo: what was looked at.
        score: one value per pixel.
        low: score at which the heat begins.
        high: score at which it is hottest.
    """
    heat = color_map(score, low, high, HEAT_MAP).astype(np.float32)
    grey = photo.astype(np.float32) @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    dim = 0.15 * photo + 0.45 * grey[..., None]
    strength = np.clip(np.nan_to_num((score - low) / max(high - low, 1e-12), nan=0.0), 0.0, 1.0)[..., None]
    opacity = 0.25 + 0.6 * strength
    return np.rint((1.0 - opacity) * dim + opacity * heat).astype(np.uint8)


def mark_spot(image: UInt8[np.ndarray, "h w 3"], row: int, col: int) -> UInt8[np.ndarray, "h w 3"]:
    """A copy with a ring around a pixel, white on black so that it shows on anything."""
    picture = Image.fromarray(image)
    draw = ImageDraw.Draw(picture)
    radius = max(4, min(image.shape[:2]) // 28)
    for width, color in ((max(3, radius // 2), (0, 0, 0)), (max(1, radius // 4), (255, 255, 255))):
        box = (col - radius, row - radius, col + radius, row + radius)
        draw.ellipse(box, outline=color, width=width)
    return np.asarray(picture)


def mark_box(
    image: UInt8[np.ndarray, "h w 3"], top: int, left: int, bottom: int, right: int
) -> UInt8[np.ndarray, "h w 3"]:
    """A copy with a frame around a region (bottom and right are the first row and column outside it)."""
    picture = Image.fromarray(image)
    draw = ImageDraw.Draw(picture)
    for grow, color in ((2, (0, 0, 0)), (1, (255, 255, 255)), (0, (255, 255, 255))):
        draw.rectangle((left - grow - 1, top - grow - 1, right + grow, bottom + grow), outline=color)
    return np.asarray(picture)


def region_around(row: float, col: float, side_px: int, height_px: int, width_px: int) -> tuple[int, int, int, int]:
    """The square (top, left, bottom, right) of a side around a pixel, moved to lie inside the image."""
    side = min(side_px, height_px, width_px)
    top = int(min(max(0, round(row - side / 2)), height_px - side))
    left = int(min(max(0, round(col - side / 2)), width_px - side))
    return top, left, top + side, left + side


def data_uri(image: UInt8[np.ndarray, "h w 3"], max_side_px: int = MAX_SIDE_PX) -> str:
    """An image as a ``data:`` address (JPEG), reduced to a longest side.

    Args:
        image: RGB.
        max_side_px: longest side allowed.
    """
    picture = Image.fromarray(np.ascontiguousarray(image))
    picture.thumbnail((max_side_px, max_side_px), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=JPEG_QUALITY, subsampling=0, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def color_stops(name: str, count: int = 9) -> Sequence[str]:
    """Hexadecimal colours along a colour map, for a legend."""
    from matplotlib import colormaps

    colors = np.rint(colormaps[name](np.linspace(0.0, 1.0, count))[:, :3] * 255.0).astype(int)
    return ["#" + "".join(f"{value:02x}" for value in color) for color in colors]
