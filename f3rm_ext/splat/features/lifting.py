"""Lifting: 2D features become features of Gaussians without training.

Each Gaussian gets the mean of the features at the pixels it covers, weighted by its contribution to each pixel. With
the compositing weights wᵢ(p) and the feature f(p) of a pixel, its code is cᵢ = Σ wᵢ(p) f(p) / Σ wᵢ(p) over all pixels
of all views. A rendered image is Σᵢ wᵢ(p) cᵢ, linear in the colours, so both sums are vector-Jacobian products of
rendering with respect to the colours. They are exact, and use the weights of rendering on every backend. The weights
also tell which Gaussians are seen together, by which :mod:`f3rm_ext.query.groups` groups them. On the CPU, a kernel
computes the same sums patch by patch.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Float16, Int32
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.features.base import FeatureMap
from f3rm_ext.features.sampling import PackedMaps
from f3rm_ext.features.source import FeatureSource
from f3rm_ext.memory.shapes import kernel_device
from f3rm_ext.query.groups import Seen, average_groups
from f3rm_ext.splat.features.heads import LiftedHead
from f3rm_ext.splat.rasterize import resolve_backend
from f3rm_ext.splat.rendering import SplatScene, composite

SOLID = 0.05
"""Opacity from which on a Gaussian belongs to a group."""
CHANNELS = 64
"""Channels lifted at a time, beside the weight. Beyond the codes, memory holds a few slices of this width, whatever the
dimension."""
SUMS_BYTES = 1 << 29
"""Largest sums of one pass over the views where features are lifted patch by patch, bytes."""


def lift(
    scene: SplatScene,
    dataset: PinholeDataset,
    source: FeatureSource,
    on_view: Callable[[], None] = lambda: None,
    *,
    per_group: bool = True,
) -> Iterator[LiftedHead]:
    """Lifts the features of the training views, one feature after another.

    Args:
        dataset: the training views; masked pixels do not count, transparent ones count by their alpha.
        on_view: called after each pass over a view, :func:`count_lifting_steps` times in all.
        per_group: draw the code of each Gaussian towards the mean of its group, see :func:`average_groups`.
    """
    views = PinholeCameras.of(dataset.cameras).to(scene.gaussians.means.device)
    shares = Shares(dataset)
    for spec in source.specs:
        seen = Seen(len(scene.gaussians), len(views.viewmats))
        codes = lift_maps(
            scene, views, spec.dim, lambda index, name=spec.name: source.load(index)[name], shares, on_view, seen.add
        )
        groups = None if scene.sharded else group_gaussians(scene, codes, seen)
        if groups is not None and per_group:
            average_groups(codes, groups)
        yield LiftedHead(spec, codes, groups)


def count_lifting_steps(scene: SplatScene, dataset: PinholeDataset, source: FeatureSource) -> int:
    """Returns the number of passes over single views that lifting all features takes."""
    return len(dataset) * sum(-(-spec.dim // channels_at_once(scene)) for spec in source.specs)


class Shares:
    """Weights of the pixels of the training views, 0 to 1. Images without mask and alpha are read only once."""

    def __init__(self, dataset: PinholeDataset) -> None:
        self._dataset = dataset
        self._plain: set[int] = set()

    def __call__(self, index: int) -> Float[Tensor, "h w"] | None:
        """Returns the weights of an image, on the CPU; None where all pixels count alike."""
        if index in self._plain:
            return None
        picture = self._dataset.picture(index)
        share = picture.pixels[..., 3].float() / 255.0 if picture.pixels.shape[-1] == 4 else None
        if picture.valid is not None:
            share = picture.valid.float() if share is None else share * picture.valid
        if share is None:
            self._plain.add(index)
        return share


@torch.no_grad()
def group_gaussians(
    scene: SplatScene, codes: Float16[Tensor, "gaussians feat"], seen: Seen
) -> Int32[Tensor, " gaussians"]:
    """Groups Gaussians by their codes, by where they are and by which views see them; -1 for none."""
    shapes = scene.shapes()
    solid = (shapes.alphas.flatten() >= SOLID).cpu().numpy()
    return torch.from_numpy(seen.group(shapes.means.cpu().numpy(), codes.cpu().numpy(), solid)).to(codes.device)


@torch.no_grad()
def lift_maps(
    scene: SplatScene,
    views: PinholeCameras,
    dim: int,
    load: Callable[[int], FeatureMap],
    shares: Callable[[int], Float[Tensor, "h w"] | None] = lambda index: None,
    on_view: Callable[[], None] = lambda: None,
    on_weights: Callable[[int, Float[np.ndarray, " gaussians"]], None] = lambda view, weights: None,
) -> Float16[Tensor, "gaussians feat"]:
    """Lifts one feature.

    Args:
        shares: returns the weights of a view's pixels, 0 to 1; None for 1 everywhere.
        on_weights: called with the index of each view and Σ wᵢ(p) over its pixels.
    """
    means = scene.gaussians.means
    codes = torch.zeros(len(means), dim, dtype=torch.float16, device=means.device)
    weight = torch.zeros(len(means), device=means.device)
    step = channels_at_once(scene)
    for first in range(0, dim, step):
        part = slice(first, min(first + step, dim))
        sums = torch.zeros(len(means), part.stop - first, device=means.device)
        for index in range(len(views.viewmats)):
            added = add_view(scene, views.take(slice(index, index + 1)), load(index), part, shares(index), sums)
            if first == 0:
                weight += added
                on_weights(index, added.cpu().numpy())
            on_view()
        codes[:, part] = torch.where(weight[:, None] > 0, sums / weight[:, None], 0.0).half()
    return codes


def add_view(
    scene: SplatScene,
    view: PinholeCameras,
    feature_map: FeatureMap,
    part: slice,
    share: Float[Tensor, "h w"] | None,
    sums: Float[Tensor, "gaussians feat"],
) -> Float[Tensor, " gaussians"]:
    """Adds Σ wᵢ(p) f(p) over the pixels of a view to the sum of each Gaussian; returns Σ wᵢ(p).

    On the CPU, sums of patches are added (:mod:`f3rm_ext.splat.rasterize.patches`), elsewhere those of pixels.

    Args:
        part: channels of the features.
        share: weights of the pixels, 0 to 1; None for 1 everywhere.
        sums: changed in place.
    """
    if lifts_patches(scene):
        from f3rm_ext.splat.rasterize.patches import accumulate_patches

        features = torch.from_numpy(np.asarray(feature_map.values[..., part], dtype=np.float32))
        return accumulate_patches(scene.shapes(), scene.camera(view), features, feature_map.grid, share, sums)
    wanted = upsample(feature_map, part, view)
    wanted = torch.cat([wanted, torch.ones_like(wanted[..., :1])], dim=-1)
    if share is not None:
        wanted = wanted * share.to(wanted.device)[..., None]
    added = accumulate_pixels(scene, view, wanted)
    sums += added[:, :-1]
    return added[:, -1]


def lifts_patches(scene: SplatScene) -> bool:
    """Returns whether features are lifted patch by patch."""
    device = torch.device(kernel_device(scene.gaussians.means))
    return resolve_backend(scene.backend, device) == "numba" and not scene.sharded


def channels_at_once(scene: SplatScene) -> int:
    """Returns how many channels of a feature one pass over the views lifts."""
    return max(CHANNELS, SUMS_BYTES // (4 * len(scene.gaussians))) if lifts_patches(scene) else CHANNELS


def upsample(feature_map: FeatureMap, part: slice, view: PinholeCameras) -> Float[Tensor, "h w feat"]:
    """Interpolates channels of a feature map bilinearly at every pixel of its view, on the view's device."""
    height, width = int(view.heights[0]), int(view.widths[0])
    chosen = replace(feature_map, values=feature_map.values[..., part], residual_norm=None)
    packed = PackedMaps.pack([chosen], view.Ks.device)
    rows, cols = (torch.arange(side, device=view.Ks.device) + 0.5 for side in (height, width))
    centres_px = torch.stack(torch.meshgrid(rows, cols, indexing="ij"), dim=-1).view(-1, 2)
    slot = torch.zeros(len(centres_px), dtype=torch.int64, device=view.Ks.device)
    return packed.sample(slot, centres_px).view(height, width, -1)


def accumulate_pixels(
    scene: SplatScene, view: PinholeCameras, pixels: Float[Tensor, "h w channels"]
) -> Float[Tensor, "gaussians channels"]:
    """Computes Σ wᵢ(p) f(p) over the pixels of a view, for every Gaussian.

    Args:
        pixels: f, at the resolution of the view.
    """
    with torch.enable_grad():
        values = torch.zeros(len(scene.gaussians), pixels.shape[-1], device=pixels.device, requires_grad=True)
        picture = composite(scene, view, values)
        (sums,) = torch.autograd.grad(picture, values, pixels)
    return sums
