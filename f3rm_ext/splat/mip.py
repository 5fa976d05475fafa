"""Anti-aliasing of splats (Mip-Splatting, Yu et al. 2024): a filter in space and a filter in the image.

The 3D filter widens every Gaussian to the smallest size that any training camera could resolve, so views from nearer
show no spikes. The 2D filter stands for the width of a pixel: 0.1 px² with compensated opacity, in place of 3DGS's
dilation by 0.3 px². With it, views from farther away do not make thin things fat.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.utils.ranges import Count, Positive, Range, check_ranges

ELEMENTS = 1 << 22
"""Gaussians × cameras per chunk: about 16 MiB for each of eight intermediates."""
SMALLEST = 1e-30
"""Lower bound of opacities before taking their logits."""


@dataclass
class MipOptions:
    """Anti-aliasing filters. Defaults are those of Mip-Splatting."""

    filter_3d: bool = True
    """Apply the 3D filter: widen Gaussians to what the training cameras could resolve."""
    filter_2d: bool = True
    """Apply Mip-Splatting's 2D filter instead of 3DGS's dilation."""
    variance_3d: Positive = 0.2
    """Variance of the 3D filter, in squared sampling intervals (depth / focal length), > 0."""
    compensation: Literal["auto", "volume", "area"] = "auto"
    """How the 3D filter lowers opacities. volume keeps the integral over space, as Mip-Splatting does; thin discs turn
    transparent. area ignores the thinnest side. auto is area for planar, else volume."""
    near: Positive = 0.2
    """Depth from which a camera sees a Gaussian, scene units, > 0."""
    margin: Annotated[float, Range(0)] = 0.15
    """A camera sees a Gaussian whose centre projects into the image or at most this far outside it, as a share of
    the image's width and height, ≥ 0."""
    every: Count = 100
    """Steps between updates of the 3D filter while the number of Gaussians stays the same, ≥ 1."""
    freeze: Annotated[int, Range(0)] = 100
    """Number of final steps in which the 3D filter is not updated, ≥ 0."""
    eps2d_mip: Positive = 0.1
    """Variance of the 2D filter, px², > 0. Opacities are compensated (gsplat's `antialiased`)."""
    eps2d_plain: Positive = 0.3
    """Variance of the dilation used without the 2D filter, px², > 0. Opacities are not compensated."""

    def __post_init__(self) -> None:
        check_ranges(self, "pipeline.model.mip.")

    def resolve(self, flat: bool) -> "MipOptions":
        """Returns the options with ``auto`` decided."""
        if self.compensation != "auto":
            return self
        return replace(self, compensation="area" if flat else "volume")

    @property
    def area(self) -> bool:
        """Whether the 3D filter leaves the thinnest side out of its compensation."""
        return self.compensation == "area"

    @property
    def eps2d(self) -> float:
        """Variance that the rasteriser adds, px²."""
        return self.eps2d_mip if self.filter_2d else self.eps2d_plain

    def due(self, step: int, total_steps: int, changed: bool = False) -> bool:
        """Returns whether to compute the 3D filter before a step.

        It is computed at step 0, whenever the set of Gaussians changed, and otherwise every :attr:`every` steps up to
        the last :attr:`freeze` ones.
        """
        regular = step == 0 or (step % self.every == 0 and step < total_steps - self.freeze)
        return self.filter_3d and (changed or regular)


@torch.no_grad()
def sampling_intervals(
    means: Float[Tensor, "gaussians 3"],
    views: PinholeCameras,
    *,
    near: float = 0.2,
    margin: float = 0.15,
) -> tuple[Float[Tensor, " gaussians"], Bool[Tensor, " gaussians"]]:
    """Computes the finest sampling interval of each Gaussian: the least depth / focal length over cameras that see it.

    This is eq. 7 of the paper, with each camera's own focal length (the larger of fx and fy). The published code
    combines the smallest depth with the largest focal length of all cameras; the two agree if all focal lengths do.

    Args:
        near: depth from which a camera sees, scene units.
        margin: share of width and height by which a projection may miss the image.

    Returns:
        Intervals, scene units (infinite where no camera sees the Gaussian), and which Gaussians are seen.
    """
    finest, (viewmats, Ks) = torch.full_like(means[:, 0], torch.inf), views[:2]
    if not len(viewmats) or not len(means):
        return finest, torch.isfinite(finest)
    focal = torch.maximum(Ks[:, 0, 0], Ks[:, 1, 1])
    widths, heights = views.widths.to(means), views.heights.to(means)
    # The first two rows of K [R | t], which project up to the division by depth.
    rows = (Ks[:, :2, :, None] * viewmats[:, None, :3]).sum(2)
    low_x, high_x = -margin * widths, (1 + margin) * widths
    low_y, high_y = -margin * heights, (1 + margin) * heights
    for part in torch.arange(len(means), device=means.device).split(max(1, ELEMENTS // len(viewmats))):
        centres = means[part]
        x, y, z = _affine(centres, rows[:, 0]), _affine(centres, rows[:, 1]), _affine(centres, viewmats[:, 2])
        # Multiplies the bounds by the depth instead of dividing the projection: z is positive wherever it matters.
        seen = (z > near) & (x >= low_x * z) & (x <= high_x * z) & (y >= low_y * z) & (y <= high_y * z)
        finest[part] = torch.where(seen, z / focal, torch.inf).amin(dim=1)
    return finest, torch.isfinite(finest)


def _affine(points: Tensor, rows: Tensor) -> Tensor:
    """Multiplies points (N, 3) by rows (C, 4) to (N, C); not as a matrix product, which TF32 would round."""
    total = points[:, :1] * rows[:, 0] + rows[:, 3]
    return total.addcmul_(points[:, 1:2], rows[:, 1]).addcmul_(points[:, 2:], rows[:, 2])


def smoothing_filter(
    means: Float[Tensor, "gaussians 3"], views: PinholeCameras, options: MipOptions | None = None
) -> Float[Tensor, " gaussians"]:
    """Computes standard deviations of the 3D filter, σ = √variance · depth / focal length, scene units; no gradient.

    Gaussians that no camera sees get the largest value of the others. If no Gaussian is seen, all get 0 (no filter).
    """
    options = options or MipOptions()
    finest, seen = sampling_intervals(means, views, near=options.near, margin=options.margin)
    # Nothing here reads a value back, for which the host would wait for a GPU.
    largest = torch.where(seen, finest, 0).max() if len(finest) else finest.new_zeros(())
    return options.variance_3d**0.5 * torch.where(seen, finest, largest)


def smooth(
    sizes: Float[Tensor, "gaussians 3"],
    alphas: Float[Tensor, " gaussians"],
    filter_3d: Float[Tensor, " gaussians"],
    area: bool = False,
) -> tuple[Float[Tensor, "gaussians 3"], Float[Tensor, " gaussians"]]:
    """Applies the 3D filter: s' = √(s² + σ²), α' = α Π s / s'; differentiable.

    The product over all three sides preserves the integral over space, as in Mip-Splatting. A disc of thickness 0 is
    then transparent, although a view that faces it sees it as before. The product over the two longer sides (`area`)
    preserves the integral over the disc.
    """
    wide = torch.hypot(sizes, filter_3d[:, None].expand_as(sizes))
    return wide, alphas * _shares(sizes / wide, area)


def _shares(ratios: Float[Tensor, "gaussians 3"], area: bool) -> Float[Tensor, " gaussians"]:
    """Returns the product of s / s' over all sides or over the two longer ones, which have the larger ratios."""
    if not area:
        return ratios.prod(dim=1)
    x, y, z = ratios.unbind(dim=1)
    return torch.maximum(torch.maximum(x * y, y * z), z * x)


def fuse(gaussians: Gaussians, filter_3d: Float[Tensor, " gaussians"], area: bool = False) -> Gaussians:
    """Bakes the 3D filter into the Gaussians, for export; see :func:`smooth`. Readers must not apply it again."""
    sizes, filters = gaussians.sizes().double(), filter_3d.double()
    wide, alphas = smooth(sizes, gaussians.opacities.double().sigmoid().squeeze(-1), filters, area)
    return _replace_shapes(gaussians, wide.log(), alphas)


def unfuse(gaussians: Gaussians, filter_3d: Float[Tensor, " gaussians"], area: bool = False) -> Gaussians:
    """Reverses :func:`fuse`, up to rounding.

    Raises:
        ConfigError: a Gaussian is not larger than its filter, so it cannot have been fused with it.
    """
    wide, filters = gaussians.sizes().double(), filter_3d.double()[:, None]
    left = wide.square() - filters.square()
    if not bool((left > 0).all()):
        raise ConfigError(
            f"{int((~(left > 0)).any(dim=1).sum())} Gaussians are not larger than the 3D filter to remove from them, "
            "so it cannot have been fused into them: open the splats as unfused ones."
        )
    sizes = left.sqrt()
    alphas = gaussians.opacities.double().sigmoid().squeeze(-1) / _shares(sizes / wide, area)
    return _replace_shapes(gaussians, sizes.log(), alphas)


def _replace_shapes(gaussians: Gaussians, scales: Tensor, alphas: Tensor) -> Gaussians:
    opacities = torch.logit(alphas.clamp(SMALLEST, 1 - 1e-12))[:, None]
    return replace(gaussians, scales=scales.to(gaussians.scales), opacities=opacities.to(gaussians.opacities))
