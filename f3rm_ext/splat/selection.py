"""Which Gaussians an object is made of: masks of views, lifted onto Gaussians by their share of each pixel.

A Gaussian that straddles an outline has no clear feature of its own. What counts is where it shows: with the
compositing weights wᵢ(p) and the mask m(p) of a view, the share of Gaussian i is Σ wᵢ(p) m(p) / Σ wᵢ(p) over all pixels
of all views. The sums are those by which features are lifted (:mod:`f3rm_ext.splat.features.lifting`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.features.lifting import accumulate_pixels
from f3rm_ext.splat.rendering import SplatScene

MIN_SHARE = 0.5
"""The object has Gaussians that show at least this share of their weight on it."""
HIDDEN_PX = 1.0
"""Gaussians are hidden if their compositing weights over all views add up to less, pixels."""


class MaskShares(NamedTuple):
    """Where Gaussians show."""

    shares: Float[Tensor, "gaussians masks"]
    """Share of the weight of each Gaussian that lies in each mask, 0 to 1; 0 for those that no view shows."""
    weights_px: Float[Tensor, " gaussians"]
    """Sum of its compositing weights over the pixels of all views."""


def lift_masks(
    scene: SplatScene,
    views: PinholeCameras,
    mask: Callable[[int], Bool[Tensor, "h w masks"]],
    on_view: Callable[[], None] = lambda: None,
) -> MaskShares:
    """Measures the share of each Gaussian in the masks of views.

    Args:
        mask: returns the masks of a view.
        on_view: called after each view.
    """
    sums: Tensor | None = None
    for index in range(len(views.viewmats)):
        inside = mask(index).to(scene.gaussians.means)
        pixels = torch.cat([inside, torch.ones_like(inside[..., :1])], dim=-1)
        added = accumulate_pixels(scene, views.take(slice(index, index + 1)), pixels)
        sums = added if sums is None else sums + added
        on_view()
    assert sums is not None, "no views"
    weights = sums[:, -1]
    return MaskShares(sums[:, :-1] / weights.clamp_min(1e-12)[:, None], weights)


def add_hidden(
    selected: Bool[Tensor, " gaussians"],
    before: Float[Tensor, " gaussians"],
    rest: MaskShares,
) -> Bool[Tensor, " gaussians"]:
    """Adds what comes to light where the object was: Gaussians within or below it that no view showed.

    They have no feature of their own, and nothing is known of them but that they were hidden.

    Args:
        selected: the visible part of the object.
        before: weights in the whole scene, pixels.
        rest: of the Gaussians that are not selected, as if there were no others; one mask.
    """
    grown = selected.clone()
    grown[~selected] = (before[~selected] < HIDDEN_PX) & (rest.shares[:, 0] >= MIN_SHARE)
    return grown
