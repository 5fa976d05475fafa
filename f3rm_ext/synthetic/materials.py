"""Materials: a pattern with gloss and emission. They are packed into arrays for the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from f3rm_ext.synthetic.patterns import Pattern

Color = tuple[float, float, float]


def srgb(code: int) -> Color:
    """Returns the linear RGB of an sRGB colour given as 0xRRGGBB.

    >>> srgb(0xFF0000)
    (1.0, 0.0, 0.0)
    """
    channels = np.array([(code >> shift) & 255 for shift in (16, 8, 0)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return (float(linear[0]), float(linear[1]), float(linear[2]))


@dataclass(frozen=True)
class Material:
    """The look of a surface. Colours are linear RGB in 0-1."""

    pattern: Pattern = Pattern.PLAIN
    a: Color = (0.5, 0.5, 0.5)
    b: Color = (0.5, 0.5, 0.5)
    c: Color = (0.5, 0.5, 0.5)
    params: tuple[int | float, ...] = (1.0, 0.0, 0.0, 0.0)
    """p0 … p3 of the pattern."""
    gloss: int | float = 0.0
    """Mirror reflectance at normal incidence, 0-1: 0.04 for varnish or glaze, 0 for matt; more at grazing angles."""
    metal: bool = False
    """Whether the reflection takes the colour of the pattern and nothing is scattered."""
    roughness: int | float = 0.0
    """Spread of the reflection, 0 (mirror) to 0.3."""
    emission: int | float = 0.0
    """Radiance that the surface emits in the pattern's colour. A surface that emits light is not lit."""


class MaterialTable(NamedTuple):
    """Materials as arrays, one row each."""

    pattern: np.ndarray
    """(materials,) int32."""
    colors: np.ndarray
    """(materials, 3, 3) float64: a, b, c."""
    params: np.ndarray
    """(materials, 4) float64."""
    surface: np.ndarray
    """(materials, 4) float64: gloss, metal (0 or 1), roughness, emission."""


def pack(materials: Sequence[Material], shiny: bool) -> MaterialTable:
    """Returns the table of these materials. Without ``shiny`` every gloss is 0 and metals scatter light like paint."""
    surface = [
        (m.gloss, float(m.metal), m.roughness, m.emission) if shiny else (0.0, 0.0, 0.0, m.emission) for m in materials
    ]
    return MaterialTable(
        pattern=np.array([int(m.pattern) for m in materials], np.int32),
        colors=np.array([[m.a, m.b, m.c] for m in materials], np.float64),
        params=np.array([(*m.params, 0.0, 0.0, 0.0, 0.0)[:4] for m in materials], np.float64),
        surface=np.array(surface, np.float64),
    )
