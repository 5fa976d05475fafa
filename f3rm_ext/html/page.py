"""Pages made from the templates in ``templates/``: each is one HTML file that loads nothing from elsewhere."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from f3rm_ext.utils.pictures import MAX_SIDE_PX, data_uri, read_picture

MAX_CAMERAS = 120
"""Cameras to choose from on a page of a scene."""


@dataclass(frozen=True)
class Picture:
    """An image inside a page."""

    uri: str
    """``data:`` address."""
    width_px: int
    height_px: int

    @classmethod
    def from_array(cls, image: UInt8[np.ndarray, "h w 3"], max_side_px: int = MAX_SIDE_PX) -> "Picture":
        """Encodes an RGB image; one with a longer side than ``max_side_px`` is reduced."""
        return cls(data_uri(image, max_side_px), image.shape[1], image.shape[0])

    @classmethod
    def from_file(cls, path: Path, max_side_px: int = MAX_SIDE_PX) -> "Picture | None":
        """Encodes an image file; returns None if there is no such file."""
        return cls.from_array(read_picture(path), max_side_px) if path.is_file() else None


def render_page(template: str, **content: Any) -> str:
    """Renders a file of ``templates/``. Texts are escaped, except those that are :class:`markupsafe.Markup`."""
    return _environment().get_template(template).render(content)


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun.

    >>> plural(1, "image"), plural(2, "image")
    ('1 image', '2 images')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Formats a duration.

    >>> duration(42.0), duration(185.0), duration(9000.0)
    ('42 s', '3 min 05 s', '2 h 30 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def rounded(value: float) -> str:
    """Returns a number with two significant digits, without an exponent where people write none.

    >>> rounded(0.01234), rounded(123.4), rounded(5678.0)
    ('0.012', '120', '5700')
    """
    return f"{float(f'{value:.2g}'):g}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("f3rm_ext.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["asset"] = _asset
    environment.filters |= {"plural": plural, "duration": duration}
    return environment


def _asset(name: str) -> Markup:
    """The content of a style sheet or script in ``web/``."""
    return Markup((files("f3rm_ext.html") / "web" / name).read_text(encoding="utf-8"))
