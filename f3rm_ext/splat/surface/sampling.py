"""Points near the Gaussians, at which the density is compared with that of an ideal surface."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from f3rm_ext.splat.gaussians import Gaussians, quats_to_rotations
from f3rm_ext.splat.surface.frames import rotate

SPREAD = 1.5


class SurfaceSamples(NamedTuple):
    """Points and the Gaussians they were drawn from."""

    points: Float[Tensor, "points 3"]
    """In the frame of the scene; part of the graph of means, rotations and sizes."""
    owners: Int[Tensor, " points"]
    """int64 index of each point's Gaussian."""


def draw_owners(
    visible: Bool[Tensor, " gaussians"], count: int, generator: torch.Generator | None = None
) -> Int[Tensor, " points"]:
    """Gaussians drawn with replacement, every visible one as likely as any other; none where none is visible.

    They come in ascending order, so that what belongs to them lies together in memory. Numbers come from the
    generator's own device, so that one generator gives the same draw on every device.
    """
    candidates = visible.nonzero().squeeze(1)
    if not len(candidates):
        return candidates
    place = visible.device if generator is None else generator.device
    drawn = torch.randint(len(candidates), (count,), generator=generator, device=place)
    return candidates[drawn.to(visible.device).sort().values]


def sample_points(
    gaussians: Gaussians,
    visible: Bool[Tensor, " gaussians"],
    count: int,
    *,
    spread: float = SPREAD,
    generator: torch.Generator | None = None,
) -> SurfaceSamples:
    """Points p = μ + R (spread · s ⊙ ε), ε ~ N(0, I), of Gaussians drawn uniformly (not by volume) (SuGaR §4.1).

    Args:
        gaussians: all of them; only means, quats and scales are read.
        visible: Gaussians to draw from.
        count: number of points; there are none where no Gaussian is visible.
        spread: standard deviation of the points in units of the Gaussian's own.
        generator: of Gaussians and offsets.
    """
    owners = draw_owners(visible, count, generator)
    # index_select: its gradient is far cheaper than that of indexing.
    means, quats, scales = (
        value.index_select(0, owners) for value in (gaussians.means, gaussians.quats, gaussians.scales)
    )
    place = means.device if generator is None else generator.device
    noise = torch.randn(len(owners), 3, generator=generator, device=place, dtype=means.dtype).to(means.device)
    return SurfaceSamples(means + rotate(spread * scales.exp() * noise, quats_to_rotations(quats)), owners)
