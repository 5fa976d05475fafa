"""Materials: a pattern with gloss and emission. They are packed into arrays for the kernels."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from f3rm_ext.utils.pictures import to_linear

Color = tuple[float, float, float]


def srgb(code: int) -> Color:
    """Returns the linear RGB of an sRGB colour given as 0xRRGGBB.

    >>> srgb(0xFF0000)
    (1.0, 0.0, 0.0)
    """
    linear = to_linear(np.array([(code >> shift) & 255 for shift in (16, 8, 0)]) / 255)
    return (float(linear[0]), float(linear[1]), float(linear[2]))


class Pattern(enum.IntEnum):
    """Patterns of materials; a, b and c are the material's colours, p0 … p3 its parameters."""

    PLAIN = 0
    """a with a cloudy variation of strength p1 and size p0."""
    CHECKER = 1
    """a and b in squares of side p0 on x and y."""
    STRIPES = 2
    """a and b in stripes of width p0 along p1·x + p2·y + p3·z."""
    WOOD = 3
    """Rings and grain around the x axis, from a to b; p0 is the distance between rings."""
    MARBLE = 4
    """Veins of b and some c in a; p0 is the distance between veins."""
    TERRAZZO = 5
    """Chips of b, c and grey in a; p0 is the size of the chips."""
    FABRIC = 6
    """A weave of threads of a and b, p0 apart, on x and y."""
    PLANKS = 7
    """Floorboards along x, from a to b, p0 long and p1 wide."""
    CUBE = 8
    """3x3 coloured stickers on each side of the cube ±1; p0 shuffles them."""
    PAINTING = 9
    """Hills under a sun, on x, y in 0-1; p0 varies the picture."""
    DOUGHNUT = 10
    """Dough a, icing b with sprinkles, on (turn around, turn across)."""
    RUG = 11
    """Borders and diamonds of a, b and c on x, y; p0 is the radius."""
    RIBBON = 12
    """Wrapping paper a with dots of c, crossed by a ribbon b; on the cube ±1."""
    FRUIT = 13
    """a turning to b with height z by p0, with pores p1 apart."""
    BANDS = 14
    """a with a zigzag of b between z = p0 and p1 and rims of c; x is the turn around, p2 zigzags."""
    SKY = 15
    """From a below to b above with clouds of c, on x, y in 0-1."""
    SPOTS = 16
    """Dots of b, p0 apart, in a."""
    PANEL = 17
    """Wallpaper: a above, b below z = p0, with faint stripes p1 wide along x + y."""


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
