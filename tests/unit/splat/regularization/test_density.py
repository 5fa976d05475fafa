"""The density and normal losses by hand, and what an optimiser makes of them."""

import math
from collections.abc import Callable

import pytest
import torch

from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.regularization.field import NeighbourField, neighbour_field
from f3rm_ext.splat.regularization.neighbours import nearest_neighbours
from f3rm_ext.splat.regularization.sdf import density_loss, normal_loss
from f3rm_ext.splat.regularization.table import gaussian_table


def field_of(
    density: list[float], beta: list[float], direction: list[list[float]], center: tuple[float, float, float]
) -> NeighbourField:
    """Of points whose own Gaussian lies flat at a centre."""
    own = (torch.tensor([values] * len(density)) for values in (center, (0.0, 0.0, 1.0)))
    return NeighbourField(torch.tensor(density), torch.tensor(beta), torch.tensor(direction), *own)


def test_density_loss_by_hand() -> None:
    points = torch.tensor([[0.0, 0.0, 10.1], [0.0, 0.0, 10.0]])
    field = field_of([0.5, 1.7], [0.1, 0.1], [[0.0, 0.0, 1.0]] * 2, center=(0.0, 0.0, 10.0))
    expected = (abs(0.5 - math.exp(-0.5)) + abs(1.7 - 1)) / 2
    assert float(density_loss(points, field)) == pytest.approx(expected, abs=1e-5)


def test_normal_loss_by_hand() -> None:
    field = field_of([1.0, 1.0], [0.1, 0.1], [[0.0, 0.6, 0.8], [0.0, 0.0, 1.0]], center=(0.0, 0.0, 0.0))
    assert float(normal_loss(field)) == pytest.approx((0.36 + 0.04) / 2, abs=1e-6)


def test_ideal_density_of_vanishing_thickness_is_finite() -> None:
    points = torch.tensor([[0.0, 0, 0], [0, 0, 1e-3], [0, 0, 1e6]], requires_grad=True)
    field = field_of([0.0] * 3, [1e-9] * 3, [[0.0, 0.0, 1.0]] * 3, center=(0.0, 0.0, 0.0))
    field.beta.requires_grad_()
    loss = density_loss(points, field)
    assert float(loss) == pytest.approx(1 / 3)
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(loss, (points, field.beta)))


def test_no_points_cost_nothing() -> None:
    empty = NeighbourField(torch.zeros(0), torch.zeros(0), *(torch.zeros(0, 3) for _ in range(3)))
    assert float(density_loss(torch.zeros(0, 3), empty)) == 0
    assert float(normal_loss(empty)) == 0


def test_heights_are_along_the_smallest_axis(wall: Callable[..., Gaussians]) -> None:
    gaussians = wall(side=3)
    neighbours = nearest_neighbours(gaussians.means, 4)
    points = torch.tensor([[5.0, -7.0, 10.25], [0.0, 0.0, 9.5]])
    field = neighbour_field(points, torch.tensor([0, 8]), gaussian_table(gaussians), neighbours)
    found = ((points - field.center) * field.normal).sum(1)
    assert torch.allclose(found.abs(), torch.tensor([0.25, 0.5])) and found[0] * found[1] < 0
