"""The hash grid on CUDA: the same function and the same gradients as on the CPU, whichever backend runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import SceneBox

from f3rm_ext.features.spec import FeatureSpec
from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.nerf.hash_backends import Backend, try_backend
from f3rm_ext.nerf.hash_grid import HashGrid, hash_grid_reference
from f3rm_ext.nerf.model import F3rmModel
from f3rm_ext.utils.kernel_trials import NOT_INSTALLED

Shape = tuple[int, int, int, int, int]
SHAPES: list[Shape] = [(1, 2, 4, 4, 12), (5, 2, 16, 128, 12), (16, 2, 16, 2048, 19), (12, 8, 16, 128, 19)]
"""Levels, features per level, base and finest resolution, log2 of the table; the last two are the methods' own."""
BIG: list[Shape] = [(16, 2, 16, 4096, 21), (16, 8, 16, 512, 19), (5, 2, 16, 512, 17), (7, 2, 16, 2048, 17)]
"""Those of f3rm-ext-big."""
ODD: list[Shape] = [(4, 1, 3, 40, 9), (6, 4, 8, 256, 14)]
"""One and four features per level; the former is not for tiny-cuda-nn, whose tables are multiples of eight."""


@pytest.fixture(params=["triton", "tcnn"])
def fast(request: pytest.FixtureRequest, cuda: torch.device) -> Backend:
    """A backend of CUDA that works here."""
    _require(request.param, cuda)
    return request.param


def _require(backend: Backend, cuda: torch.device) -> None:
    """Skips without a backend. One that is installed and does not work is an error, not a reason to skip."""
    reason = try_backend(backend, cuda)
    if reason == NOT_INSTALLED:
        pytest.skip("tiny-cuda-nn (tinycudann) is not installed" if backend == "tcnn" else "no triton")
    assert reason is None, reason


def _grid(shape: Shape, backend: Backend = "torch") -> HashGrid:
    levels, width, base, top, log2 = shape
    grid = HashGrid(levels, width, base, top, log2, backend=backend)
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


def _assert_close(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """A coordinate times a scale of thousands, in float32, carries an error of about 1e-4 cells."""
    (value, by_point, by_table), (true_value, true_by_point, true_by_table) = found, expected
    torch.testing.assert_close(value, true_value, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(by_table, true_by_table, atol=5e-3, rtol=1e-3)
    scale = true_by_point.abs().max()
    torch.testing.assert_close(by_point / scale, true_by_point / scale, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [2, 257, 20_000])
def test_torch_on_cuda_equals_the_cpu(shape: Shape, count: int, cuda: torch.device) -> None:
    points = _points(count)
    expected = _value_and_gradients(_grid(shape), points, torch.device("cpu"))
    _assert_close(_value_and_gradients(_grid(shape), points, cuda), expected)


def test_hashing_is_the_same_integer_arithmetic(cuda: torch.device) -> None:
    # At the vertices themselves a wrong row would be a wrong value, not a small error.
    grid = _grid((1, 2, 512, 512, 14))
    (level,) = grid.levels
    assert level.is_hashed
    vertices = torch.randint(1, 511, (5000, 3), generator=torch.Generator().manual_seed(4))
    points = (vertices - 0.5).double() / level.scale
    table = grid.table.detach().double()
    on_cpu = hash_grid_reference(points, table, grid.levels)
    on_cuda = hash_grid_reference(points.to(cuda), table.to(cuda), grid.levels)
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, atol=1e-9, rtol=1e-9)


def test_backends_by_device(cuda: torch.device) -> None:
    assert HashGrid(2, 2, 4, 8, 8, backend="torch").resolve_backend(cuda) == "torch"
    assert HashGrid(2, 2, 4, 8, 8, backend="numba").resolve_backend(cuda) == "torch"
    working = [name for name in ("tcnn", "triton") if try_backend(name, cuda) is None]
    assert HashGrid(2, 2, 4, 8, 8).resolve_backend(cuda) == [*working, "torch"][0]


@pytest.mark.parametrize("shape", [*SHAPES, *BIG, *ODD])
@pytest.mark.parametrize("count", [2, 5000])
def test_triton_equals_torch(shape: Shape, count: int, cuda: torch.device) -> None:
    _require("triton", cuda)
    points = _points(count)
    expected = _value_and_gradients(_grid(shape), points, cuda)
    _assert_close(_value_and_gradients(_grid(shape, "triton"), points, cuda), expected)


@pytest.mark.parametrize("shape", [*SHAPES[1:], *BIG])
def test_half_precision_equals_torch(shape: Shape, fast: Backend, cuda: torch.device) -> None:
    points = _points(5000)
    expected = _value_and_gradients(_grid(shape), points, cuda)
    with torch.autocast("cuda", dtype=torch.float16):
        assert _grid(shape, fast).to(cuda)(points.to(cuda)).dtype == torch.float16
        found = _value_and_gradients(_grid(shape, fast), points, cuda)
    # Eleven bits of values of up to four.
    torch.testing.assert_close(found[0], expected[0], atol=2e-2, rtol=2e-2)
    for gradient, true_gradient in zip(found[1:], expected[1:], strict=True):
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), true_gradient.flatten(), dim=0) > 0.999
        torch.testing.assert_close(gradient.norm(), true_gradient.norm(), rtol=1e-2, atol=0)


def test_a_table_moves_between_backends(fast: Backend, cuda: torch.device) -> None:
    trained, opened = _grid(SHAPES[2], fast).to(cuda), HashGrid(*SHAPES[2], backend="numba")
    opened.load_state_dict(trained.state_dict())
    points = _points(500)
    torch.testing.assert_close(trained(points.to(cuda)).cpu(), opened(points), atol=2e-2, rtol=2e-2)


def test_results_of_more_than_two_to_the_31_numbers(cuda: torch.device) -> None:
    _require("triton", cuda)
    count = 2**31 // 128 + 1000
    if torch.cuda.mem_get_info(cuda)[0] < 8 * 2**30:
        pytest.skip("less than 8 GiB of GPU memory are free")
    grid = _grid(BIG[1], "triton").to(cuda)
    points = torch.full((count, 3), 0.5, device=cuda)
    last = _points(100).to(cuda)
    points[-100:] = last
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        torch.testing.assert_close(grid(points)[-100:], grid(last))


def test_a_step_keeps_little_memory(fast: Backend, cuda: torch.device) -> None:
    grid, points = _grid(SHAPES[2], fast).to(cuda), torch.rand(2**18, 3, device=cuda)
    before = torch.cuda.memory_allocated(cuda)
    with torch.autocast("cuda", dtype=torch.float16):
        out = grid(points)
    # Features in half precision, and what tiny-cuda-nn rounds of the table; the reference keeps 4 KiB a point, 1 GiB.
    assert torch.cuda.memory_allocated(cuda) - before < out.nbytes + 2 * grid.table.nbytes + 2**24


@pytest.mark.parametrize("method", ["f3rm-ext", "f3rm-ext-big"])
@pytest.mark.parametrize("backend", ["auto", "tcnn", "triton", "torch"])
def test_steps_of_the_methods_in_mixed_precision(
    method: str,
    backend: Backend,
    make_rays: Callable[[int], RayBundle],
    make_spec: Callable[..., FeatureSpec],
    cuda: torch.device,
) -> None:
    if backend in ("tcnn", "triton"):
        _require(backend, cuda)
    config: Any = make_config(method)
    config.pipeline.model.backend = backend
    torch.manual_seed(0)
    model: F3rmModel = config.pipeline.model.setup(
        scene_box=SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])),
        num_train_data=5,
        metadata={"feature_specs": (make_spec("a", 64),), "feature_ray_fraction": 0.5},
        device=cuda,
    )
    model = model.to(cuda).train()
    generator = torch.Generator().manual_seed(5)
    batch = {
        "image": torch.tensor([0.9, 0.1, 0.3], device=cuda).expand(256, 3),  # learnt in a few steps
        "features": {"a": torch.nn.functional.normalize(torch.randn(128, 64, generator=generator)).to(cuda)},
    }
    groups = model.get_param_groups()
    optimizer = torch.optim.Adam([p for group in groups.values() for p in group], lr=1e-2, eps=1e-15, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    history: list[float] = []
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            outputs = model(make_rays(256).to(cuda))
            losses = model.get_loss_dict(outputs, batch, model.get_metrics_dict(outputs, batch))
        assert all(torch.isfinite(value) for value in losses.values()), losses
        scaler.scale(torch.stack([value.float() for value in losses.values()]).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(float(losses["rgb_loss"]))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert history[-1] < 0.95 * history[0], history
    # Those of the proposals are zero while their weights bound the field's.
    for grid in (model.field.grid, model.feature_field.grid):
        assert grid.table.grad is not None and grid.table.grad.any()
    with torch.no_grad():
        picture = model.eval()(make_rays(64).to(cuda))["rgb"]
    assert picture.dtype == torch.float32 and torch.isfinite(picture).all()
