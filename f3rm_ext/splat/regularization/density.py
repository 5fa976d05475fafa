"""The density loss, which compares the density with that of flat, opaque Gaussians on a surface; the normal loss."""

from jaxtyping import Float
from torch import Tensor

from f3rm_ext.splat.regularization.field import NeighbourField
from f3rm_ext.splat.regularization.table import MAX_SQUARED


def heights(points: Float[Tensor, "points 3"], field: NeighbourField) -> Float[Tensor, " points"]:
    """Computes f̂ = ⟨p − μ_g, n_g⟩: signed distances of points from the planes of their own Gaussians, scene units."""
    return ((points - field.center) * field.normal).sum(1)


def ideal_density(distance: Float[Tensor, " points"], beta: Float[Tensor, " points"]) -> Float[Tensor, " points"]:
    """Computes exp(−½ f̂² / β²): the density of opaque, flat Gaussians of thickness β at a distance f̂."""
    return (-0.5 * (distance / beta).square().clamp(max=MAX_SQUARED)).exp()


def density_loss(points: Float[Tensor, "points 3"], field: NeighbourField) -> Float[Tensor, ""]:
    """Computes mean |d(p) − exp(−½ f̂² / β²)| (SuGaR §4.1); d is not clamped. 0 if there are no points."""
    error = (field.density - ideal_density(heights(points, field), field.beta)).abs()
    return error.sum() / max(1, len(points))


def normal_loss(field: NeighbourField) -> Float[Tensor, ""]:
    """Computes mean ‖n_g − n(p)‖² of a Gaussian's normal and the direction of its neighbours; 0 if there are no points.

    Gradients flow to the normals of the Gaussian and its neighbours. Signs do not matter, since neighbours are aligned.
    """
    return (field.normal - field.direction).square().sum() / max(1, len(field.normal))
