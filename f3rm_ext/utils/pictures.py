"""Pictures as arrays of bytes: reading, marks, and images inside a web page. Colours are in `colormaps`."""

import base64
import contextlib
import importlib
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw
from PIL.ExifTags import Base
from PIL.Image import Transpose

from f3rm_ext.errors import CaptureError

UNREADABLE = (OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError)
"""What Pillow raises on a picture that is damaged, of another kind, or too large to be believed."""
TURNS = {
    **{2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE},
    **{6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90},
}
"""How photos are turned upright, by their EXIF orientation."""
MOST_PIXELS = 1_000_000_000
"""Pixels of the largest photo that is believed."""
JPEG_QUALITY = 86
MAX_SIDE_PX = 960
"""Longest side of an image inside a page; larger ones are reduced."""


@contextlib.contextmanager
def open_photo(path: Path) -> Iterator[Image.Image]:
    """Opens a photo, of HEIC and of up to :data:`MOST_PIXELS`, too, as of some phones' 200 megapixels, for a ``with``
    block. Raises CaptureError where the package for HEIC is missing, and those of :data:`UNREADABLE`."""
    if path.suffix.lower() in (".heic", ".heif"):
        _prepare_heif(path)
    with allow_large_images(), Image.open(path) as image:
        yield image


def turn_upright(image: Image.Image) -> Image.Image:
    """Returns a photo as its EXIF orientation says; other EXIF data are not looked at."""
    turn = TURNS.get(image.getexif().get(Base.Orientation, 1))
    return image if turn is None else image.transpose(turn)


@contextlib.contextmanager
def allow_large_images() -> Iterator[None]:
    """Lets Pillow read pictures of up to :data:`MOST_PIXELS`, such as the 200 megapixels of some phones."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, MOST_PIXELS // 2  # it refuses twice this number
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _prepare_heif(path: Path) -> None:
    try:
        heif = importlib.import_module("pillow_heif")
    except ImportError:
        raise CaptureError(
            f"The photo {path} is HEIC, for which a package is missing: run pip install pillow-heif, or export JPEG."
        ) from None
    heif.register_heif_opener()


def to_eight_bits(image: Image.Image) -> Image.Image:
    """Returns a copy of an image as L, RGB or RGBA with 8 bits, where Pillow would cut off all that is above 255."""
    if image.mode in ("L", "RGB", "RGBA") and "transparency" not in image.info:
        return image.copy()
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, dtype=np.float64)
        top = 65535.0 if image.mode != "F" and values.max() > 255 else max(float(values.max()), 1.0)
        return Image.fromarray(np.rint(255 * np.clip(values / top, 0, 1)).astype(np.uint8))
    if image.mode in ("LA", "PA") or "transparency" in image.info:
        return image.convert("RGBA")
    return image.convert("L" if image.mode == "1" else "RGB")


def read_picture(path: Path) -> UInt8[np.ndarray, "h w 3"]:
    """Reads an image file as RGB."""
    with Image.open(path) as image:
        return np.asarray(to_eight_bits(image).convert("RGB"))


def pick_evenly(count: int, most: int) -> list[int]:
    """Returns the indices of at most so many of a number of pictures, spread evenly from the first to the last.

    >>> pick_evenly(10, 4)
    [0, 3, 6, 9]
    """
    return np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int)).tolist()


def to_bytes(image: Float[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    """Converts values from 0 to 1 to bytes; values outside are clipped, NaN becomes 0."""
    return np.rint(np.clip(np.nan_to_num(image, nan=0.0), 0.0, 1.0) * 255.0).astype(np.uint8)


def to_linear(srgb: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Converts sRGB values to linear light, 0 to 1 both (IEC 61966-2-1)."""
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def to_srgb(linear: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Converts linear light to sRGB values, 0 to 1 both."""
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * np.maximum(linear, 0.0031308) ** (1 / 2.4) - 0.055)


def mark_spot(image: UInt8[np.ndarray, "h w 3"], row: int, col: int) -> UInt8[np.ndarray, "h w 3"]:
    """Returns a copy with a ring around a pixel, white with a black rim so that it shows on any picture."""
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
    """Returns a copy with a frame around a region; ``bottom`` and ``right`` are the first row and column outside it."""
    picture = Image.fromarray(image)
    draw = ImageDraw.Draw(picture)
    for grow, color in ((2, (0, 0, 0)), (1, (255, 255, 255)), (0, (255, 255, 255))):
        draw.rectangle((left - grow - 1, top - grow - 1, right + grow, bottom + grow), outline=color)
    return np.asarray(picture)


def region_around(row: float, col: float, side_px: int, height_px: int, width_px: int) -> tuple[int, int, int, int]:
    """Returns the square around a pixel as (top, left, bottom, right), moved and shrunk to lie inside the image.

    >>> region_around(row=5.0, col=50.0, side_px=20, height_px=100, width_px=200)
    (0, 40, 20, 60)
    """
    side = min(side_px, height_px, width_px)
    top = int(min(max(0, round(row - side / 2)), height_px - side))
    left = int(min(max(0, round(col - side / 2)), width_px - side))
    return top, left, top + side, left + side


def data_uri(image: UInt8[np.ndarray, "h w 3"], max_side_px: int = MAX_SIDE_PX) -> str:
    """Encodes an RGB image as a ``data:`` address (JPEG); larger ones are reduced to a longest side."""
    picture = Image.fromarray(np.ascontiguousarray(image))
    picture.thumbnail((max_side_px, max_side_px), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=JPEG_QUALITY, subsampling=0, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
