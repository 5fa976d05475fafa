"""Which Gaussians an object is made of: masks of views, lifted onto Gaussians by their share of each pixel.

A Gaussian that straddles an outline has no clear feature of its own. What counts is where it shows: with the
compositing weights wᵢ(p) and the mask m(p) of a view, the share of Gaussian i is Σ wᵢ(p) m(p) / Σ wᵢ(p) over all pixels
of all views. The sums are those by which features are lifted (:mod:`f3rm_ext.splat.features.lifting`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat.features.lifting import accumulate_pixels
from f3rm_ext.splat.rendering import SplatScene

MIN_SHARE = 0.5
"""The object has Gaussians that show at least this share of their weight on it."""
UNLOCKED: AbstractContextManager[object] = nullcontext()
"""No lock, for callers that do not share the device."""
HIDDEN_PX = 1.0
"""Gaussians are hidden if their compositing weights over all views add up to less, pixels."""


class PackedMasks:
    """The masks of all views, made once and kept as bits."""

    def __init__(
        self, mask: Callable[[int], Bool[np.ndarray, "h w"]], count: int, on_view: Callable[[], None] = lambda: None
    ) -> None:
        self._bits: list[tuple[np.ndarray, tuple[int, ...]]] = []
        for index in range(count):
            values = mask(index)
            self._bits.append((np.packbits(values), values.shape))
            on_view()

    def __call__(self, index: int) -> Bool[Tensor, "h w 1"]:
        """Returns the mask of a view."""
        bits, shape = self._bits[index]
        values = np.unpackbits(bits, count=int(np.prod(shape))).reshape(shape)
        return torch.from_numpy(values.astype(bool))[..., None]


class MaskShares(NamedTuple):
    """Shares of Gaussians in the masks of views, and the weight with which views show them."""

    shares: Float[Tensor, "gaussians masks"]
    """Share of the weight of each Gaussian that lies in each mask, 0 to 1; 0 for those that no view shows."""
    weights_px: Float[Tensor, " gaussians"]
    """Sum of its compositing weights over the pixels of all views."""


def lift_masks(
    scene: SplatScene,
    views: PinholeCameras,
    mask: Callable[[int], Bool[Tensor, "h w masks"]],
    on_view: Callable[[], None] = lambda: None,
    lock: AbstractContextManager[object] = UNLOCKED,
) -> MaskShares:
    """Measures the share of each Gaussian in the masks of views."""
    sums: Tensor | None = None
    for index in range(len(views.viewmats)):
        inside = mask(index).to(scene.gaussians.means)
        pixels = torch.cat([inside, torch.ones_like(inside[..., :1])], dim=-1)
        with lock:
            added = accumulate_pixels(scene, views.take(slice(index, index + 1)), pixels)
        sums = added if sums is None else sums + added
        on_view()
    assert sums is not None, "no views"
    weights = sums[:, -1]
    return MaskShares(sums[:, :-1] / weights.clamp_min(1e-12)[:, None], weights)


class Chosen(NamedTuple):
    """The Gaussians of an object."""

    chosen: Bool[Tensor, " gaussians"]
    """All of them."""
    visible: Bool[Tensor, " gaussians"]
    """Those that the views show."""
    shares: Float[Tensor, " gaussians"]
    """Share of the weight of each Gaussian that the views show on the object, 0 to 1."""

    def core(self, means: Float[Tensor, "gaussians 3"]) -> Bool[Tensor, " gaussians"]:
        """Returns the object without the hidden Gaussians outside the extent of the others."""
        if not bool(self.visible.any()):
            return self.chosen
        low, high = means[self.visible].aminmax(dim=0)
        return self.chosen & ((means >= low) & (means <= high)).all(dim=1)


def choose_gaussians(
    scene: SplatScene,
    views: PinholeCameras,
    masks: Callable[[int], Bool[Tensor, "h w 1"]],
    inside: Bool[Tensor, " gaussians"],
    on_view: Callable[[], None] = lambda: None,
    lock: AbstractContextManager[object] = UNLOCKED,
) -> Chosen:
    """Finds the Gaussians of an object by its masks in views: two passes over the views.

    The second finds what comes to light where the object was: Gaussians within or below it that no view showed. They
    have no feature of their own, and nothing is known of them but that they were hidden.

    Args:
        inside: Gaussians that may belong to the object.
        on_view: called after each view of each pass.
        lock: held while a view is drawn.

    Returns:
        After one pass, without those that are hidden, if nothing or everything is found.
    """
    lifted = lift_masks(scene, views, masks, on_view, lock)
    shares = lifted.shares[:, 0] * inside
    visible = shares >= MIN_SHARE
    if not bool(visible.any()) or bool(visible.all()):
        return Chosen(visible, visible, shares)
    rest = lift_masks(scene.take(~visible), views, masks, on_view, lock)
    chosen = visible.clone()
    chosen[~visible] = (lifted.weights_px[~visible] < HIDDEN_PX) & (rest.shares[:, 0] >= MIN_SHARE)
    return Chosen(chosen & inside, visible, shares)
