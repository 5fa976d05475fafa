"""Random points near the Gaussians, at which the surface losses are evaluated."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from f3rm_ext.splat.gaussians import Gaussians, quats_to_rotations
from f3rm_ext.splat.regularization.frames import rotate


def draw_owners(
    visible: Bool[Tensor, " gaussians"], count: int, generator: torch.Generator | None = None
) -> Int[Tensor, " points"]:
    """Samples visible Gaussians uniformly with replacement; returns none if none is visible.

    Indices are ascending, so that memory access is local. Random numbers are drawn on the generator's own device, so
    a generator gives the same sample on every device.
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
    spread: float = 1.5,
    generator: torch.Generator | None = None,
) -> tuple[Float[Tensor, "points 3"], Int[Tensor, " points"]]:
    """Samples points p = μ + R (spread · s ⊙ ε), ε ~ N(0, I), of uniformly chosen Gaussians (SuGaR §4.1).

    Args:
        gaussians: all Gaussians; only means, quats and scales are read.
        count: number of points; there are none if no Gaussian is visible.

    Returns:
        The points, part of the graph of means, rotations and sizes, and the index of each one's Gaussian, int64.
    """
    owners = draw_owners(visible, count, generator)
    # index_select: its gradient is far cheaper than that of indexing.
    means, quats, scales = (
        value.index_select(0, owners) for value in (gaussians.means, gaussians.quats, gaussians.scales)
    )
    place = means.device if generator is None else generator.device
    noise = torch.randn(len(owners), 3, generator=generator, device=place, dtype=means.dtype).to(means.device)
    return means + rotate(spread * scales.exp() * noise, quats_to_rotations(quats)), owners
