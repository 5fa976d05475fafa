"""Triton kernels of the neighbours' field, interpreted; run by tests/cuda_contract/test_splat_triton.py."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.regularization import triton_field
from f3rm_ext.splat.regularization.field import KernelField, neighbour_field
from f3rm_ext.splat.regularization.neighbours import nearest_neighbours
from f3rm_ext.splat.regularization.sampling import draw_owners
from f3rm_ext.splat.regularization.table import gaussian_table


def _scene(make: Callable[..., Gaussians], n: int, count: int, spread: float = 0.3) -> tuple[Tensor, ...]:
    """Points near Gaussians, their owners, the table and the neighbours, of which some are missing."""
    gaussians = make(n, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    owners = draw_owners(torch.ones(n, dtype=torch.bool), count, generator)
    points = gaussians.means[owners] + spread * torch.randn(count, 3, generator=generator)
    neighbours = nearest_neighbours(gaussians.means, 6)
    neighbours[::3, 4:] = -1
    return points, owners, gaussian_table(gaussians), neighbours


@pytest.mark.parametrize("spread", [0.3, 5.0], ids=["near", "some out of reach"])
def test_values_and_gradients(
    spread: float, random_gaussians: Callable[..., Gaussians], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_field, "BLOCK", 32)
    points, owners, table, neighbours = _scene(random_gaussians, 40, 75, spread)
    results = []
    for dtype in (torch.float64, torch.float32):
        at, rows = points.to(dtype).requires_grad_(), table.to(dtype).requires_grad_()
        if dtype == torch.float64:
            field = tuple(neighbour_field(at, owners, rows, neighbours, backend="torch"))
        else:
            field = KernelField.apply(at, owners, rows, neighbours, triton_field)
        weights = [torch.randn(v.shape, generator=torch.Generator().manual_seed(k)) for k, v in enumerate(field)]
        loss = sum((value * weight).sum() for value, weight in zip(field, weights, strict=True))
        results.append((*field, *torch.autograd.grad(loss, (at, rows))))  # type: ignore[arg-type]
    for exact, found in zip(*results, strict=True):
        assert exact.abs().max() > 0
        torch.testing.assert_close(found, exact.detach().float(), rtol=2e-4, atol=2e-5)


def test_every_gradient_arrives_alone(random_gaussians: Callable[..., Gaussians]) -> None:
    """A mistake in a small gradient does not hide behind a large one."""
    points, owners, table, neighbours = _scene(random_gaussians, 12, 30)
    for output in range(5):
        grads = []
        for backend in ("torch", "triton"):
            at, rows = points.clone().requires_grad_(), table.clone().requires_grad_()
            if backend == "torch":
                field = tuple(neighbour_field(at, owners, rows, neighbours, backend="torch"))
            else:
                field = KernelField.apply(at, owners, rows, neighbours, triton_field)
            grads.append(torch.autograd.grad(field[output].square().sum(), (at, rows)))
        for one, other in zip(*grads, strict=True):
            for expected, found in ((one[:, column], other[:, column]) for column in range(one.shape[1])):
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * max(1.0, float(one.abs().max())))


def test_weights_that_vanish_leave_the_own_normal(random_gaussians: Callable[..., Gaussians]) -> None:
    points, owners, table, neighbours = _scene(random_gaussians, 12, 30, 500.0)
    rows = table.clone().requires_grad_()
    field = KernelField.apply(points, owners, rows, neighbours, triton_field)
    assert torch.equal(field[2], field[4]) and not field[0].any()
    (found,) = torch.autograd.grad(field[2].sum(), rows)
    assert found[:, 14:].sum().item() == 3 * len(points) and not found[:, :14].any()


def test_no_points_and_the_trial(random_gaussians: Callable[..., Gaussians]) -> None:
    _, owners, table, neighbours = _scene(random_gaussians, 5, 4)
    rows = table.clone().requires_grad_()
    field = KernelField.apply(torch.zeros(0, 3), owners[:0], rows, neighbours, triton_field)
    (found,) = torch.autograd.grad(field[0].sum() + field[3].sum(), rows)
    assert field[2].shape == (0, 3) and not found.any()
    triton_field.try_out(torch.device("cpu"))
