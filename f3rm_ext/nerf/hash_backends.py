"""Which implementation evaluates a hash grid on a device: the fastest one that works there.

Each is tried on a grid of a few rows, and compared with plain torch, before it is taken.
"""

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.nerf.hash_levels import LevelTensors, grid_levels
from f3rm_ext.nerf.hash_torch import hash_grid_torch
from f3rm_ext.utils.kernel_trials import NOT_INSTALLED, REMEDIES, Kernels, explain_choice, reason_against

Backend = Literal["auto", "tcnn", "triton", "numba", "torch"]
Implementation = Literal["tcnn", "triton", "numba", "torch"]

FASTEST_FIRST: tuple[Kernels, ...] = ("tcnn", "triton")
"""Backends that are tried on a CUDA device before torch, which works everywhere."""
_TRIED = (2, 2, 4, 16, 8)
"""Levels, features, base and finest resolution and table size of the grid on which backends are tried."""


def resolve_backend(backend: Backend, device: torch.device) -> Implementation:
    """Returns the implementation that evaluates tensors on a device.

    The first call for a CUDA device tries what it may return, which takes seconds where Triton has to compile. It says
    why a backend that is faster and there cannot be used; later calls remember the result.

    Args:
        backend: ``auto`` takes tiny-cuda-nn, Triton or torch on CUDA, numba on the CPU and torch elsewhere. A named
            backend is used on every device that it supports.

    Raises:
        ConfigError: the named backend does not work on this CUDA device.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    return _resolve(backend, device)


@functools.lru_cache
def _resolve(backend: Backend, device: torch.device) -> Implementation:
    if device.type != "cuda" or backend in ("numba", "torch"):
        return expected_backend(backend, device.type)
    if backend != "auto":
        if (reason := try_backend(backend, device)) is None:
            return backend
        raise ConfigError(
            f"The backend {backend} of the hash grids does not work on {device} ({reason}): use "
            f"--pipeline.model.backend auto (in a finished run, `backend: auto` in its config.yml), or "
            f"{REMEDIES[backend]}."
        )
    chosen: Implementation = "torch"
    reasons: dict[Kernels, str] = {}
    for candidate in FASTEST_FIRST:
        if (reason := try_backend(candidate, device)) is None:
            chosen = candidate
            break
        reasons[candidate] = reason
    if reasons.get("tcnn") == NOT_INSTALLED:
        del reasons["tcnn"]  # Few have it.
    if reasons:
        explain_choice("Hash grids", device, chosen, reasons)
    return chosen


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


def forget() -> None:
    """Forgets what was found, so that backends are tried again."""
    _resolve.cache_clear()


def try_backend(backend: Kernels, device: torch.device) -> str | None:
    """Tries a backend on a CUDA device with an index; returns why it fails, as part of a sentence, or None."""
    return reason_against(backend, lambda: _TRIALS[backend](device))


def _problem(device: torch.device) -> tuple[Tensor, Tensor, LevelTensors]:
    """Returns 32 points, a table and levels, one dense and one hashed, without taking random numbers."""
    num_levels, width, base, top, log2 = _TRIED
    levels = LevelTensors.from_levels(grid_levels(num_levels, base, top, log2))
    rows = levels.levels[-1].offset + levels.levels[-1].size
    points = (torch.arange(96, device=device) * 0.618).remainder(1.0).view(32, 3)
    table = torch.linspace(-1.0, 1.0, rows * width, device=device).view(rows, width)
    return points, table, replace(levels, scales=levels.scales.to(device), rows=levels.rows.to(device))


def _compare(values: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for one, other in zip(values, expected, strict=True):
        # Reading the error waits for the kernels, so that what they raise appears here.
        if not float((one.float() - other).abs().max() / other.abs().max()) < tolerance:
            raise RuntimeError("its results are wrong")


def _try_tcnn(device: torch.device) -> None:
    from f3rm_ext.nerf.hash_tcnn import TcnnGrid, encoding_options

    points, table, levels = _problem(device)
    with torch.no_grad():
        values = TcnnGrid(encoding_options(*_TRIED), table.numel())(points, table)
        _compare([values], [hash_grid_torch(points, table, levels)], tolerance=2e-2)


def _try_triton(device: torch.device) -> None:
    from f3rm_ext.nerf.hash_triton import hash_grid_triton

    points, table, levels = _problem(device)
    leaves = points.requires_grad_(True), table.requires_grad_(True)
    results = []
    with torch.enable_grad():
        for function in (hash_grid_triton, hash_grid_torch):
            out = function(points, table, levels)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    _compare(*results, tolerance=1e-3)


_TRIALS = {"tcnn": _try_tcnn, "triton": _try_triton}
