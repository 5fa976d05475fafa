"""The sdf loss: looking up depth, Gaussians near it, distances from densities, and hand-computed values."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.regularization.field import NeighbourField, neighbour_field
from f3rm_ext.splat.regularization.frames import to_camera
from f3rm_ext.splat.regularization.multiview import DepthView
from f3rm_ext.splat.regularization.neighbours import nearest_neighbours
from f3rm_ext.splat.regularization.sdf import (
    MAX_DENSITY,
    implied_distance,
    look_up,
    near_depth,
    sdf_loss,
    view_deviations,
)
from f3rm_ext.splat.regularization.table import gaussian_table


def picture(h: int, w: int, seed: int = 0) -> Tensor:
    return torch.rand(h, w, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(image: np.ndarray, x: float, y: float) -> float:
    """Bilinear lookup at pixel coordinates whose pixel centres are at +½, border repeated."""
    h, w = image.shape
    u, v = min(max(x - 0.5, 0), w - 1), min(max(y - 0.5, 0), h - 1)
    left, top = min(int(u), w - 2), min(int(v), h - 2)
    a, b = u - left, v - top
    upper = (1 - a) * image[top, left] + a * image[top, left + 1]
    lower = (1 - a) * image[top + 1, left] + a * image[top + 1, left + 1]
    return (1 - b) * upper + b * lower


Camera = Callable[..., tuple[Tensor, Tensor]]


def test_look_up_against_loops(camera: Camera) -> None:
    _, K = camera(8, 6, focal=5.0, dtype=torch.float64)
    image = picture(6, 8)
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    points[:, 2] += 1.0
    values, usable = look_up(image, points, K)
    seen = 0
    for point, value, use in zip(points.tolist(), values.tolist(), usable.tolist(), strict=True):
        x, y = 5 * point[0] / point[2] + 4, 5 * point[1] / point[2] + 3
        assert use == (point[2] > 0.01 and 0 <= x <= 8 and 0 <= y <= 6)
        assert value == pytest.approx(by_definition(image.numpy(), x, y) if use else 0.0, abs=1e-12)
        seen += use
    assert 40 < seen < 160


def test_pixels_that_are_not_finite_spoil_only_their_lookups(camera: Camera) -> None:
    _, K = camera(8, 6, focal=5.0, dtype=torch.float64)
    image = picture(6, 8)
    image[2, 3] = torch.nan
    image.requires_grad_()
    x = torch.tensor([3.2, 4.3, 4.6, 6.0], dtype=torch.float64)  # the pixel's lookups span x from 2.5 to 4.5
    points = torch.stack([(x - 4) / 5, torch.full_like(x, (2.5 - 3) / 5), torch.ones_like(x)], dim=1)
    values, usable = look_up(image, points, K)
    assert usable.tolist() == [False, False, True, True]
    values.sum().backward()
    assert image.grad is not None and torch.isfinite(image.grad).all() and torch.isfinite(values).all()


def test_deviation_along_the_view(random_gaussians: Callable[..., Gaussians]) -> None:
    gaussians = random_gaussians(20)
    viewmat = torch.eye(4, dtype=torch.float64)
    angle = 0.4
    viewmat[0, 0] = viewmat[2, 2] = math.cos(angle)
    viewmat[0, 2], viewmat[2, 0] = math.sin(angle), -math.sin(angle)
    viewmat[:3, 3] = torch.tensor([0.3, -0.2, 4.0])
    found = view_deviations(gaussians.means, gaussians.rotations(), gaussians.sizes(), viewmat)
    position = np.linalg.inv(viewmat.numpy())[:3, 3]
    for i in range(20):
        rotation, size = gaussians.rotations()[i].numpy(), gaussians.sizes()[i].numpy()
        ray = gaussians.means[i].numpy() - position
        ray /= np.linalg.norm(ray)
        assert float(found[i]) == pytest.approx(math.sqrt(ray @ rotation @ np.diag(size**2) @ rotation.T @ ray))


@pytest.mark.parametrize(("shift", "near"), [(0.0, True), (0.09, True), (0.11, False), (-0.09, True), (-0.11, False)])
def test_two_deviations_from_the_depth_map(
    shift: float, near: bool, wall: Callable[..., Gaussians], camera: Camera
) -> None:
    gaussians = wall(side=1, thickness=0.05)
    viewmat, K = camera()
    view = DepthView(torch.full((30, 40), 10 + shift), viewmat, K)
    assert near_depth(gaussians, torch.tensor([True]), view).tolist() == [near]
    assert not near_depth(gaussians, torch.tensor([False]), view).any()


def test_distance_is_the_inverse_of_the_ideal_density() -> None:
    distance = torch.tensor([0.1, 0.5, 1.0, 3.0], dtype=torch.float64)
    beta = torch.tensor([0.2, 0.5, 0.4, 1.0], dtype=torch.float64)
    density = torch.exp(-0.5 * (distance / beta) ** 2)
    assert torch.allclose(implied_distance(density, beta), distance)
    assert torch.autograd.gradcheck(implied_distance, (density.requires_grad_(), beta.requires_grad_()))


def test_densities_above_one_are_on_the_surface_and_feel_the_loss() -> None:
    density = torch.tensor([1.0, 1.5, 4.0, 0.0], requires_grad=True)
    beta = torch.full((4,), 0.5)
    found = implied_distance(density, beta)
    least = 0.5 * math.sqrt(-2 * math.log(MAX_DENSITY))
    assert found[:3].tolist() == pytest.approx([least] * 3, rel=1e-3)
    assert float(found[3]) == pytest.approx(0.5 * math.sqrt(2 * 16 * math.log(10)), rel=1e-4)
    found.sum().backward()
    slope = -0.5 / math.sqrt(-2 * math.log(MAX_DENSITY)) / MAX_DENSITY
    # The slope at the cap, times 1 / d of the division by the detached density.
    assert density.grad is not None
    assert density.grad[:3].tolist() == pytest.approx([slope, slope / 1.5, slope / 4], rel=1e-3)
    assert density.grad[3] == 0


@pytest.fixture
def lone(wall: Callable[..., Gaussians]) -> tuple[Tensor, NeighbourField]:
    """One opaque Gaussian at z = 10, 0.05 thick, and its field two deviations behind it on the axis."""
    gaussians = wall(side=1, thickness=0.05, alpha=1 - 1e-6)
    points = torch.tensor([[0.0, 0.0, 10.1]])
    owners = torch.tensor([0])
    table = gaussian_table(gaussians)
    return points, neighbour_field(points, owners, table, nearest_neighbours(gaussians.means, 16))


@pytest.mark.parametrize(("z_map", "extent", "expected"), [(10.3, 2.0, 0.5), (10.2, 2.0, 0.0), (10.3, 1e-3, 0.01)])
def test_loss_by_hand(
    z_map: float, extent: float, expected: float, lone: tuple[Tensor, NeighbourField], camera: Camera
) -> None:
    """f = 0.1; f̂ = z_map − 10.1; the error counts 1 per tenth of the extent and at most ten times the extent."""
    viewmat, K = camera()
    loss = sdf_loss(*lone, DepthView(torch.full((30, 40), z_map), viewmat, K), extent)
    assert float(loss) == pytest.approx(expected, abs=1e-3)


def test_loss_has_the_gradients_of_its_value(camera: Camera) -> None:
    viewmat, K = camera(8, 6, focal=5.0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    points = torch.randn(10, 3, generator=generator, dtype=torch.float64) * 0.3
    points[:, 2] += 2
    density = 0.1 + 0.8 * torch.rand(10, generator=generator, dtype=torch.float64)
    beta = 0.1 + torch.rand(10, generator=generator, dtype=torch.float64)

    def loss(points: Tensor, density: Tensor, beta: Tensor, depth: Tensor) -> Tensor:
        field = NeighbourField(density, beta, points, points, points)
        return sdf_loss(points, field, DepthView(depth, viewmat, K), 1.5)

    inputs = [value.requires_grad_() for value in (points, density, beta, 1.5 + picture(6, 8))]
    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.grad(loss(*inputs), inputs[3])[0].abs().max() > 0


def test_points_out_of_the_picture_do_not_count(lone: tuple[Tensor, NeighbourField], camera: Camera) -> None:
    viewmat, K = camera()
    view, (point, field) = DepthView(torch.full((30, 40), 10.3), viewmat, K), lone
    points = torch.cat([point, torch.tensor([[50.0, 0, 10], [0, 0, -3]])])
    field = NeighbourField(*(value.repeat_interleave(3, dim=0) for value in field))
    assert float(sdf_loss(points, field, view, 2.0)) == pytest.approx(0.5, abs=1e-3)
    assert float(sdf_loss(points[1:], NeighbourField(*(v[1:] for v in field)), view, 2.0)) == 0


def test_a_depth_map_of_nan_costs_nothing(lone: tuple[Tensor, NeighbourField], camera: Camera) -> None:
    viewmat, K = camera()
    points, field = lone
    points = points.clone().requires_grad_()
    loss = sdf_loss(points, field, DepthView(torch.full((30, 40), torch.nan), viewmat, K), 2.0)
    loss.backward()
    assert float(loss) == 0 and points.grad is not None and not points.grad.any()


def test_camera_frame(camera: Camera) -> None:
    viewmat, _ = camera()
    viewmat[:3, 3] = torch.tensor([1.0, 2.0, 3.0])
    assert to_camera(torch.tensor([[1.0, 1.0, 1.0]]), viewmat).tolist() == [[2, 3, 4]]
