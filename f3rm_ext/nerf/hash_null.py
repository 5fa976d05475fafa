"""Null backend of the hash grid: it allocates what the other backends allocate and keep, and computes nothing.

The kernels of numba, Triton and tiny-cuda-nn read the memory of tensors, so they cannot run on tensors without values.
"""

import importlib.util
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from f3rm_ext.compat import autocast_dtype
from f3rm_ext.memory.shapes import kernel_device
from f3rm_ext.nerf.hash_backends import Backend, Implementation
from f3rm_ext.nerf.hash_torch import CHUNK_VALUES, CHUNK_VALUES_CPU

TEMPORARIES = 6
"""Temporaries of the torch backend, each as large as the values that it reads at a time; see hash_torch."""


class _NullGrid(torch.autograd.Function):
    """Keeps points and table, as all backends do. The torch backend also needs ``scratch`` numbers in both passes."""

    @staticmethod
    def forward(ctx: Any, points: Tensor, table: Tensor, width: int, dtype: torch.dtype, scratch: int) -> Tensor:
        points, table = points.detach().contiguous(), table.detach()
        ctx.save_for_backward(points, table)
        ctx.scratch = scratch
        features = points.new_empty(len(points), width, dtype=dtype)
        points.new_empty(scratch)
        return features

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        points, table = ctx.saved_tensors
        kept = gradients[0].contiguous()
        by_table = torch.empty_like(table) if ctx.needs_input_grad[1] else None
        by_points = torch.empty_like(points) if ctx.needs_input_grad[0] else None
        kept.new_empty(ctx.scratch)
        return by_points, by_table, None, None, None


def expected_backend(backend: Backend, device_type: str) -> Implementation:
    """Returns the backend that a run would choose, without trying it out.

    Args:
        device_type: type of the run's device, which may be on another machine.
    """
    if device_type == "cpu":
        return "torch" if backend == "torch" else "numba"
    if device_type != "cuda" or backend in ("numba", "torch"):
        return "torch"
    if backend != "auto":
        return backend
    return "tcnn" if importlib.util.find_spec("tinycudann") else "triton"


def hash_grid_null(
    points: Float[Tensor, "points 3"], table: Float[Tensor, "entries level_feat"], width: int, backend: Backend
) -> Float[Tensor, "points feat"]:
    """Returns features without values; differentiable in points and table.

    Args:
        backend: the backend whose memory is allocated; ``auto`` is the one that a run would choose.
    """
    device_type = kernel_device(points)
    chosen = expected_backend(backend, device_type)
    if chosen == "tcnn":
        # It reads a copy of the table in half precision.
        features = _NullGrid.apply(points, table.half(), width, torch.float16, 0)
        return features if torch.is_autocast_enabled("cpu") else features.float()  # type: ignore[union-attr]
    dtype, scratch = points.dtype, 0
    if chosen == "triton":
        dtype = autocast_dtype("cpu")
    elif chosen == "torch":
        most = CHUNK_VALUES_CPU if device_type == "cpu" else CHUNK_VALUES
        scratch = TEMPORARIES * min(most, 8 * len(points) * width)
    return _NullGrid.apply(points, table, width, dtype, scratch)  # type: ignore[return-value]
