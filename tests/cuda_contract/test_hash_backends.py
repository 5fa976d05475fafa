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
NO_COMPILER = "Failed to find C compiler. Please specify via CC environment variable."
OTHER_GPU = "Could not find compatible tinycudann extension for compute capability 89."


class Broken(importlib.abc.MetaPathFinder):
    """Raises an error instead of importing a module."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.error = name, error

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == self.name:
            raise self.error


@pytest.fixture
def break_import(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Exception], None]:
    """Makes the import of a module raise an error."""

    def make(name: str, error: Exception) -> None:
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "meta_path", [Broken(name, error), *sys.meta_path])

    return make


@pytest.fixture
def tcnn_first_call(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """tiny-cuda-nn can be imported; its first call raises, or gives this text's results."""

    def make(error: str) -> None:
        class Encoding(torch.nn.Module):
            def __init__(self, n_input_dims: int, encoding_config: dict[str, Any]) -> None:
                super().__init__()
                levels, width, base, top, log2 = hash_backends._TRIED
                rows = HashGrid(levels, width, base, top, log2).table.numel()
                self.params = torch.nn.Parameter(torch.empty(rows, device="meta"))

            def forward(self, points: Tensor) -> Tensor:
                if error == "wrong":
                    return torch.zeros(len(points), 4, dtype=torch.float16, device=points.device)
                raise RuntimeError(error)

        module = ModuleType("tinycudann")
        module.Encoding = Encoding  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tinycudann", module)

    return make


@pytest.fixture
def working_triton(trials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels, by other means."""
    module: Any = ModuleType("f3rm_ext.nerf.hash_triton")
    module.hash_grid_triton = lambda points, table, levels, dtype=torch.float32: hash_grid_reference(
        points, table, levels.levels
    ).to(dtype)
    monkeypatch.setitem(sys.modules, "f3rm_ext.nerf.hash_triton", module)

    # There is no backward pass on these tensors.
    def forward_only(device: torch.device) -> None:
        points, table, levels = hash_backends._problem(device)
        found, expected = (f(points, table, levels) for f in (module.hash_grid_triton, hash_grid_torch))
        hash_backends._compare([found], [expected], 1e-3)

    monkeypatch.setitem(hash_backends._TRIALS, "triton", forward_only)


@pytest.fixture(autouse=True)
def trials(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is tried, with the stand-ins of these tests."""
    monkeypatch.setitem(hash_backends._TRIALS, "triton", hash_backends._try_triton)


@pytest.fixture
def triton_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton can be imported, but has no compiler for its launcher."""
    module: Any = ModuleType("f3rm_ext.nerf.hash_triton")

    def fail(points: Tensor, table: Tensor, levels: LevelTensors) -> Tensor:
        raise RuntimeError(NO_COMPILER + "\nmore lines")

    module.hash_grid_triton = fail
    monkeypatch.setitem(sys.modules, "f3rm_ext.nerf.hash_triton", module)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, without line breaks, the time and the place."""
    return " ".join(word for word in capsys.readouterr().out.split() if "kernel_trials.py" not in word)


def test_without_tiny_cuda_nn_triton_is_taken_and_nothing_said(
    cuda: torch.device,
    working_triton: None,
    break_import: Callable[[str, Exception], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_import("tinycudann", ModuleNotFoundError("No module named 'tinycudann'", name="tinycudann"))
    assert resolve_backend("auto", cuda) == "triton"
    assert said(capsys) == ""


def test_triton_gives_half_under_autocast(
    cuda: torch.device, working_triton: None, cuda_autocast: Callable[..., Any]
) -> None:
    grid = HashGrid(3, 2, 4, 16, 9, backend="triton").to(cuda)
    points = torch.rand(20, 3).to(cuda)
    assert grid(points).dtype == torch.float32
    with cuda_autocast():
        assert grid(points).dtype == torch.float16
    with cuda_autocast(torch.bfloat16):
        assert grid(points).dtype == torch.bfloat16


@pytest.mark.parametrize("how", ["import", "first call", "wrong"])
def test_a_broken_tiny_cuda_nn_is_passed_over_and_named_once(
    how: str,
    cuda: torch.device,
    working_triton: None,
    break_import: Callable[[str, Exception], None],
    tcnn_first_call: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if how == "import":
        break_import("tinycudann", OSError(OTHER_GPU))
    else:
        tcnn_first_call(NO_IMAGE if how == "first call" else how)
    assert [resolve_backend("auto", cuda) for _ in range(3)] == ["triton"] * 3
    reason = {"import": OTHER_GPU.rstrip("."), "first call": NO_IMAGE, "wrong": "its results are wrong"}[how]
    sentence = f"Hash grids on cuda:0 run on Triton, since tiny-cuda-nn does not work here ({reason})."
    text = said(capsys)
    assert sentence in text and text.count("Hash grids") == 1


@pytest.mark.parametrize("error", [OSError(OTHER_GPU), None])
def test_a_broken_tiny_cuda_nn_that_is_named_is_an_error(
    error: Exception | None,
    cuda: torch.device,
    break_import: Callable[[str, Exception], None],
    tcnn_first_call: Callable[[str], None],
) -> None:
    if error is None:
        tcnn_first_call(NO_IMAGE)
    else:
        break_import("tinycudann", error)
    with pytest.raises(ConfigError) as caught:
        resolve_backend("tcnn", cuda)
    message = str(caught.value)
    assert message.startswith("The backend tcnn of the hash grids does not work on cuda:0 (")
    assert (NO_IMAGE if error is None else OTHER_GPU.rstrip(".")) in message
    assert "--pipeline.model.backend auto" in message and "\n" not in message


def test_a_triton_that_cannot_compile_is_passed_over_and_named_once(
    cuda: torch.device, triton_fails: None, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = HashGrid(3, 2, 4, 16, 9).to(cuda)
    points = torch.rand(20, 3).to(cuda)
    found = [grid(points) for _ in range(2)][-1]
    expected = hash_grid_reference(points.cpu(), grid.table.cpu(), grid.levels)
    torch.testing.assert_close(found.cpu(), expected)
    reason = NO_COMPILER.rstrip(".")
    sentence = f"Hash grids on cuda:0 run on plain torch, which is slower, since Triton does not work here ({reason})."
    text = said(capsys)
    assert sentence in text and text.count("Hash grids") == 1


def test_without_triton_torch_is_taken_and_it_is_said(
    cuda: torch.device, break_import: Callable[[str, Exception], None], capsys: pytest.CaptureFixture[str]
) -> None:
    break_import("f3rm_ext.nerf.hash_triton", ModuleNotFoundError("No module named 'triton'", name="triton"))
    assert resolve_backend("auto", cuda) == "torch"
    assert "since Triton does not work here (it is not installed)." in said(capsys)


def test_a_broken_triton_that_is_named_is_an_error(cuda: torch.device, triton_fails: None) -> None:
    with pytest.raises(ConfigError, match=r"backend triton .* on cuda:0 \(Failed to find C compiler") as caught:
        resolve_backend("triton", cuda)
    assert "C compiler such as gcc" in str(caught.value) and "\n" not in str(caught.value)


def test_both_broken_are_one_sentence(
    cuda: torch.device,
    triton_fails: None,
    break_import: Callable[[str, Exception], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_import("tinycudann", OSError(OTHER_GPU))
    assert resolve_backend("auto", cuda) == "torch"
    text = said(capsys)
    assert text.count("Hash grids") == 1 and OTHER_GPU.rstrip(".") in text and NO_COMPILER.rstrip(".") in text


@pytest.mark.parametrize("backend", ["tcnn", "triton"])
def test_a_model_says_so_when_it_is_built(
    backend: Backend,
    cuda: torch.device,
    triton_fails: None,
    break_import: Callable[[str, Exception], None],
) -> None:
    from nerfstudio.data.scene_box import SceneBox

    break_import("tinycudann", OSError(OTHER_GPU))
    box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
    with pytest.raises(ConfigError, match=f"The backend {backend}"):
        F3rmModelConfig(backend=backend).setup(scene_box=box, num_train_data=1, metadata={}, device="cuda:0")


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_backends_that_need_nothing(backend: Backend, cuda: torch.device) -> None:
    assert resolve_backend(backend, cuda) == "torch"


def test_chunks_fill_the_memory_where_nothing_is_kept(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the pretended 20 GiB holds six temporaries; training reads as much at a time as it always does."""
    monkeypatch.setattr(hash_torch, "CHUNK_VALUES", 1)
    sizes: list[int] = []
    real = hash_torch._chunk_values
    monkeypatch.setattr(hash_torch, "_chunk_values", lambda *which: sizes.append(real(*which)) or sizes[-1])
    grid = HashGrid(2, 2, 4, 8, 6).to(cuda)
    levels = LevelTensors(grid.levels, grid.level_scales, grid.level_rows)
    assert grid.table.requires_grad
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            hash_torch.hash_grid_torch(torch.rand(3, 3).to(cuda), grid.table, levels)
    assert sizes == [(20 << 30) // 4 // 24, 1]
