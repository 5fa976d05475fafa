"""The hash grid on CUDA: the same function and the same gradients as on the CPU, whichever backend runs."""

import pytest
import torch

from f3rm_ext.nerf.hash_grid import HashGrid, hash_grid_reference, tcnn_available

SHAPES = [(1, 2, 4, 4, 12), (5, 2, 16, 128, 12), (16, 2, 16, 2048, 19), (12, 8, 16, 128, 19)]
"""Levels, features per level, base and finest resolution, log2 of the table; the last two are the methods' own."""


def _grid(shape: tuple[int, int, int, int, int], backend: str = "torch") -> HashGrid:
    levels, width, base, top, log2 = shape
    grid = HashGrid(levels, width, base, top, log2, backend=backend)  # type: ignore[arg-type]
    torch.nn.init.normal_(grid.table, generator=torch.Generator().manual_seed(1))
    return grid


def _points(count: int) -> torch.Tensor:
    points = torch.rand(count, 3, generator=torch.Generator().manual_seed(2))
    points[0], points[1] = 0.0, 1.0  # the corners of the cube
    return points


def _value_and_gradients(
    grid: HashGrid, points: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, and the gradients of a fixed random projection by points and table, on the CPU as float32."""
    grid = grid.to(device)
    leaf = points.to(device).requires_grad_(True)
    out = grid(leaf)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(device, out.dtype)
    by_point, by_table = torch.autograd.grad(out, (leaf, grid.table), upstream)
    return out.detach().float().cpu(), by_point.float().cpu(), by_table.float().cpu()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [2, 257, 20_000])
def test_torch_on_cuda_equals_the_cpu(shape: tuple[int, int, int, int, int], count: int, cuda: torch.device) -> None:
    points = _points(count)
    value, by_point, by_table = _value_and_gradients(_grid(shape), points, torch.device("cpu"))
    on_cuda, cuda_by_point, cuda_by_table = _value_and_gradients(_grid(shape), points, cuda)
    # A coordinate times a scale of thousands, in float32, carries an error of about 1e-4 cells.
    torch.testing.assert_close(on_cuda, value, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(cuda_by_table, by_table, atol=5e-3, rtol=1e-3)
    scale = by_point.abs().max()
    torch.testing.assert_close(cuda_by_point / scale, by_point / scale, atol=2e-3, rtol=1e-3)


def test_hashing_is_the_same_integer_arithmetic(cuda: torch.device) -> None:
    # At the vertices themselves a wrong row would be a wrong value, not a small error.
    grid = _grid((1, 2, 512, 512, 14))
    (level,) = grid.levels
    assert level.hashed
    vertices = torch.randint(1, 511, (5000, 3), generator=torch.Generator().manual_seed(4))
    points = (vertices - 0.5).double() / level.scale
    table = grid.table.detach().double()
    on_cpu = hash_grid_reference(points, table, grid.levels)
    on_cuda = hash_grid_reference(points.to(cuda), table.to(cuda), grid.levels)
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, atol=1e-9, rtol=1e-9)


def test_backends_by_device(cuda: torch.device) -> None:
    assert HashGrid(2, 2, 4, 8, 8, backend="torch").resolve_backend(cuda) == "torch"
    assert HashGrid(2, 2, 4, 8, 8, backend="numba").resolve_backend(cuda) == "torch"
    assert HashGrid(2, 2, 4, 8, 8).resolve_backend(cuda) == ("tcnn" if tcnn_available() else "torch")


@pytest.mark.skipif(not tcnn_available(), reason="tiny-cuda-nn (tinycudann) is not installed")
@pytest.mark.parametrize("shape", [*SHAPES[1:], (16, 8, 16, 512, 19)])
def test_tiny_cuda_nn_equals_torch(shape: tuple[int, int, int, int, int], cuda: torch.device) -> None:
    points = _points(5000)
    value, _, by_table = _value_and_gradients(_grid(shape), points, cuda)
    fast_value, _, fast_by_table = _value_and_gradients(_grid(shape, "tcnn"), points, cuda)
    # tiny-cuda-nn computes in half precision: eleven bits of values of up to four.
    torch.testing.assert_close(fast_value, value, atol=2e-2, rtol=2e-2)
    similarity = torch.nn.functional.cosine_similarity(fast_by_table.flatten(), by_table.flatten(), dim=0)
    assert similarity > 0.999
    torch.testing.assert_close(fast_by_table.norm(), by_table.norm(), rtol=1e-2, atol=0)
