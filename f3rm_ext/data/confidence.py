"""How well the photos fix the place of a point.

A view fixes a point across its ray, and says nothing along it. So the views that see a point, in unit directions dᵢ,
add up to the information A = Σ wᵢ (I − dᵢ dᵢᵀ), the normal matrix of triangulating it from rays. With an error of one
across each ray, and of one in every direction before the first view, its covariance is U = (A + I)⁻¹. The confidence is
what the views have taken from the largest variance (E-optimality; Pukelsheim, Optimal Design of Experiments, 1993):
c = 1 − λ_max(U) = λ / (1 + λ), λ the smallest eigenvalue of A. One view, or many from one direction, give 0; two at
right angles give ½.

The weight wᵢ is how well the depth that view i shows agrees with the point: 1 where they are equal, falling to 0 where
they differ by a tenth.
"""

import torch
from jaxtyping import Float
from torch import Tensor

TOLERANCE = 0.1
"""A point agrees with the depth of a view if it differs by at most this share of it."""


def agreement(depths: Float[Tensor, " points"], shown: Float[Tensor, " points"]) -> Float[Tensor, " points"]:
    """Returns how well points agree with the depth of a view, 0 to 1.

    Args:
        depths: of the points, along the axis of the camera.
        shown: what the view shows where they are; 0 where it shows nothing, or where they are not in the picture.

    >>> agreement(torch.tensor([2.0, 2.1, 3.0, 2.0]), torch.tensor([2.0, 2.0, 2.0, 0.0])).round(decimals=3).tolist()
    [1.0, 0.5, 0.0, 0.0]
    """
    weights = 1 - (depths - shown).abs() / (TOLERANCE * shown).clamp_min(1e-12)
    return torch.where(shown > 0, weights.clamp_min(0), 0)


def ray_information(
    directions: Float[Tensor, "*points 3"], weights: Float[Tensor, "*points"]
) -> Float[Tensor, "*points 3 3"]:
    """Returns what one view says of each point: w (I − d dᵀ), where d, of length 1, points from the camera to it."""
    across = torch.eye(3).to(directions) - directions[..., :, None] * directions[..., None, :]
    return weights[..., None, None] * across


def confidence(information: Float[Tensor, "*points 3 3"]) -> Float[Tensor, "*points"]:
    """Returns how well views fix points, 0 to 1, by the sum of what they say.

    >>> ways = torch.eye(3)[:2]  # from two sides, at right angles
    >>> float(confidence(ray_information(ways, torch.ones(2)).sum(dim=0)))
    0.5
    """
    least = torch.linalg.eigvalsh(information)[..., 0].clamp_min(0)
    return least / (1 + least)


def uncertainty(information: Float[Tensor, "*points 3 3"]) -> Float[Tensor, "*points"]:
    """Returns the mean variance that views leave to points, tr(A + I)⁻¹ / 3, 1 where no view says anything.

    Unlike the confidence it falls with the first view already, so it says what further views are worth (A-optimality).

    >>> round(float(uncertainty(ray_information(torch.eye(3)[0], torch.ones(())))), 4)  # two of the variances halve
    0.6667
    """
    a, b, c = (information[..., i, i] + 1 for i in range(3))
    d, e, f = information[..., 0, 1], information[..., 0, 2], information[..., 1, 2]
    minors = (b * c - f * f) + (a * c - e * e) + (a * b - d * d)
    return minors / (a * (b * c - f * f) - d * (d * c - f * e) + e * (d * f - b * e)) / 3
