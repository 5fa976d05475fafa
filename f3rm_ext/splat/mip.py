"""Anti-aliasing of splats (Mip-Splatting, Yu et al. 2024): a filter in space and one on the screen.

The 3D filter gives every Gaussian the size below which no training camera could have seen it, so that looking from
nearer shows no spikes. The 2D filter (0.1 px², in place of the 0.3 px² that 3DGS dilates by, with opacity
compensated) stands for a pixel's own width, so that looking from farther does not make thin things fat.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.gaussians import Gaussians

ELEMENTS = 1 << 22
"""Gaussians × cameras at once: about 16 MiB per intermediate, of which there are eight."""
SMALLEST = 1e-30
"""Opacities are kept this far from 0 where their logits are made."""


@dataclass
class MipOptions:
    """Filters against aliasing; defaults are Mip-Splatting's."""

    filter_3d: bool = True
    """Smooth every Gaussian by what the training cameras could resolve."""
    filter_2d: bool = True
    """Use Mip-Splatting's pixel filter instead of 3DGS's dilation."""
    variance_3d: float = 0.2
    """Variance of the 3D filter in squared sampling intervals (depth / focal length), > 0."""
    near: float = 0.2
    """A camera sees Gaussians beyond this depth, scene units, > 0."""
    margin: float = 0.15
    """... whose centre projects into the image, or outside by at most this share of its width and height, ≥ 0."""
    every: int = 100
    """Steps between computations of the 3D filter while nothing is densified, ≥ 1."""
    freeze: int = 100
    """The 3D filter stays as it is in the last so many steps, ≥ 0."""
    eps2d_mip: float = 0.1
    """Variance of the 2D filter, px²; used with opacity compensated (the rasteriser's `antialiased`)."""
    eps2d_plain: float = 0.3
    """Variance of the dilation without the 2D filter, px²; opacity is not compensated."""

    def __post_init__(self) -> None:
        for name in ("variance_3d", "near", "eps2d_mip", "eps2d_plain"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"The mip filter's {name} is {getattr(self, name)}: use a number above 0.")
        if self.every < 1 or self.freeze < 0 or not self.margin >= 0:
            raise ConfigError(
                f"The mip filter's every is {self.every}, freeze {self.freeze} and margin {self.margin}: "
                "use at least 1, 0 and 0."
            )

    @property
    def eps2d(self) -> float:
        """Variance to hand to the rasteriser, px²."""
        return self.eps2d_mip if self.filter_2d else self.eps2d_plain

    @property
    def antialiased(self) -> bool:
        """Whether the rasteriser compensates opacity."""
        return self.filter_2d

    def due(self, step: int, total_steps: int, changed: bool = False) -> bool:
        """Whether the 3D filter is to be computed before a step: whenever Gaussians changed in number (also in the
        last steps, since it must fit), at step 0, and else every so many steps but the last ones."""
        if not self.filter_3d:
            return False
        return changed or step == 0 or (step % self.every == 0 and step < total_steps - self.freeze)


@torch.no_grad()
def sampling_intervals(
    means: Float[Tensor, "gaussians 3"],
    viewmats: Float[Tensor, "cams 4 4"],
    Ks: Float[Tensor, "cams 3 3"],
    widths: Int[Tensor, " cams"],
    heights: Int[Tensor, " cams"],
    *,
    near: float = 0.2,
    margin: float = 0.15,
) -> tuple[Float[Tensor, " gaussians"], Bool[Tensor, " gaussians"]]:
    """The finest sampling of each Gaussian: min over the cameras that see it of depth / focal length, scene units.

    The paper's eq. 7: each camera with its own focal length (the larger of fx and fy). Its published code takes the
    smallest depth and the largest focal length of all cameras, which is the same where all focal lengths are.

    Args:
        means: centres.
        viewmats: scene to camera, OpenCV axes.
        Ks: intrinsics in pixels.
        widths, heights: of the images, pixels.
        near: least depth at which a camera sees.
        margin: share of width and height by which a projection may miss the image.

    Returns:
        Intervals (infinite where no camera sees the Gaussian), and which ones are seen.
    """
    finest = torch.full_like(means[:, 0], torch.inf)
    if not len(viewmats) or not len(means):
        return finest, torch.isfinite(finest)
    focal = torch.maximum(Ks[:, 0, 0], Ks[:, 1, 1])
    widths, heights = widths.to(means), heights.to(means)
    # The first two rows of K [R | t]: what is left of the projection is to divide by the depth.
    rows = (Ks[:, :2, :, None] * viewmats[:, None, :3]).sum(2)
    low_x, high_x = -margin * widths, (1 + margin) * widths
    low_y, high_y = -margin * heights, (1 + margin) * heights
    for part in torch.arange(len(means), device=means.device).split(max(1, ELEMENTS // len(viewmats))):
        at = means[part]
        x, y, z = _affine(at, rows[:, 0]), _affine(at, rows[:, 1]), _affine(at, viewmats[:, 2])
        # Bounds are multiplied by the depth instead of the projection divided by it: z is positive where it counts.
        seen = (z > near) & (x >= low_x * z) & (x <= high_x * z) & (y >= low_y * z) & (y <= high_y * z)
        finest[part] = torch.where(seen, z / focal, torch.inf).amin(dim=1)
    return finest, torch.isfinite(finest)


def _affine(points: Tensor, rows: Tensor) -> Tensor:
    """Points (N, 3) times rows (C, 4), (N, C); not a matrix product, so that TF32 has no say."""
    total = points[:, :1] * rows[:, 0] + rows[:, 3]
    return total.addcmul_(points[:, 1:2], rows[:, 1]).addcmul_(points[:, 2:], rows[:, 2])


def smoothing_filter(
    means: Float[Tensor, "gaussians 3"],
    viewmats: Float[Tensor, "cams 4 4"],
    Ks: Float[Tensor, "cams 3 3"],
    widths: Int[Tensor, " cams"],
    heights: Int[Tensor, " cams"],
    options: MipOptions | None = None,
) -> Float[Tensor, " gaussians"]:
    """Standard deviations of the 3D filter, σ_f = √variance · depth / focal length, scene units; no gradient.

    Gaussians that no camera sees get the largest value of those seen; 0 (no filter) where none is seen at all.
    """
    options = options or MipOptions()
    finest, seen = sampling_intervals(means, viewmats, Ks, widths, heights, near=options.near, margin=options.margin)
    largest = finest[seen].max() if bool(seen.any()) else finest.new_zeros(())
    return options.variance_3d**0.5 * torch.where(seen, finest, largest)


def smooth(
    sizes: Float[Tensor, "gaussians 3"],
    alphas: Float[Tensor, " gaussians"],
    filter_3d: Float[Tensor, " gaussians"],
) -> tuple[Float[Tensor, "gaussians 3"], Float[Tensor, " gaussians"]]:
    """Sizes and opacities with the 3D filter: s' = √(s² + σ²), α' = α Π s / s' (the integral stays); differentiable.

    Args:
        sizes: standard deviations, scene units.
        alphas: opacities, 0 to 1.
        filter_3d: σ of :func:`smoothing_filter`.
    """
    wide = torch.hypot(sizes, filter_3d[:, None].expand_as(sizes))
    return wide, alphas * (sizes / wide).prod(dim=1)


def fuse(gaussians: Gaussians, filter_3d: Float[Tensor, " gaussians"]) -> Gaussians:
    """Gaussians with the 3D filter baked in, for export; what reads them must not filter again."""
    sizes, filters = gaussians.sizes().double(), filter_3d.double()
    wide, alphas = smooth(sizes, gaussians.opacities.double().sigmoid().squeeze(-1), filters)
    return _with(gaussians, wide.log(), alphas)


def unfuse(gaussians: Gaussians, filter_3d: Float[Tensor, " gaussians"]) -> Gaussians:
    """What :func:`fuse` was given, up to rounding.

    Raises:
        ConfigError: if a Gaussian is not larger than its filter, so that they cannot have been fused.
    """
    wide, filters = gaussians.sizes().double(), filter_3d.double()[:, None]
    left = wide.square() - filters.square()
    if not bool((left > 0).all()):
        raise ConfigError(
            f"{int((~(left > 0)).any(dim=1).sum())} Gaussians are not larger than the 3D filter that is to be taken "
            "out of them, so it cannot have been fused into them: open the splats as unfused ones."
        )
    sizes = left.sqrt()
    alphas = gaussians.opacities.double().sigmoid().squeeze(-1) * (wide / sizes).prod(dim=1)
    return _with(gaussians, sizes.log(), alphas)


def _with(gaussians: Gaussians, scales: Tensor, alphas: Tensor) -> Gaussians:
    opacities = torch.logit(alphas.clamp(SMALLEST, 1 - 1e-12))[:, None]
    return replace(gaussians, scales=scales.to(gaussians.scales), opacities=opacities.to(gaussians.opacities))
