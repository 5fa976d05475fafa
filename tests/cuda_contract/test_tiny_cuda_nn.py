"""The hash grid over a stand-in of tiny-cuda-nn: half precision out, and a layout computed in float32."""

import ctypes
import ctypes.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.rays import RayBundle
from pretend.small import FIELDS, grids_of
from torch import Tensor, nn

from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.nerf.fields import GridOptions
from f3rm_ext.nerf.hash_grid import HashGrid, hash_grid_reference
from f3rm_ext.nerf.hash_levels import GridLevel
from f3rm_ext.nerf.model import F3rmModel

Autocast = Callable[..., AbstractContextManager[None]]


def _single(name: str, value: float) -> np.float32:
    """A function of C's mathematics on float32, as tiny-cuda-nn calls it."""
    library = ctypes.util.find_library("m")
    if library is None:
        return np.float32(getattr(np, name.removesuffix("f"))(np.float32(value)))
    function = getattr(ctypes.CDLL(library), name)
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
    return np.float32(function(value))


def _levels(options: dict[str, Any]) -> tuple[GridLevel, ...]:
    """tiny-cuda-nn's ``grid_scale`` and ``grid_resolution``, and what its constructor makes of them."""
    growth = _single("log2f", np.float32(options["per_level_scale"]))
    levels: list[GridLevel] = []
    offset = 0
    for level in range(options["n_levels"]):
        scale = _single("exp2f", np.float32(level) * growth) * np.float32(options["base_resolution"]) - np.float32(1)
        resolution = math.ceil(scale) + 1
        size = min(-(-(resolution**3) // 8) * 8, 2 ** options["log2_hashmap_size"])
        levels.append(GridLevel(float(scale), resolution, offset, size))
        offset += size
    return tuple(levels)


class Encoding(nn.Module):
    """``tinycudann.Encoding`` as far as the grid uses it."""

    def __init__(self, n_input_dims: int, encoding_config: dict[str, Any]) -> None:
        super().__init__()
        assert n_input_dims == 3 and encoding_config["otype"] == "HashGrid"
        self.levels = _levels(encoding_config)
        self.width = encoding_config["n_features_per_level"]
        rows = self.levels[-1].offset + self.levels[-1].size
        self.params = nn.Parameter(torch.empty(rows * self.width, device="meta"))

    def forward(self, points: Tensor) -> Tensor:
        assert points.device.type == "cuda" and self.params.device == points.device
        return hash_grid_reference(points, self.params.float().view(-1, self.width), self.levels).half()


@pytest.fixture(autouse=True)
def tiny_cuda_nn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """tiny-cuda-nn is installed."""
    module = ModuleType("tinycudann")
    module.Encoding = Encoding  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tinycudann", module)
    yield


def _grid(options: GridOptions, device: torch.device) -> HashGrid:
    grid = options.build("auto")
    nn.init.normal_(grid.table, generator=torch.Generator().manual_seed(1))
    return grid.to(device)


def test_features_are_single_outside_autocast(
    small_grid: GridOptions, cuda: torch.device, cuda_autocast: Autocast
) -> None:
    grid = _grid(small_grid, cuda)
    assert grid.resolve_backend(cuda) == "tcnn"
    points = torch.rand(50, 3, generator=torch.Generator().manual_seed(2)).to(cuda)
    found = grid(points)
    assert found.dtype == torch.float32
    with cuda_autocast():
        assert grid(points).dtype == torch.float16
    expected = hash_grid_reference(points.cpu(), grid.table.cpu(), grid.levels)
    torch.testing.assert_close(found.cpu(), expected, atol=4e-3, rtol=2e-3)


def test_a_model_draws_outside_autocast(
    small_field: F3rmModel, make_rays: Callable[..., RayBundle], cuda: torch.device, cuda_autocast: Autocast
) -> None:
    """The viewer, ns-eval, export and evaluation in training work in single precision."""
    rays = make_rays(20, cuda)
    single = small_field.eval()(rays)["rgb"]
    assert single.dtype == torch.float32 and bool(torch.isfinite(single.cpu()).all())
    with cuda_autocast():
        mixed = small_field(rays)["rgb"]
    torch.testing.assert_close(mixed.cpu(), single.cpu(), atol=2e-2, rtol=0)


@pytest.mark.parametrize("method", FIELDS)
def test_the_methods_grids_are_laid_out_alike(method: str) -> None:
    for options in grids_of(make_config(method).pipeline.model):
        grid = options.build("auto")
        theirs = _levels(grid._tcnn_options)
        assert grid.levels == theirs, options


def test_the_feature_grid_of_big_computes_the_same_function(cuda: torch.device) -> None:
    """Its level 3 has the scale 31 in exact arithmetic (32 vertices per axis) and 31.000004 in float32 (33)."""
    options = grids_of(make_config("f3rm-ext-big").pipeline.model)[1]
    grid = _grid(GridOptions(**{**vars(options), "features_per_level": 1}), cuda)
    points = torch.rand(200, 3, generator=torch.Generator().manual_seed(2)).to(cuda)
    expected = hash_grid_reference(points.cpu(), grid.table.cpu(), grid.levels)
    torch.testing.assert_close(grid(points).cpu(), expected, atol=4e-3, rtol=2e-3)
