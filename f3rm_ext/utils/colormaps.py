"""Colours of scores, labels and depth: the same in the viewer, in files and in the report.

Heat is a part of matplotlib's *inferno* laid over a dimmed grey picture, depth is *turbo*, labels have a palette. The
functions work on tensors of any shape and device; those that end in ``_bytes`` take and return whole uint8 images.
"""

import colorsys
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from f3rm_ext.utils.pictures import to_bytes

HEAT_MAP, DEPTH_MAP = "inferno", "turbo"
PALETTE = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#ffffff")
"""Colours of the first eight labels: those of Okabe and Ito, which most people can tell apart, with white for black."""
OTHER_GREY = 0.16
"""Grey of pixels without a label, 0 to 1."""
_LUMA = (0.299, 0.587, 0.114)
_HEAT_RANGE = (0.35, 0.85)
"""The part of the colour map that heat uses; its ends would look like the grey picture below."""
_HEAT_OPACITY = (0.5, 0.8)
"""Opacity of the heat at the lowest and at the highest score."""
_LABEL_OPACITY = 0.65
DIMMED_MID_GREY = (70, 70, 70)
"""A mid-grey pixel after :func:`dim`, as bytes: stands in legends for all that no label or heat covers."""


@lru_cache(maxsize=8)
def _color_table(name: str, device: torch.device) -> Float[Tensor, "256 3"]:
    from matplotlib import colormaps

    table = torch.from_numpy(colormaps[name](np.linspace(0.0, 1.0, 256))[:, :3])
    return table.to(device, torch.float32)


def _map_colors(unit: Float[Tensor, "*batch"], name: str) -> Float[Tensor, "*batch 3"]:
    """Colours of values from 0 to 1; values outside take the colours of the ends, NaN that of 0."""
    index = (unit.nan_to_num(nan=0.0).clamp(0.0, 1.0) * 255.0).round().long()
    return _color_table(name, unit.device)[index]


def dim(rgb: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 3"]:
    """Returns a darker, almost grey picture, on which colours stand out. RGB, 0 to 1."""
    rgb = rgb.clamp(0.0, 1.0)
    return 0.15 * rgb + 0.4 * _grey(rgb)


def _grey(rgb: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 1"]:
    return (rgb @ rgb.new_tensor(_LUMA))[..., None]


# --- heat ------------------------------------------------------------------------------------------------------------


def heat_overlay(
    rgb: Float[Tensor, "*batch 3"], score: Float[Tensor, "*batch"], low: float, high: float
) -> Float[Tensor, "*batch 3"]:
    """Lays the heat of a score over a picture; both pictures are RGB, 0 to 1.

    Where the score is below ``low`` (or NaN) the picture is dimmed. From ``low`` to ``high`` the heat gets brighter and
    more opaque; scores above ``high``, which is at least ``low``, look like ``high``.

    >>> picture = torch.full((3, 3), 0.5)
    >>> shown = heat_overlay(picture, torch.tensor([0.2, 0.6, 1.0]), low=0.6, high=1.0)
    >>> [[round(channel, 2) for channel in pixel] for pixel in shown.tolist()]
    [[0.28, 0.28, 0.28], [0.39, 0.2, 0.35], [0.84, 0.65, 0.17]]
    """
    strength = ((score - low) / max(high - low, 1e-6)).clamp(0.0, 1.0)
    (first, last), (thin, dense) = _HEAT_RANGE, _HEAT_OPACITY
    heat = _map_colors(first + (last - first) * strength, HEAT_MAP)
    opacity = (thin + (dense - thin) * strength)[..., None]
    below = dim(rgb)
    return torch.where((score >= low)[..., None], (1.0 - opacity) * below + opacity * heat, below)


def heat_overlay_bytes(
    picture: UInt8[np.ndarray, "h w 3"], score: Float[np.ndarray, "h w"], low: float, high: float
) -> UInt8[np.ndarray, "h w 3"]:
    """:func:`heat_overlay` for an image file."""
    rgb = torch.tensor(picture, dtype=torch.float32) / 255.0
    return to_bytes(heat_overlay(rgb, torch.tensor(score, dtype=torch.float32), low, high).numpy())


def heat_table(count: int) -> Float[Tensor, "count 3"]:
    """The colours of the heat itself from the lowest to the highest score, without a picture below. RGB, 0 to 1."""
    first, last = _HEAT_RANGE
    return _map_colors(torch.linspace(first, last, count), HEAT_MAP)


def heat_scale_bytes(count: int) -> UInt8[np.ndarray, "count 3"]:
    """Colours of a scale bar from ``low`` to ``high``, as :func:`heat_overlay` shows them over a mid-grey picture."""
    score = torch.linspace(0.0, 1.0, count)
    return to_bytes(heat_overlay(torch.full((count, 3), 0.5), score, 0.0, 1.0).numpy())


def heat_stops(count: int = 9) -> list[str]:
    """The colours of :func:`heat_scale_bytes` as ``#rrggbb``, for the gradient of a legend.

    >>> heat_stops(3)
    ['#623259', '#a84d3e', '#d7a62a']
    """
    return ["#" + bytes(color.tolist()).hex() for color in heat_scale_bytes(count)]


# --- depth -----------------------------------------------------------------------------------------------------------


def depth_colors_bytes(depth: Float[np.ndarray, "h w"], low: float, high: float) -> UInt8[np.ndarray, "h w 3"]:
    """Colours a depth map of any unit, from blue at ``low`` and below, and where it is NaN, to red from ``high`` on."""
    unit = torch.tensor((depth - low) / max(high - low, 1e-12), dtype=torch.float32)
    return to_bytes(_map_colors(unit, DEPTH_MAP).numpy())


# --- labels ----------------------------------------------------------------------------------------------------------


def label_hex(index: int) -> str:
    """Returns the colour of a label as ``#rrggbb``; the first hundred labels all differ.

    >>> label_hex(0), label_hex(8)
    ('#e69f00', '#994c4c')
    """
    if index < len(PALETTE):
        return PALETTE[index]
    turn = index - len(PALETTE)
    # Steps of the golden ratio spread the hues: each lies in the largest gap between those before it.
    color = colorsys.hsv_to_rgb(turn * 0.618034 % 1.0, 0.5, 0.95 if turn % 2 else 0.6)
    return "#" + "".join(f"{round(channel * 255):02x}" for channel in color)


def label_table(count: int) -> Float[Tensor, "labels 3"]:
    """Colours of the labels 0 to count − 1, followed by the grey of pixels without a label. RGB, 0 to 1."""
    rows = [[channel / 255.0 for channel in bytes.fromhex(label_hex(i)[1:])] for i in range(count)]
    return torch.tensor([*rows, [OTHER_GREY] * 3])


def label_table_bytes(count: int) -> UInt8[np.ndarray, "labels 3"]:
    """Colours of the labels 0 to count − 1."""
    return to_bytes(label_table(count)[:count].numpy())


def label_colors(labels: Int64[Tensor, "*batch"], count: int) -> Float[Tensor, "*batch 3"]:
    """Returns flat colours, 0 to 1, of labels below ``count``; −1 is none (:data:`f3rm_ext.query.relevancy.OTHER`)."""
    return label_table(count).to(labels.device)[labels]


def label_overlay_bytes(
    picture: UInt8[np.ndarray, "h w 3"], labels: Int64[np.ndarray, "h w"], count: int
) -> UInt8[np.ndarray, "h w 3"]:
    """Lays the colours of labels below ``count`` over a grey picture of their size; pixels without one (−1) are dim."""
    rgb, index = torch.tensor(picture, dtype=torch.float32) / 255.0, torch.tensor(labels)
    colored = (1.0 - _LABEL_OPACITY) * _grey(rgb) + _LABEL_OPACITY * label_colors(index, count)
    return to_bytes(torch.where((index < 0)[..., None], dim(rgb), colored).numpy())
