"""The colour behind an object that was cut out or photographed before white or black."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from nerfstudio.data.datasets.base_dataset import InputDataset
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext.data.image_reader import MaskedPixels, read_pixels
from f3rm_ext.engine.ranks import is_first
from f3rm_ext.utils.pictures import pick_evenly

Background = Literal["random", "last_sample", "black", "white"]
_VIEWS, _LEAST_SHARE = 8, 0.25
"""Photos in which the colour is looked for, and the share of their pixels that it has at least."""
_BLACK, _WHITE = 10, 250
"""Values of the colours up to which a pixel counts as black, and from which it counts as white."""


def measure_background(photos: InputDataset, masked: MaskedPixels) -> Background | None:
    """Returns random where alpha tells what is empty, black or white if many pixels of the photos are, else None.

    Args:
        masked: what is done with masked pixels.

    Raises:
        CaptureError: a photo cannot be read.
    """
    shares = []
    for index in pick_evenly(len(photos), _VIEWS):
        picture = read_pixels(photos, index, masked)
        pixels = picture.pixels if picture.valid is None else picture.pixels[picture.valid]
        if (pixels[..., 3:] < 255).any():  # Many programs add an alpha channel to opaque photos.
            return "random"
        pixels = pixels[..., :3]
        extremes = pixels.amax(dim=-1) <= _BLACK, pixels.amin(dim=-1) >= _WHITE
        shares.append(torch.stack([extreme.float().mean() for extreme in extremes]))
    # The shares are NaN for photos of which the masks leave nothing.
    black, white = torch.stack(shares).nanmedian(dim=0).values.tolist()
    return "black" if black > _LEAST_SHARE else "white" if white > _LEAST_SHARE else None


def choose_background(metadata: Mapping[str, Any], other: Background) -> Background:
    """Returns the background colour that fits the photos, and says so; another colour if they do not tell.

    Args:
        metadata: of the training photos; its ``measure_background``, which is there in training, is
            :func:`measure_background`.
    """
    color = metadata.get("measure_background", lambda: None)()
    if color not in (None, other) and is_first():
        what = "transparent or masked" if color == "random" else color
        CONSOLE.log(f"Much of the photos is {what}: --pipeline.model.background-color is {color}.", markup=False)
    return color or other
