"""Maps from the scene frame to the unit cube that the hash grids cover, and the spacing of samples that fits them."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from nerfstudio.model_components.ray_samplers import SpacedSampler
from torch import Tensor


def measure_reach_factor(metadata: Mapping[str, Any]) -> float:
    """Measures the scene's extent in extents of its cameras, 1 or more, by ``measure_reach_factor`` in the metadata of
    the training photos, which is there in training."""
    return metadata.get("measure_reach_factor", lambda: 1.0)()


def contract_to_unit_cube(positions: Float[Tensor, "*batch 3"], radius: float = 1.0) -> Float[Tensor, "*batch 3"]:
    """Maps all of space into [0, 1]³: identity inside the ±radius box, contraction outside, then (x + 2) / 4.

    The contraction is that of mip-NeRF 360 (Barron et al. 2022, eq. 10) in the maximum norm: x ↦ (2 − 1/‖x‖) x/‖x‖
    for ‖x‖ > 1, where x is in units of the radius.

    Args:
        positions: scene frame; cameras lie within about ±1.
        radius: half the side of the box, scene units.

    >>> import torch
    >>> contract_to_unit_cube(torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, 0.0], [1e6, 0.0, 0.0]])).tolist()
    [[0.75, 0.5, 0.25], [0.875, 0.5, 0.5], [0.9999997615814209, 0.5, 0.5]]
    """
    inverse = positions.abs().amax(dim=-1, keepdim=True).clamp(min=radius).reciprocal()
    return positions * ((2.0 - radius * inverse) * inverse * 0.25) + 0.5


def box_to_unit_cube(
    positions: Float[Tensor, "*batch 3"], aabb: Float[Tensor, "2 3"]
) -> tuple[Float[Tensor, "*batch 3"], Float[Tensor, "*batch 1"]]:
    """Maps a box linearly to [0, 1]³, for bounded scenes.

    Args:
        positions: scene frame.
        aabb: corners (minimum, maximum) of the box.

    Returns:
        Positions clamped to the cube, and 1 for positions inside the box, 0 for those outside.

    >>> import torch
    >>> aabb = torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 3.0]])
    >>> unit, inside = box_to_unit_cube(torch.tensor([[-1.0, 0.5, 3.0], [3.0, 0.0, 0.0]]), aabb)
    >>> unit.tolist(), inside.tolist()
    ([[0.0, 0.75, 1.0], [1.0, 0.5, 0.25]], [[1.0], [0.0]])
    """
    unit = (positions - aabb[0]) / (aabb[1] - aabb[0])
    inside = ((unit >= 0.0) & (unit <= 1.0)).all(dim=-1, keepdim=True)
    return unit.clamp(0.0, 1.0), inside.to(positions.dtype)


def piecewise_sampler(radius: float) -> SpacedSampler:
    """Returns nerfacto's first sampler: half of the samples are at equal distances up to the radius, the others beyond
    it at equal steps of disparity.

    Args:
        radius: scene units.
    """
    return SpacedSampler(
        num_samples=None,
        spacing_fn=lambda x: torch.where(x < radius, x / (2 * radius), 1 - radius / (2 * x)),
        spacing_fn_inv=lambda x: torch.where(x < 0.5, 2 * radius * x, radius / (2 - 2 * x)),
        single_jitter=True,
    )
