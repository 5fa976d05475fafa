"""Exposures of photos: as their cameras recorded them in EXIF, or as found in what they show."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32
from PIL import Image

from f3rm_ext.utils.pictures import UNREADABLE

MIN_RANGE_STOPS = 0.25
"""Difference of exposures below which they count as constant; cameras step by 1/3."""
_EXIF, _EXPOSURE_TIME_S, _F_NUMBER, _ISO = 0x8769, 0x829A, 0x829D, 0x8827


class MeasuredStops(NamedTuple):
    """Exposures found in what photos show."""

    stops: Float32[np.ndarray, "photos 3"]
    """Exposures of red, green and blue, with mean 0; 0 for photos of which nothing is known."""
    range_stops: float
    """Difference between the darkest and the brightest photos, without the outermost 5 % on either side, stops."""
    vary: bool
    """Whether they differ by :data:`MIN_RANGE_STOPS` or more, and this explains what photos of the same places show."""


def exposure_stops(paths: Sequence[Path]) -> list[float | None]:
    """Returns the exposure of each photo, log2 (t · ISO / N²), in stops; None where EXIF does not tell it.

    One stop more is twice as much recorded light of the same scene. Only headers are read.

    Args:
        paths: photos of one capture. A lens without contacts records no f-number N, so it may be missing in all of
            them; a photo without one among others with one is unknown.
    """
    tags = [_read_tags(path) for path in paths]
    has_f_number = any(f_number for _, f_number, _ in tags)
    return [_stops(time_s, f_number if has_f_number else 1.0, iso) for time_s, f_number, iso in tags]


def _stops(time_s: float | None, f_number: float | None, iso: float | None) -> float | None:
    if time_s is None or f_number is None or iso is None:
        return None
    return math.log2(time_s) + math.log2(iso) - 2 * math.log2(f_number)


def _read_tags(path: Path) -> tuple[float | None, float | None, float | None]:
    """Returns exposure time in seconds, f-number and ISO."""
    try:
        with Image.open(path) as image:
            # Not `getexif`, which would decode a whole PNG to look behind its pixels.
            block = image.info.get("exif")
        if not isinstance(block, bytes):
            return None, None, None
        exif = Image.Exif()
        exif.load(block)
        tags = exif.get_ifd(_EXIF)
        return _number(tags.get(_EXPOSURE_TIME_S)), _number(tags.get(_F_NUMBER)), _number(tags.get(_ISO))
    except (*UNREADABLE, LookupError, TypeError):  # damaged EXIF says nothing
        return None, None, None


def _number(value: object) -> float | None:
    """Returns a finite number above 0, or None: cameras write 0, n/0, text or several values for what they do not know.

    >>> _number("1/60"), _number(0), _number((200, 0)), _number(0.5)
    (None, None, 200.0, 0.5)
    """
    if isinstance(value, tuple):
        value = value[0] if value else None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, ZeroDivisionError):
        return None
    return number if math.isfinite(number) and number > 0 else None
