"""Which backend evaluates a hash grid on CUDA where tiny-cuda-nn or Triton are missing or broken."""

import importlib.abc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.nerf import hash_backends, hash_torch
from f3rm_ext.nerf.hash_backends import Backend, resolve_backend
from f3rm_ext.nerf.hash_grid import HashGrid, hash_grid_reference
from f3rm_ext.nerf.hash_levels import LevelTensors
from f3rm_ext.nerf.hash_torch import hash_grid_torch
from f3rm_ext.nerf.model import F3rmModelConfig

NO_IMAGE = "CUDA error: no kernel image is available for execution on the device"
NO_COMPILER = "Failed to find C compiler. Please specify via CC environment variable"
OTHER_GPU = "Could not find compatible tinycudann extension for compute capability 89"
TRITON = "f3rm_ext.nerf.hash_triton"
Install = Callable[[str, str], None]


class Broken(importlib.abc.MetaPathFinder):
    """Raises an error instead of importing a module."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.error = name, error

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == self.name:
            raise self.error


def _tiny_cuda_nn(state: str) -> ModuleType:
    """tiny-cuda-nn whose first call fails, or gives wrong results."""

    class Encoding(torch.nn.Module):
        def __init__(self, n_input_dims: int, encoding_config: dict[str, Any]) -> None:
            super().__init__()
            levels, width, base, top, log2 = hash_backends._TRIED
            rows = HashGrid(levels, width, base, top, log2).table.numel()
            self.params = torch.nn.Parameter(torch.empty(rows, device="meta"))

        def forward(self, points: Tensor) -> Tensor:
            if state == "wrong":
                return torch.zeros(len(points), 4, dtype=torch.float16, device=points.device)
            raise RuntimeError(NO_IMAGE)

    module: Any = ModuleType("tinycudann")
    module.Encoding = Encoding
    return module


def _triton(state: str) -> ModuleType:
    """Triton's kernels, by other means; or without a compiler for their launcher."""

    def compute(points: Tensor, table: Tensor, levels: LevelTensors, dtype: torch.dtype = torch.float32) -> Tensor:
        if state == "fails":
            raise RuntimeError(NO_COMPILER + ".\nmore lines")
        return hash_grid_reference(points, table, levels.levels).to(dtype)

    module: Any = ModuleType(TRITON)
    module.hash_grid_triton = compute
    return module


@pytest.fixture(autouse=True)
def install(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs tiny-cuda-nn and Triton in some state, "absent" for not at all."""

    def try_forward(device: torch.device) -> None:  # there is no backward pass on these tensors
        points, table, levels = hash_backends._problem(device)
        results = [f(points, table, levels) for f in (sys.modules[TRITON].hash_grid_triton, hash_grid_torch)]
        hash_backends._compare(results[:1], results[1:], 1e-3)

    def make(tcnn: str, triton: str) -> None:
        errors = {"absent": ModuleNotFoundError("No module", name="tinycudann"), "import": OSError(OTHER_GPU + ".")}
        broken = {"tinycudann": errors.get(tcnn)}
        broken[TRITON] = ModuleNotFoundError("No module", name="triton") if triton == "absent" else None
        for name, error in broken.items():
            monkeypatch.delitem(sys.modules, name, raising=False)
            if error is None:
                monkeypatch.setitem(sys.modules, name, _triton(triton) if name == TRITON else _tiny_cuda_nn(tcnn))
            else:
                monkeypatch.setattr(sys, "meta_path", [Broken(name, error), *sys.meta_path])
        trial = try_forward if triton == "works" else hash_backends._try_triton
        monkeypatch.setitem(hash_backends._TRIALS, "triton", trial)

    return make


@pytest.mark.parametrize(
    ("tcnn", "triton", "expected", "reasons"),
    [
        ("absent", "works", "triton", []),
        ("import", "works", "triton", [OTHER_GPU]),
        ("first call", "works", "triton", [NO_IMAGE]),
        ("wrong", "works", "triton", ["its results are wrong"]),
        ("absent", "fails", "torch", [NO_COMPILER, "slower"]),
        ("absent", "absent", "torch", ["it is not installed"]),
        ("import", "fails", "torch", [OTHER_GPU, NO_COMPILER]),
    ],
)
def test_what_is_broken_is_passed_over_and_named_once(
    tcnn: str, triton: str, expected: str, reasons: list[str], cuda: torch.device, install: Install, capsys: Any
) -> None:
    install(tcnn, triton)
    assert [resolve_backend("auto", cuda) for _ in range(3)] == [expected] * 3
    text = " ".join(word for word in capsys.readouterr().out.split() if "kernel_trials.py" not in word)
    assert text.count("Hash grids on cuda:0") == bool(reasons) and all(reason in text for reason in reasons)


@pytest.mark.parametrize(
    ("backend", "tcnn", "triton", "reason"),
    [
        ("tcnn", "import", "works", OTHER_GPU),
        ("tcnn", "first call", "works", NO_IMAGE),
        ("triton", "absent", "fails", NO_COMPILER),
    ],
)
def test_what_is_broken_and_named_is_an_error(
    backend: Backend, tcnn: str, triton: str, reason: str, cuda: torch.device, install: Install
) -> None:
    from nerfstudio.data.scene_box import SceneBox

    install(tcnn, triton)
    box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
    for use in (
        lambda: resolve_backend(backend, cuda),
        lambda: F3rmModelConfig(backend=backend).setup(scene_box=box, num_train_data=1, metadata={}, device="cuda:0"),
    ):
        with pytest.raises(ConfigError, match=f"{backend}.*cuda:0") as caught:
            use()
        message = str(caught.value)
        assert reason in message and "--pipeline.model.backend auto" in message and "\n" not in message


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_backends_that_need_nothing(backend: Backend, cuda: torch.device) -> None:
    assert resolve_backend(backend, cuda) == "torch"


def test_torch_takes_over_in_value(cuda: torch.device, install: Install) -> None:
    install("absent", "fails")
    grid, points = HashGrid(3, 2, 4, 16, 9).to(cuda), torch.rand(20, 3).to(cuda)
    expected = hash_grid_reference(points.cpu(), grid.table.cpu(), grid.levels)
    torch.testing.assert_close(grid(points).cpu(), expected)


def test_triton_gives_half_under_autocast(
    cuda: torch.device, install: Install, cuda_autocast: Callable[..., Any]
) -> None:
    install("absent", "works")
    grid, points = HashGrid(3, 2, 4, 16, 9, backend="triton").to(cuda), torch.rand(20, 3).to(cuda)
    assert grid(points).dtype == torch.float32
    for dtype in (torch.float16, torch.bfloat16):
        with cuda_autocast(dtype):
            assert grid(points).dtype == dtype


def test_chunks_fill_the_memory_where_nothing_is_kept(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch, watch_calls: Callable[..., Any]
) -> None:
    """A quarter of the pretended 20 GiB holds six temporaries; training reads as much at a time as it always does."""
    monkeypatch.setattr(hash_torch, "CHUNK_VALUES", 1)
    chunks = watch_calls(hash_torch, "_chunk_values")
    grid = HashGrid(2, 2, 4, 8, 6).to(cuda)
    levels = LevelTensors(grid.levels, grid.level_scales, grid.level_rows)
    assert grid.table.requires_grad
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            hash_torch.hash_grid_torch(torch.rand(3, 3).to(cuda), grid.table, levels)
    assert [call.result for call in chunks] == [(20 << 30) // 4 // 24, 1]
