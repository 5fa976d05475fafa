"""The colour behind a scene: that of the backdrop of an object, or the mean colour of the photos."""

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class PhotoBackground:
    """What photos tell of the colour behind the scene."""

    choice: Background | None = None
    """random where alpha tells what is empty, black or white if many pixels are; None if the photos do not tell."""
    mean_rgb: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Mean colour of opaque photos, 0 to 1: the likeliest one where they show nothing. Black for transparent ones."""

    def choose(self, other: Background) -> Background:
        """Returns the background colour that fits the photos, and says so; another colour if they do not tell."""
        if self.choice not in (None, other) and is_first():
            what = "transparent or masked" if self.choice == "random" else self.choice
            CONSOLE.log(
                f"Much of the photos is {what}: --pipeline.model.background-color is {self.choice}.", markup=False
            )
        return self.choice or other


def measure_background(photos: InputDataset, masked: MaskedPixels) -> PhotoBackground:
    """Measures the background of some photos, evenly among all. Raises CaptureError if one cannot be read."""
    shares, means = [], []
    for index in pick_evenly(len(photos), _VIEWS):
        picture = read_pixels(photos, index, masked)
        pixels = picture.pixels if picture.valid is None else picture.pixels[picture.valid]
        if (pixels[..., 3:] < 255).any():  # Many programs add an alpha channel to opaque photos.
            return PhotoBackground("random")
        pixels = pixels[..., :3]
        extremes = pixels.amax(dim=-1) <= _BLACK, pixels.amin(dim=-1) >= _WHITE
        shares.append(torch.stack([extreme.float().mean() for extreme in extremes]))
        means.append(pixels.reshape(-1, 3).float().mean(dim=0) / 255)
    # Shares and means are NaN for photos of which the masks leave nothing.
    black, white = torch.stack(shares).nanmedian(dim=0).values.tolist()
    choice = "black" if black > _LEAST_SHARE else "white" if white > _LEAST_SHARE else None
    red, green, blue = torch.stack(means).nanmean(dim=0).nan_to_num().tolist()
    return PhotoBackground(choice, (red, green, blue))


def photo_background(metadata: Mapping[str, Any]) -> PhotoBackground:
    """Returns the background of the training photos; one that tells nothing outside training.

    Args:
        metadata: of the training photos; its ``measure_background``, which is there in training, is
            :func:`measure_background`.
    """
    return metadata.get("measure_background", PhotoBackground)()
