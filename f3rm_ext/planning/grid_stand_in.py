"""What a hash grid allocates and keeps for the backward pass, without computing anything.

The kernels of numba, Triton and tiny-cuda-nn read the memory of tensors, so they do not run on tensors without any.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from f3rm_ext.compat import autocast_dtype
from f3rm_ext.nerf.hash_backends import Backend, Implementation
from f3rm_ext.nerf.hash_grid import HashGrid
from f3rm_ext.nerf.hash_torch import CHUNK_VALUES, CHUNK_VALUES_CPU

TEMPORARIES = 6
"""Temporaries of the torch backend, as large as the values that it reads at a time; see hash_torch."""


class _Grid(torch.autograd.Function):
    """Keeps points and table, as all backends do. The torch backend also needs ``scratch`` numbers in both passes."""

    @staticmethod
    def forward(ctx: Any, points: Tensor, table: Tensor, width: int, dtype: torch.dtype, scratch: int) -> Tensor:
        points, table = points.detach().contiguous(), table.detach()
        ctx.save_for_backward(points, table)
        ctx.scratch = scratch
        found = points.new_empty(len(points), width, dtype=dtype)
        points.new_empty(scratch)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        points, table = ctx.saved_tensors
        kept = gradients[0].contiguous()
        by_table = torch.empty_like(table) if ctx.needs_input_grad[1] else None
        by_points = torch.empty_like(points) if ctx.needs_input_grad[0] else None
        kept.new_empty(ctx.scratch)
        return by_points, by_table, None, None, None


def planned_backend(backend: Backend, device_type: str) -> Implementation:
    """Returns the backend that a run would choose, without trying it out.

    Args:
        backend: the option.
        device_type: of the run, which may be on another machine.
    """
    if device_type == "cpu":
        return "torch" if backend == "torch" else "numba"
    if device_type != "cuda" or backend in ("numba", "torch"):
        return "torch"
    if backend != "auto":
        return backend
    return "tcnn" if importlib.util.find_spec("tinycudann") else "triton"


@contextmanager
def grid_stand_in(device_type: str) -> Iterator[None]:
    """While this is entered, hash grids only allocate.

    Args:
        device_type: of the run.
    """

    def forward(grid: HashGrid, points: Tensor, *, frozen: bool = False) -> Tensor:
        backend, width = planned_backend(grid.backend, device_type), grid.out_dim
        table = grid.table.detach() if frozen else grid.table
        if backend == "tcnn":
            # It reads a copy of the table in half precision.
            found = _Grid.apply(points, table.half(), width, torch.float16, 0)
            return found if torch.is_autocast_enabled("cpu") else found.float()  # type: ignore[union-attr]
        dtype, scratch = points.dtype, 0
        if backend == "triton":
            dtype = autocast_dtype("cpu")
        elif backend == "torch":
            most = CHUNK_VALUES_CPU if device_type == "cpu" else CHUNK_VALUES
            scratch = TEMPORARIES * min(most, 8 * len(points) * width)
        return _Grid.apply(points, table, width, dtype, scratch)  # type: ignore[return-value]

    with mock.patch.object(HashGrid, "forward", forward):
        yield
