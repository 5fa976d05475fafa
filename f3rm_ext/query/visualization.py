"""Pictures of results: labels in colours, their legend, and a sheet with an overview of the views."""

import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8
from PIL import Image, ImageDraw, ImageFont

from f3rm_ext.utils.colormaps import DIMMED_MID_GREY, heat_scale_bytes, label_table_bytes
from f3rm_ext.utils.pictures import pick_evenly

THUMBNAIL_PX = 300
LEGEND_PX = 160
"""Width of a picture whose legend is whole."""
_MAX_COLUMNS, _MAX_ROWS = 8, 6
_GAP_PX = 6
_INK, _PAPER = (30, 30, 30), (255, 255, 255)


def _font(size_px: int, text: str = "") -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib; for a text with letters that it lacks, the font of this machine that
    has most of them.
    """
    import matplotlib

    path = str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")
    letters = [ord(letter) for letter in set(text) if not letter.isspace()]
    if not np.isin(letters, _read_letters(path)).all():
        # Only here, because the first import on a machine lists its fonts, which takes seconds.
        from matplotlib.font_manager import findSystemFonts

        fonts = [path, *sorted(findSystemFonts())]
        path = max(fonts, key=lambda other: int(np.isin(letters, _read_letters(other)).sum()))
    return _open_font(path, size_px)


@lru_cache(maxsize=32)
def _open_font(path: str, size_px: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size_px)


@cache
def _read_letters(path: str) -> Int64[np.ndarray, " letters"]:
    """Code points that a font draws; none of a font that cannot be used, such as one of coloured bitmaps."""
    from matplotlib.ft2font import FT2Font

    try:
        _open_font(path, 11)
        return np.fromiter(FT2Font(path).get_charmap(), dtype=np.int64)
    except (OSError, RuntimeError):
        return np.empty(0, dtype=np.int64)


def add_legend(
    picture: UInt8[np.ndarray, "h w 3"], names: Sequence[str], threshold: float
) -> UInt8[np.ndarray, "height w 3"]:
    """Adds a legend below a picture of labels: the query of each colour, shortened where the picture is narrow."""
    size = int(np.clip(picture.shape[1] // 40, 11, 22))
    entries = [
        *zip(names, map(tuple, label_table_bytes(len(names)).tolist()), strict=True),
        (f"other (below {threshold:g})", DIMMED_MID_GREY),
    ]
    rows: list[list[tuple[float, str, ImageFont.FreeTypeFont, tuple[int, ...]]]] = [[]]
    x = 0.0
    for entry, color in entries:
        font = _font(size, entry)
        name = _shorten(entry, int(picture.shape[1] - 2.2 * size), font)
        width = 2.2 * size + font.getlength(name)
        if rows[-1] and x + width > picture.shape[1]:
            rows.append([])
            x = 0.0
        rows[-1].append((x, name, font, color))
        x += width
    strip = Image.new("RGB", (picture.shape[1], round(1.6 * size * len(rows)) + 4), _PAPER)
    draw = ImageDraw.Draw(strip)
    for number, row in enumerate(rows):
        y = 3 + 1.6 * size * number
        for x, name, font, color in row:
            draw.rectangle((x + 3, y + 2, x + 3 + size, y + 2 + size), fill=color)
            draw.text((x + 8 + size, y), name, fill=_INK, font=font)
    return np.concatenate([picture, np.asarray(strip)])


def write_at(picture: UInt8[np.ndarray, "h w 3"], places: Mapping[str, tuple[int, int]]) -> UInt8[np.ndarray, "h w 3"]:
    """Writes short texts into a picture, each with its middle at a place (row, column)."""
    image = Image.fromarray(picture)
    draw, font = ImageDraw.Draw(image), _font(int(np.clip(picture.shape[1] // 30, 10, 22)))
    for text, (row, col) in places.items():
        draw.text((col, row), text, fill=_PAPER, font=font, anchor="mm", stroke_width=2, stroke_fill=_INK)
    return np.asarray(image)


def resize(picture: UInt8[np.ndarray, "h w 3"], height_px: int, width_px: int) -> UInt8[np.ndarray, "_ _ 3"]:
    if picture.shape[:2] == (height_px, width_px):
        return picture
    return np.asarray(Image.fromarray(picture).resize((width_px, height_px), Image.Resampling.LANCZOS))


def enlarge(picture: UInt8[np.ndarray, "h w 3"], factor: int) -> UInt8[np.ndarray, "_ _ 3"]:
    """Makes squares of pixels, a whole number of pixels wide."""
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)


class Overview:
    """A sheet of pictures: a row for each of some views, a column for its picture and for each query with its heat."""

    def __init__(self, titles: Sequence[str], heats: Sequence[tuple[float, float] | None], views: int) -> None:
        self.titles, self.heats = titles[:_MAX_COLUMNS], heats[:_MAX_COLUMNS]
        self.left_out = len(titles) - len(self.titles)
        self.shown = set(pick_evenly(views, _MAX_ROWS))
        self.rows: list[tuple[str, list[np.ndarray]]] = []
        """Name of each view that is shown, and its thumbnails, one for each column."""

    def add(self, number: int, name: str, pictures: Sequence[UInt8[np.ndarray, "_ _ 3"]]) -> None:
        if number in self.shown:
            self.rows.append((name, [_thumbnail(picture) for picture in pictures[:_MAX_COLUMNS]]))

    def draw(self, footer: Sequence[str]) -> UInt8[np.ndarray, "h w 3"]:
        """Draws the sheet, with lines below the pictures."""
        widths = [max(pictures[i].shape[1] for _, pictures in self.rows) for i in range(len(self.titles))]
        heights = [max(picture.shape[0] for picture in pictures) for _, pictures in self.rows]
        rest = f"{self.left_out} more pictures of each view are in the folder."
        lines = [*footer, rest] if self.left_out else list(footer)
        head, caption, foot = 40, 18, 17 * len(lines) + 8
        width = max(sum(widths) + _GAP_PX * (len(widths) + 1), 480)
        sheet = Image.new("RGB", (width, head + sum(heights) + (caption + _GAP_PX) * len(heights) + foot), _PAPER)
        draw = ImageDraw.Draw(sheet)
        for i, (title, heat) in enumerate(zip(self.titles, self.heats, strict=True)):
            x = _GAP_PX + sum(widths[:i]) + _GAP_PX * i
            _write_line(draw, (x, 3), title, widths[i], 14)
            if heat is not None:
                _scale_bar(sheet, x, 23, widths[i], heat)
        y = head
        for (name, pictures), height in zip(self.rows, heights, strict=True):
            _write_line(draw, (_GAP_PX, y), name, width, 11)
            y += caption
            for i, picture in enumerate(pictures):
                sheet.paste(Image.fromarray(picture), (_GAP_PX + sum(widths[:i]) + _GAP_PX * i, y))
            y += height + _GAP_PX
        for number, line in enumerate(lines):
            _write_line(draw, (_GAP_PX, y + 4 + 17 * number), line, width, 11)
        return np.asarray(sheet)


def _thumbnail(picture: np.ndarray) -> np.ndarray:
    factor = THUMBNAIL_PX / max(picture.shape[:2])
    if factor > 1:
        return enlarge(picture, math.ceil(factor))
    image = Image.fromarray(picture)
    image.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX), Image.Resampling.LANCZOS)
    return np.asarray(image)


def _write_line(draw: ImageDraw.ImageDraw, place: tuple[int, int], text: str, width_px: int, size_px: int) -> None:
    """Writes a text, shortened to a width, with its top left corner at a place (x, y)."""
    font = _font(size_px, text)
    draw.text(place, _shorten(text, width_px, font), fill=_INK, font=font)


def _shorten(text: str, width_px: int, font: ImageFont.FreeTypeFont) -> str:
    if font.getlength(text) <= width_px:
        return text
    while text and font.getlength(text + "…") > width_px:
        text = text[:-1]
    return text + "…"


def _scale_bar(sheet: Image.Image, x: int, y: int, width_px: int, heat: tuple[float, float]) -> None:
    low, high = (f"{value:.2f}" for value in heat)
    font = _font(11)
    left, right = font.getlength(low) + 4, font.getlength(high) + 4
    bar_width = max(10, int(width_px - left - right))
    ramp = heat_scale_bytes(bar_width)[None].repeat(9, axis=0)
    draw = ImageDraw.Draw(sheet)
    draw.text((x, y - 2), low, fill=_INK, font=font)
    sheet.paste(Image.fromarray(ramp), (int(x + left), y + 1))
    draw.text((x + left + bar_width + 4, y - 2), high, fill=_INK, font=font)
