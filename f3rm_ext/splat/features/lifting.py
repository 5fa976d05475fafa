"""2D features onto Gaussians without training: each gets the mean of what the training views have where it is.

The mean is weighted by what the Gaussian gives to each pixel when it is drawn: with the compositing weights wᵢ(p) of
the rasteriser and the feature f(p) of a pixel, the code is cᵢ = Σ wᵢ(p) f(p) / Σ wᵢ(p), over all pixels of all views.
Since a picture is Σᵢ wᵢ(p) cᵢ, linear in the colours, both sums are vector-Jacobian products of drawing with respect
to the colours: exact, with the very weights that are drawn with, on every backend.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Float16
from torch import Tensor

from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.features.sampling import PackedMaps
from f3rm_ext.features.store.source import FeatureSource
from f3rm_ext.splat.cameras import PinholeCameras
from f3rm_ext.splat.features.heads import LiftedHead
from f3rm_ext.splat.rendering import RenderSettings, Scene, composite

CHANNELS = 64
"""Channels of a feature lifted at a time: memory is that of the codes and a few such slices, whatever the dimension."""


def lift(
    scene: Scene,
    dataset: PinholeDataset,
    source: FeatureSource,
    how: RenderSettings,
    on_view: Callable[[], None] = lambda: None,
) -> Iterator[LiftedHead]:
    """Lifts the features of the training views, one after the other.

    Args:
        scene: the Gaussians, as they will be drawn.
        dataset: the training views; masked pixels do not count, transparent ones by their alpha.
        source: their features.
        how: how they are drawn.
        on_view: called after each look at a view; there are :func:`looks` of them.

    Returns:
        One head per feature, its codes on the device of the Gaussians.
    """
    views = PinholeCameras.of(dataset.cameras).to(scene.gaussians.means.device)
    shares = Shares(dataset)
    for spec in source.specs:

        def load(index: int, name: str = spec.name) -> FeatureMap:
            return source.load(index)[name]

        yield LiftedHead(spec, lift_maps(scene, views, spec.dim, load, how, shares, on_view))


def looks(dataset: PinholeDataset, source: FeatureSource) -> int:
    """How often a view is looked at while all features are lifted."""
    return len(dataset) * sum(-(-spec.dim // CHANNELS) for spec in source.specs)


class Shares:
    """How much each pixel of the training views counts, 0 to 1. Images that have no mask and no alpha are read once.

    Args:
        dataset: the training views.
    """

    def __init__(self, dataset: PinholeDataset) -> None:
        self._dataset = dataset
        self._plain: set[int] = set()

    def __call__(self, index: int) -> Float[Tensor, "h w"] | None:
        """Those of an image on the CPU; None where all pixels count alike."""
        if index in self._plain:
            return None
        picture = self._dataset.picture(index)
        share: Tensor | None = None
        if picture.pixels.shape[-1] == 4:
            share = picture.pixels[..., 3].float() / 255.0
        if picture.valid is not None:
            share = picture.valid.float() if share is None else share * picture.valid
        if share is None:
            self._plain.add(index)
        return share


@torch.no_grad()
def lift_maps(
    scene: Scene,
    views: PinholeCameras,
    dim: int,
    load: Callable[[int], FeatureMap],
    how: RenderSettings,
    shares: Callable[[int], Float[Tensor, "h w"] | None] = lambda index: None,
    on_view: Callable[[], None] = lambda: None,
) -> Float16[Tensor, "gaussians feat"]:
    """Codes of all Gaussians.

    Args:
        scene: the Gaussians.
        views: where the maps were seen from.
        dim: of the features.
        load: gives the map of a view.
        how: how they are drawn.
        shares: how much each pixel of a view counts.
        on_view: called after each look at a view.

    Returns:
        0 for Gaussians that no view sees.
    """
    means = scene.gaussians.means
    codes = torch.zeros(len(means), dim, dtype=torch.float16, device=means.device)
    weight: Tensor | None = None
    for first in range(0, dim, CHANNELS):
        part = slice(first, min(first + CHANNELS, dim))
        sums = torch.zeros(len(means), part.stop - first + (weight is None), device=means.device)
        for index in range(len(views.viewmats)):
            view = PinholeCameras(*(value[index : index + 1] for value in views))
            wanted = upsampled(load(index), part, view)
            if weight is None:
                wanted = torch.cat([wanted, torch.ones_like(wanted[..., :1])], dim=-1)
            share = shares(index)
            if share is not None:
                wanted = wanted * share.to(wanted.device)[..., None]
            sums += weighted_sums(scene, view, wanted, how)
            on_view()
        if weight is None:
            weight, sums = sums[:, -1:].clone(), sums[:, :-1]
        codes[:, part] = torch.where(weight > 0, sums / weight, 0.0).half()
    return codes


def upsampled(feature_map: FeatureMap, part: slice, view: PinholeCameras) -> Float[Tensor, "h w feat"]:
    """Some channels of a map at every pixel of its view, bilinearly between patch centres, on the view's device."""
    height, width = int(view.heights[0]), int(view.widths[0])
    chosen = replace(feature_map, values=feature_map.values[..., part], residual_norm=None)
    packed = PackedMaps.pack([chosen], view.Ks.device)
    rows, cols = (torch.arange(side, device=view.Ks.device) + 0.5 for side in (height, width))
    centres_px = torch.stack(torch.meshgrid(rows, cols, indexing="ij"), dim=-1).view(-1, 2)
    slot = torch.zeros(len(centres_px), dtype=torch.int64, device=view.Ks.device)
    return packed.sample(slot, centres_px).view(height, width, -1)


def weighted_sums(
    scene: Scene, view: PinholeCameras, pixels: Float[Tensor, "h w channels"], how: RenderSettings
) -> Float[Tensor, "gaussians channels"]:
    """Σ wᵢ(p) f(p) over the pixels of a view, for every Gaussian.

    Args:
        scene: the Gaussians.
        view: one camera.
        pixels: f, at the view's size.
        how: how it is drawn.
    """
    with torch.enable_grad():
        values = torch.zeros(len(scene.gaussians), pixels.shape[-1], device=pixels.device, requires_grad=True)
        picture = composite(scene, view, values, how)
        (sums,) = torch.autograd.grad(picture, values, pixels)
    return sums
