"""Pictures of any kind as tiles of three bytes per pixel: 16 bits, grey, many bands, large rasters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from jaxtyping import Shaped, UInt8
from PIL import Image

from f3rm_ext.utils.ranges import Count, Range, check_ranges

SUFFIXES = {".jpg", ".jpeg", ".png", ".tif", ".tiff", ".webp", ".bmp"}


@dataclass(frozen=True)
class PictureOptions:
    """Options of decoding pictures into tiles."""

    bands: tuple[Count, Count, Count] | None = None
    """Bands of TIFF files to use as red, green and blue, counted from 1, such as 4 3 2 for Sentinel-2."""
    white: Count | None = None
    """Value of 16-bit pictures that becomes white, at least 1, such as 3000 for Sentinel-2; 65535 by default."""
    tile_px: Annotated[int, Range(32)] | None = None
    """Cut pictures into square tiles of this size, in px, at least 32; by default the central square is used."""

    def __post_init__(self) -> None:
        check_ranges(self)


WHOLE_PICTURE = PictureOptions()
"""One tile per picture."""


def read_tiles(path: Path, side: int, reading: PictureOptions) -> dict[str, UInt8[np.ndarray, "side side 3"]]:
    """Reads one picture as squares of bytes, by their place in it, such as ``[row 2, column 0]``.

    Without `tile_px` it is one: the square of its short side in the middle. Parts at the right and at the bottom that
    are no whole tiles are left out.

    Raises:
        ValueError: Its values are floating-point or 32-bit numbers, whose range is not known; it lacks a band; it has
            more than four bands, and none are named; or it is smaller than a tile.
        OSError: It is damaged.
    """
    picture = _read(path, reading)
    if reading.tile_px is None:
        return {"": _square(picture, central_square(picture.size), side)}
    length = reading.tile_px
    rows, columns = picture.height // length, picture.width // length
    if not rows * columns:
        raise ValueError(f"{picture.width} x {picture.height} px, smaller than a tile of {length} px")
    return {
        f" [row {row}, column {column}]": _square(
            picture, (column * length, row * length, (column + 1) * length, (row + 1) * length), side
        )
        for row in range(rows)
        for column in range(columns)
    }


def central_square(size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Returns left, top, right and bottom of the largest square in the middle of a picture of this width and height.

    >>> central_square((40, 20))
    (10, 0, 30, 20)
    """
    short = min(size)
    left, top = (size[0] - short) // 2, (size[1] - short) // 2
    return left, top, left + short, top + short


def _square(picture: Image.Image, box: tuple[int, int, int, int], side: int) -> UInt8[np.ndarray, "side side 3"]:
    return np.asarray(picture.resize((side, side), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0))


def _read(path: Path, reading: PictureOptions) -> Image.Image:
    if path.suffix.lower() in (".tif", ".tiff"):
        if reading.bands is not None:
            return Image.fromarray(_bytes(_bands(path, reading.bands), reading.white))
        if (count := _band_count(path)) > 4:  # four are colour and transparency
            raise ValueError(f"{count} bands: name three of them, such as --bands 4 3 2")
    with Image.open(path) as image:
        image.load()
        if image.mode in ("F", "I"):
            raise ValueError(f"mode {image.mode}: values of unknown range, convert it to 8 or 16 bits")
        if image.mode.startswith("I;16"):
            return Image.fromarray(_bytes(np.asarray(image).astype(np.uint16), reading.white)).convert("RGB")
        if reading.white is not None and image.mode in ("RGB", "RGBA"):  # of 16 bits Pillow keeps the upper eight
            import cv2

            values = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
            if values is not None and values.dtype == np.uint16:
                return Image.fromarray(np.ascontiguousarray(_bytes(values[..., 2::-1], reading.white)))
        return image.convert("RGB")


def _band_count(path: Path) -> int:
    """Returns how many bands the first page of a TIFF file has; 1 where the file is damaged."""
    import tifffile

    try:
        with tifffile.TiffFile(path) as file:
            return getattr(file.pages.first, "samplesperpixel", 1)
    except Exception:  # damage makes tifffile raise almost any error
        return 1


def _bands(path: Path, bands: tuple[int, int, int]) -> Shaped[np.ndarray, "h w 3"]:
    """Reads three bands of the first image of a TIFF file, which may lie side by side or one after the other."""
    import tifffile

    try:
        with tifffile.TiffFile(path) as file:
            values, axes = file.series[0].asarray(), file.series[0].axes
    except OSError:
        raise
    except Exception as error:  # damage makes tifffile raise almost any error
        raise ValueError(str(error)) from error
    if values.ndim != 3:
        raise ValueError(f"axes {axes}: bands need three axes")
    if not axes.endswith("YX"):
        values = np.moveaxis(values, -1, 0)
    if max(bands) > len(values):
        raise ValueError(f"{len(values)} bands, but --bands asks for band {max(bands)}")
    return np.stack([values[band - 1] for band in bands], axis=-1)


def _bytes(values: Shaped[np.ndarray, "h w *bands"], white: int | None) -> UInt8[np.ndarray, "h w *bands"]:
    if values.dtype == np.uint8:
        return values
    if values.dtype != np.uint16:
        raise ValueError(f"values of type {values.dtype}: of unknown range, convert them to 8 or 16 bits")
    if white is None:
        return (values >> 8).astype(np.uint8)
    return (values.astype(np.float32) * (255 / white)).clip(0, 255).astype(np.uint8)
