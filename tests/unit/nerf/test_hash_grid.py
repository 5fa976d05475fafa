"""The hash grid: geometry, the reference's gradients, and numba and torch against the reference."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from f3rm_ext.nerf import hash_torch
from f3rm_ext.nerf.hash_grid import HashGrid, hash_grid_reference
from f3rm_ext.nerf.hash_kernels import BLOCK, hash_grid_numba
from f3rm_ext.nerf.hash_levels import LevelTensors, grid_levels
from f3rm_ext.nerf.hash_torch import hash_grid_torch

Interpolation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SHAPES = [(1, 2, 4, 4, 12), (5, 2, 16, 128, 12), (4, 1, 3, 40, 9), (6, 4, 8, 256, 14), (3, 8, 16, 64, 11)]


def _grid(shape: tuple[int, int, int, int, int]) -> HashGrid:
    levels, width, base, top, log2 = shape
    grid = HashGrid(levels, width, base, top, log2, backend="torch")
    torch.nn.init.normal_(grid.table, generator=torch.Generator().manual_seed(1))
    return grid


def _points(count: int) -> torch.Tensor:
    points = torch.rand(count, 3, generator=torch.Generator().manual_seed(2))
    points[0], points[1] = 0.0, 1.0  # the corners of the cube
    return points


def test_levels_grow_geometrically_and_stop_at_the_table_size() -> None:
    levels = grid_levels(num_levels=5, base_res=16, max_res=256, log2_hashmap_size=15)
    assert [level.resolution for level in levels] == [16, 32, 64, 128, 256]
    assert [level.is_hashed for level in levels] == [False, False, True, True, True]
    assert [level.size for level in levels] == [4096, 32768, 32768, 32768, 32768]
    for before, after in itertools.pairwise(levels):
        assert after.offset == before.offset + before.size


def test_dense_sizes_are_padded_to_eight() -> None:
    (level,) = grid_levels(num_levels=1, base_res=3, max_res=3, log2_hashmap_size=19)
    assert level.size == 32  # 27 vertices


def test_levels_are_computed_in_single_precision() -> None:
    # 16 · 2^(1/3 · 3) − 1 is 31 in exact arithmetic; tiny-cuda-nn finds 31.000004, and so one vertex more.
    levels = grid_levels(num_levels=16, base_res=16, max_res=512, log2_hashmap_size=19)
    assert (levels[3].scale, levels[3].resolution) == (31.000003814697266, 33)
    assert levels[-1].offset + levels[-1].size == 5_261_688


def test_a_vertex_returns_its_row() -> None:
    grid = _grid((1, 2, 4, 4, 12))
    (level,) = grid.levels
    vertex = torch.tensor([1, 2, 3])
    point = ((vertex - 0.5) / level.scale)[None]
    row = 1 + 4 * (2 + 4 * 3)
    torch.testing.assert_close(hash_grid_reference(point, grid.table, grid.levels)[0], grid.table[row])


def _function(backend: str, grid: HashGrid) -> Interpolation:
    """The backend's function of points and table."""
    tensors = LevelTensors.from_levels(grid.levels)
    functions: dict[str, Interpolation] = {
        "reference": lambda points, table: hash_grid_reference(points, table, grid.levels),
        "numba": lambda points, table: hash_grid_numba(points, table, grid.levels),
        "torch": lambda points, table: hash_grid_torch(points, table, tensors),
    }
    return functions[backend]


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [2, 257, BLOCK + 3])
def test_backends_equal_the_reference_in_value_and_gradient(
    backend: str, shape: tuple[int, int, int, int, int], count: int
) -> None:
    grid, points = _grid(shape), _points(count)
    results = []
    for function in (_function("reference", grid), _function(backend, grid)):
        leaf_points, leaf_table = points.clone().requires_grad_(True), grid.table.detach().clone().requires_grad_(True)
        out = function(leaf_points, leaf_table)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        results.append((out.detach(), *torch.autograd.grad(out, (leaf_points, leaf_table), upstream)))
    (value, by_point, by_table), (fast_value, fast_by_point, fast_by_table) = results
    # A coordinate times a scale of hundreds, in float32, carries an error of about 1e-5 cells.
    torch.testing.assert_close(fast_value, value, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(fast_by_table, by_table, atol=2e-3, rtol=1e-3)
    scale = by_point.abs().max()
    torch.testing.assert_close(fast_by_point / scale, by_point / scale, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_backends_in_double_precision_pass_gradcheck(backend: str) -> None:
    grid = _grid((3, 2, 3, 9, 7))
    points = (_points(6)[2:].double() * 0.98 + 0.01).requires_grad_(True)
    table = grid.table.detach().double().requires_grad_(True)
    assert torch.autograd.gradcheck(_function(backend, grid), (points, table), eps=1e-7)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = _grid(SHAPES[3])
    results = []
    for values in (2**30, 1000):
        monkeypatch.setattr(hash_torch, "CHUNK_VALUES_CPU", values)
        points = _points(500).requires_grad_(True)
        out = _function("torch", grid)(points, grid.table)
        # As a linear layer in column order hands it back.
        upstream = torch.randn(out.shape[::-1], generator=torch.Generator().manual_seed(3)).T
        results.append((out.detach(), *torch.autograd.grad(out, (points, grid.table), upstream)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


class _Operators(TorchDispatchMode):
    """Names of the operators that run, and how many numbers their results have together."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.names[func.overloadpacket.__name__] += 1
        self.made += found.numel() if isinstance(found, torch.Tensor) and not func.is_view else 0
        return found


def test_torch_keeps_points_and_table_only_and_makes_one_gradient() -> None:
    grid = _grid((16, 2, 4, 2048, 14))
    points, kept = _points(100).requires_grad_(True), set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _Operators() as forward:
        out = grid(points)
    assert kept == {points.untyped_storage().data_ptr(), grid.table.untyped_storage().data_ptr()}
    with _Operators() as backward:
        torch.autograd.grad(out, (points, grid.table), torch.ones_like(out))
    # Two runs of levels, dense and hashed. Values that come from the host would be copied to a GPU in every step.
    assert sum(forward.names.values()) < 120 and sum(backward.names.values()) < 250
    assert not {"lift_fresh", "item", "_local_scalar_dense", "nonzero"} & {*forward.names, *backward.names}
    assert backward.names["index_add_"] == 4 and backward.names["index_put_"] == 0
    assert backward.names["zeros_like"] == 2
    # The reference makes 3 gradients of the table for each level.
    assert backward.made < 2 * grid.table.numel() + 60 * 100 * grid.out_dim * 8


def test_torch_takes_no_points_and_stays_in_the_table() -> None:
    grid = _grid(SHAPES[1])
    assert grid(torch.zeros(0, 3)).shape == (0, 10)
    points = _points(4)
    points[2], points[3] = float("nan"), 1e9
    torch.testing.assert_close(grid(points)[:2], hash_grid_reference(points[:2], grid.table, grid.levels))


def test_geometry_follows_the_grid_and_stays_out_of_checkpoints() -> None:
    grid = _grid(SHAPES[1])
    assert list(grid.state_dict()) == ["table"]
    assert {name for name, _ in grid.named_buffers()} == {"level_scales", "level_rows"}


def test_gradient_is_only_computed_where_needed() -> None:
    grid = _grid(SHAPES[1])
    points = _points(10)
    out = hash_grid_numba(points, grid.table, grid.levels)
    out.sum().backward()
    assert grid.table.grad is not None and points.grad is None
    # Eight corners with weights summing to one, per point, level and feature.
    torch.testing.assert_close(grid.table.grad.sum(), torch.tensor(10.0 * out.shape[1]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -7.0, 1e9])
def test_points_outside_the_cube_never_leave_the_table(bad: float) -> None:
    grid = _grid(SHAPES[1])
    points = _points(4)
    points[2] = bad
    out = hash_grid_numba(points, grid.table, grid.levels)
    torch.testing.assert_close(out[:2], hash_grid_reference(points[:2], grid.table, grid.levels), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["auto", "tcnn", "triton", "torch"])
def test_numba_is_taken_on_the_cpu_unless_torch_is_named(backend: Any) -> None:
    expected = "torch" if backend == "torch" else "numba"
    assert HashGrid(2, 2, 4, 8, 8, backend=backend).resolve_backend(torch.device("cpu")) == expected


def test_backends_share_one_state_dict() -> None:
    ours, theirs = HashGrid(3, 2, 4, 16, 9, backend="numba"), HashGrid(3, 2, 4, 16, 9, backend="torch")
    theirs.load_state_dict(ours.state_dict())
    points = _points(50)
    torch.testing.assert_close(ours(points), theirs(points), atol=1e-6, rtol=1e-3)
