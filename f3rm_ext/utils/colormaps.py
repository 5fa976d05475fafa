"""Colours of scores and labels, ray by ray, on any device: pure functions.

:mod:`f3rm_ext.utils.pictures` colours whole images for files.
"""

import colorsys
from functools import lru_cache

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from f3rm_ext.utils.pictures import HEAT_MAP

PALETTE = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#ffffff")
"""Colours of the first labels: Okabe and Ito's, which most people can tell apart, and white."""
OTHER_GREY = 0.16
"""What no label claims."""
_LUMA = (0.299, 0.587, 0.114)
_HEAT_RANGE = (0.35, 0.85)
"""Part of the colour map that the overlay uses, from the threshold to 1: its ends look like a greyed picture."""


@lru_cache(maxsize=8)
def _heat_table(device: torch.device) -> Float[Tensor, "256 3"]:
    from matplotlib import colormaps

    table = torch.from_numpy(colormaps[HEAT_MAP](torch.linspace(0.0, 1.0, 256).numpy())[:, :3])
    return table.to(device, torch.float32)


def heat(score: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch 3"]:
    """The colour of a score from 0 to 1; those outside get the colours of the ends, NaN that of 0."""
    index = (score.nan_to_num(nan=0.0).clamp(0.0, 1.0) * 255.0).round().long()
    return _heat_table(score.device)[index]


def overlay(rgb: Float[Tensor, "rays 3"], score: Float[Tensor, "rays 1"], threshold: float) -> Float[Tensor, "rays 3"]:
    """A greyed picture with heat where the score reaches the threshold: the hotter, the higher.

    Args:
        rgb: the picture, 0 to 1.
        score: 0 to 1.
        threshold: 0 to 1.

    Returns:
        RGB, 0 to 1.
    """
    rgb = rgb.clamp(0.0, 1.0)
    grey = rgb @ rgb.new_tensor(_LUMA)
    dim = 0.15 * rgb + 0.4 * grey[:, None]
    strength = ((score - threshold) / max(1.0 - threshold, 1e-6)).clamp(0.0, 1.0)
    first, last = _HEAT_RANGE
    hot = heat((first + (last - first) * strength)[:, 0])
    opacity = 0.5 + 0.3 * strength
    return torch.where(score >= threshold, (1.0 - opacity) * dim + opacity * hot, dim)


def label_hex(index: int) -> str:
    """Colour of the label of this number, as ``#rrggbb``; no two of the first hundred are the same."""
    if index < len(PALETTE):
        return PALETTE[index]
    turn = index - len(PALETTE)
    color = colorsys.hsv_to_rgb(turn * 0.618034 % 1.0, 0.5, 0.95 if turn % 2 else 0.6)
    return "#" + "".join(f"{round(channel * 255):02x}" for channel in color)


def label_table(count: int) -> Float[Tensor, "labels 3"]:
    """Colours of labels 0 to count − 1, and last that of what no label claims."""
    rows = [[int(label_hex(i)[at : at + 2], 16) / 255.0 for at in (1, 3, 5)] for i in range(count)]
    return torch.tensor([*rows, [OTHER_GREY] * 3])


def label_colors(labels: Int64[Tensor, "*batch"], count: int) -> Float[Tensor, "*batch 3"]:
    """Flat colours of labels.

    Args:
        labels: 0 to count − 1, or −1 (:data:`f3rm_ext.query.relevancy.OTHER`).
        count: number of labels.
    """
    return label_table(count).to(labels.device)[labels]
