"""The neighbours' field: torch and kernels against loops over points and neighbours in numpy, values and gradients.

Kernels are those of numba, or those of Triton in its interpreter.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.regularization import field as field_module
from f3rm_ext.splat.regularization import table as table_module
from f3rm_ext.splat.regularization.field import neighbour_field
from f3rm_ext.splat.regularization.kernels import GRADIENT_BYTES, table_count
from f3rm_ext.splat.regularization.neighbours import nearest_neighbours
from f3rm_ext.splat.regularization.sdf import sample_points
from f3rm_ext.splat.regularization.table import NORMAL, gaussian_table


@pytest.fixture(params=["torch", "kernels"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, use_triton: Callable[..., None]) -> str:
    """Has float32 computed by torch or by kernels."""
    if request.param == "torch":
        monkeypatch.setattr(field_module, "choose_kernels", lambda *_: None)
    else:
        use_triton(field_module)
    return request.param


def rotation(quat: np.ndarray) -> np.ndarray:
    w, x, y, z = quat / np.linalg.norm(quat)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + 2 * w * cross + 2 * cross @ cross


def by_definition(
    gaussians: Gaussians, points: Tensor, owners: Tensor, neighbours: Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Density, beta, direction, and the coefficient ± w_k of every neighbour's normal."""
    mu, alphas = gaussians.means.numpy(), gaussians.alphas().numpy()
    sizes, quats = gaussians.sizes().numpy(), gaussians.quats.numpy()
    normals = [rotation(q)[:, s.argmin()] for q, s in zip(quats, sizes, strict=True)]
    density, beta = np.zeros(len(points)), np.zeros(len(points))
    direction, coefficients = np.zeros((len(points), 3)), np.zeros((len(points), neighbours.shape[1]))
    for i, (p, g) in enumerate(zip(points.numpy(), owners.tolist(), strict=True)):
        there = [(k, j) for k, j in enumerate(neighbours[g].tolist()) if j >= 0]
        for k, j in there:
            covariance = rotation(quats[j]) @ np.diag(sizes[j] ** 2) @ rotation(quats[j]).T
            offset = p - mu[j]
            share = alphas[j] * math.exp(-0.5 * offset @ np.linalg.solve(covariance, offset))
            density[i] += share
            beta[i] += sizes[j].min() / len(there)
            side = -1.0 if normals[j] @ normals[g] < 0 else 1.0
            coefficients[i, k] = side * share * abs(offset @ normals[j]) / sizes[j].min() ** 2
        coefficients[i] /= np.abs(coefficients[i]).sum()
        direction[i] = sum(coefficients[i, k] * normals[j] for k, j in there)
    return density, beta, direction, coefficients


def draw(gaussians: Gaussians, count: int, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    visible = torch.ones(len(gaussians), dtype=torch.bool)
    return sample_points(gaussians, visible, count, spread=spread, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("n", [3, 40])
def test_values(backend: str, n: int, random_gaussians: Callable[..., Gaussians]) -> None:
    gaussians = random_gaussians(n)
    neighbours = nearest_neighbours(gaussians.means, 16)
    points, owners = draw(gaussians, 60)
    expected = by_definition(gaussians, points, owners, neighbours)
    dtype = torch.float64 if backend == "torch" else torch.float32
    table = gaussian_table(random_gaussians(n, dtype))
    field = neighbour_field(points.to(dtype), owners, table, neighbours, chunk=7)
    tolerance = 1e-10 if backend == "torch" else 2e-5
    own = gaussians.means[owners].numpy(), table[owners, NORMAL:].numpy()
    for value, reference in zip(field, (*expected[:3], *own), strict=True):
        np.testing.assert_allclose(value.numpy(), reference, rtol=tolerance, atol=tolerance)


def test_gradients_of_density_and_thickness(
    random_gaussians: Callable[..., Gaussians], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "CHUNK_GAUSSIANS", 4)
    gaussians = random_gaussians(6)
    neighbours = nearest_neighbours(gaussians.means, 4)
    neighbours[2, 3] = -1
    points, owners = draw(gaussians, 7)
    inputs = [points, gaussians.means, gaussians.scales, gaussians.quats, gaussians.opacities]
    inputs = [value.clone().requires_grad_() for value in inputs]

    def outputs(points: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        means, scales, quats, opacities = parameters
        moved = Gaussians(means, scales, quats, opacities, gaussians.features_dc, gaussians.features_rest)
        field = neighbour_field(points, owners, gaussian_table(moved), neighbours, chunk=4)
        return field.density, field.beta

    assert torch.autograd.gradcheck(outputs, inputs, fast_mode=False)


def test_gradient_of_direction_goes_to_normals_alone(random_gaussians: Callable[..., Gaussians]) -> None:
    gaussians = random_gaussians(9)
    neighbours = nearest_neighbours(gaussians.means, 4)
    points, owners = draw(gaussians, 12)
    *_, coefficients = by_definition(gaussians, points, owners, neighbours)
    upstream = torch.randn(12, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    points.requires_grad_()
    table = gaussian_table(gaussians).requires_grad_()
    neighbour_field(points, owners, table, neighbours, chunk=5).direction.backward(upstream)
    expected = np.zeros((9, 17))
    for i, g in enumerate(owners.tolist()):
        for k, j in enumerate(neighbours[g].tolist()):
            expected[j, NORMAL:] += coefficients[i, k] * upstream[i].numpy()
    assert table.grad is not None and points.grad is not None
    np.testing.assert_allclose(table.grad.numpy(), expected, atol=1e-12)
    assert not points.grad.any()


def gradients(samples: tuple[Tensor, Tensor], table: Tensor, neighbours: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of each output alone: a mistake in a small one does not hide behind a large one."""
    points, table = (value.detach().to(dtype).requires_grad_() for value in (samples[0], table))
    upstream, found = torch.Generator().manual_seed(8), []
    field = neighbour_field(points, samples[1], table, neighbours)
    for value in field:
        weights = torch.randn(value.shape, generator=upstream, dtype=torch.float64).to(dtype)
        found += torch.autograd.grad((value * weights).sum(), (points, table), retain_graph=True)
    return found


@pytest.mark.parametrize(("threads", "spread"), [(1, 1.5), (2, 1.5), (2, 20.0)], ids=["one", "two", "far"])
def test_gradients_of_kernels_are_those_of_torch(
    threads: int,
    spread: float,
    random_gaussians: Callable[..., Gaussians],
    use_triton: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numba

    use_triton(field_module)
    monkeypatch.setattr(numba, "get_num_threads", lambda: threads)  # number of gradient tables
    gaussians = random_gaussians(50)
    neighbours = nearest_neighbours(gaussians.means, 8)
    neighbours[::3, 5:] = -1
    samples, table = draw(gaussians, 201, spread=spread), gaussian_table(gaussians)  # two programs of Triton
    ours, theirs = (gradients(samples, table, neighbours, dtype) for dtype in (torch.float32, torch.float64))
    for value, reference in zip(ours, theirs, strict=True):
        for column, expected in zip(value.T, reference.T, strict=True):
            torch.testing.assert_close(column.double(), expected, rtol=2e-4, atol=1e-5 * float(reference.abs().max()))


def test_gradient_tables_stay_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.get_num_threads", lambda: 64)
    assert table_count(1000) == 64 and table_count(GRADIENT_BYTES // 3) == 3 and table_count(2 * GRADIENT_BYTES) == 1


def test_far_from_all_gaussians(backend: str, random_gaussians: Callable[..., Gaussians]) -> None:
    """No weight at all: density 0, the own normal as direction, and finite gradients."""
    gaussians = random_gaussians(5, torch.float32)
    neighbours = nearest_neighbours(gaussians.means, 3)
    table = gaussian_table(gaussians).requires_grad_()
    points = torch.full((2, 3), 1e5, requires_grad=True)
    owners = torch.tensor([1, 4])
    field = neighbour_field(points, owners, table, neighbours)
    assert not field.density.any()
    assert torch.equal(field.direction, table[owners][:, NORMAL:])
    (of_direction,) = torch.autograd.grad(field.direction.sum(), table, retain_graph=True)
    assert of_direction[:, NORMAL:].sum() == 3 * len(points) and not of_direction[:, :NORMAL].any()
    grads = torch.autograd.grad(sum(value.sum() for value in field), (points, table))
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert torch.equal(grads[1][[1, 4], NORMAL:], torch.full((2, 3), 2.0))  # of direction and of normal
    assert not grads[1][[0, 2, 3], NORMAL:].any()


def test_no_points(backend: str, random_gaussians: Callable[..., Gaussians]) -> None:
    gaussians = random_gaussians(5, torch.float32)
    table = gaussian_table(gaussians).requires_grad_()
    nobody = torch.zeros(0, dtype=torch.int64)
    field = neighbour_field(torch.zeros(0, 3), nobody, table, nearest_neighbours(gaussians.means, 3))
    sum(value.sum() for value in field).backward()
    assert table.grad is not None and not table.grad.any()


def test_vanishing_sizes_stay_finite(backend: str, random_gaussians: Callable[..., Gaussians]) -> None:
    gaussians = random_gaussians(6, torch.float32)
    gaussians.scales[:3] = -200.0
    table = gaussian_table(gaussians).requires_grad_()
    owners = torch.arange(6)
    points = gaussians.means.clone().requires_grad_()
    neighbours = nearest_neighbours(gaussians.means, 4)
    field = neighbour_field(points, owners, table, neighbours)
    assert all(torch.isfinite(value).all() for value in field)
    assert (field.density >= gaussians.alphas() - 1e-6).all()
    grads = torch.autograd.grad(sum(value.sum() for value in field), (points, table))
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_wall_has_the_density_of_a_flat_surface(wall: Callable[..., Gaussians]) -> None:
    gaussians = wall(thickness=0.05)
    middle = 40
    assert gaussians.means[middle].tolist() == [0, 0, 10]
    heights = torch.linspace(-0.2, 0.2, 9)
    points = torch.stack([torch.full((9,), 0.3), torch.full((9,), -0.2), 10 + heights], dim=1)
    neighbours = nearest_neighbours(gaussians.means, 16)
    field = neighbour_field(points, torch.full((9,), middle), gaussian_table(gaussians), neighbours)
    assert torch.allclose(field.beta, torch.tensor(0.05))
    assert torch.allclose(field.density, torch.exp(-0.5 * (heights / 0.05) ** 2), rtol=0.03, atol=1e-6)
    off = heights != 0
    assert torch.allclose(field.direction[off].abs(), torch.tensor([0.0, 0.0, 1.0]).expand(8, 3), atol=1e-6)
