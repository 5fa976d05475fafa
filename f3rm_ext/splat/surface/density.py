"""The density loss: density should be that of flat, opaque Gaussians on a surface; and the normal loss."""

from jaxtyping import Float
from torch import Tensor

from f3rm_ext.splat.surface.field import MAX_SQUARED, NeighbourField


def heights(points: Float[Tensor, "points 3"], field: NeighbourField) -> Float[Tensor, " points"]:
    """f̂ = ⟨p − μ_g, n_g⟩: signed distances of points from the planes of their own Gaussians, scene units."""
    return ((points - field.center) * field.normal).sum(1)


def ideal_density(distance: Float[Tensor, " points"], beta: Float[Tensor, " points"]) -> Float[Tensor, " points"]:
    """exp(−½ f̂² / β²): the density of opaque, flat Gaussians of thickness β at a distance f̂ from their surface."""
    return (-0.5 * (distance / beta).square().clamp(max=MAX_SQUARED)).exp()


def density_loss(points: Float[Tensor, "points 3"], field: NeighbourField) -> Float[Tensor, ""]:
    """mean |d(p) − exp(−½ f̂² / β²)| (SuGaR §4.1); d is not clamped. 0 where there are no points.

    Args:
        points: in the scene.
        field: the neighbours' field at the points.
    """
    error = (field.density - ideal_density(heights(points, field), field.beta)).abs()
    return error.sum() / max(1, len(points))


def normal_loss(field: NeighbourField) -> Float[Tensor, ""]:
    """mean ‖n_g − n(p)‖² of a Gaussian's own axis and the direction its neighbours give; 0 where there are no points.

    Gradients flow to the own axis and to those of the neighbours; signs do not matter, since neighbours are aligned.
    """
    return (field.normal - field.direction).square().sum() / max(1, len(field.normal))
