"""Half-stored harmonics, small moments and growth on CUDA: the same results as on the CPU, and the promised memory."""

import pytest
import torch
from torch.nn import Parameter

from f3rm_ext.splat.densify import DensifyOptions, make_densifier
from f3rm_ext.splat.densify.mcmc import MAX_COPIES, compute_relocation
from f3rm_ext.splat.memory import adam, packed
from f3rm_ext.splat.memory.adam import PackedAdam
from f3rm_ext.splat.memory.moments import MOMENTS
from f3rm_ext.splat.memory.packed import packed_sh_colors
from f3rm_ext.splat.memory.rounding import to_bfloat16, to_half
from f3rm_ext.splat.rasterize import Rasterization
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_colors
from f3rm_ext.splat.triton_kernels import find_kernels

MIB = 2**20


def test_relocation_agrees_with_gsplats_kernel(cuda: torch.device) -> None:
    relocation = pytest.importorskip("gsplat.relocation")
    from gsplat.strategy import MCMCStrategy

    generator = torch.Generator().manual_seed(0)
    alphas = torch.rand(500, generator=generator).mul(0.98).add(0.01)
    sizes, copies = torch.rand(500, 3, generator=generator), torch.randint(1, 20, (500,), generator=generator)
    binoms = MCMCStrategy().initialize_state()["binoms"].to(cuda)
    theirs = relocation.compute_relocation(alphas.to(cuda), sizes.to(cuda), copies.to(cuda), binoms)
    assert MAX_COPIES == len(binoms)
    for ours, value in zip(compute_relocation(alphas.to(cuda), sizes.to(cuda), copies.to(cuda)), theirs, strict=True):
        torch.testing.assert_close(ours, value, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("rounding", [to_half, to_bfloat16])
@pytest.mark.parametrize("value", [0.1, -3e-5, 4.4e-7])
def test_random_rounding_is_right_in_the_mean(cuda: torch.device, rounding: object, value: float) -> None:
    generator = torch.Generator(cuda).manual_seed(0)
    rounded = rounding(torch.full((100_000,), value, device=cuda), generator).double()  # type: ignore[operator]
    gap = (rounded.max() - rounded.min()).item()
    assert len(rounded.unique()) == 2
    assert rounded.mean().item() == pytest.approx(value, abs=4 * gap / 100_000**0.5 + 1e-7 * abs(value))


@pytest.mark.parametrize("kind", MOMENTS)
def test_steps_are_those_of_the_cpu_up_to_rounding(cuda: torch.device, kind: str) -> None:
    results = []
    for device in (torch.device("cpu"), cuda):
        rest = Parameter(torch.zeros(300, 15, 3, device=device, dtype=torch.float16))
        optimizer = PackedAdam([rest], lr=1e-3, moments=kind)  # type: ignore[arg-type]
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            directions = torch.randn(300, 3, generator=generator).to(device)
            weights = torch.randn(300, 3, generator=generator).to(device)
            (packed_sh_colors(3, directions, torch.full_like(weights, 9.0), rest) * weights).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(rest.detach().float().cpu())
    assert (results[0] - results[1]).abs().max() < 3e-3 and results[0].abs().mean() > 1e-3


def test_a_step_takes_no_more_than_storage_moments_and_packed_gradients(cuda: torch.device) -> None:
    """What a million Gaussians add to the peak, harmonics alone: stored, moments, gradient, and one chunk."""
    count = 1_000_000
    directions, dc = torch.randn(count, 3, device=cuda), torch.full((count, 3), 9.0, device=cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    rest = Parameter(torch.zeros(count, 15, 3, device=cuda, dtype=torch.float16))
    optimizer = PackedAdam([rest], moments="bfloat16")
    for _ in range(2):
        packed_sh_colors(3, directions, dc, rest).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = (torch.cuda.max_memory_allocated(cuda) - before) / MIB
    kept = count * (45 * 2 + 2 * 45 * 2 + 32)  # float16, two bfloat16 moments; direction, gradient and index
    colors = 12 * count * 12  # directions, colours and their gradients, a dozen tensors of three numbers
    chunk = 2**18 * 45 * 4 * 10
    assert peak < (kept + colors + chunk) / MIB


@pytest.mark.parametrize("strategy", ["default", "mcmc"])
def test_growth_runs_on_the_device_and_leaves_its_random_numbers_alone(cuda: torch.device, strategy: str) -> None:
    shapes = {"means": (3,), "scales": (3,), "quats": (4,), "opacities": (1,), "features_rest": (15, 3)}
    params = {name: Parameter(torch.rand(50, *shape, device=cuda) - 4) for name, shape in shapes.items()}
    params["opacities"].data.fill_(1.0)
    optimizers = {name: torch.optim.Adam([value], lr=1e-5) for name, value in params.items()}

    means2d = torch.zeros(50, 2, device=cuda, requires_grad=True)
    means2d.grad = torch.ones_like(means2d)
    radii = torch.ones(50, dtype=torch.int32, device=cuda)
    plane = torch.zeros(8, 8, device=cuda)
    seen = Rasterization(torch.zeros(8, 8, 3, device=cuda), plane, plane, means2d, radii)
    densifier = make_densifier(DensifyOptions(strategy=strategy, reset_every=0), 1.0)  # type: ignore[arg-type]
    torch.cuda.manual_seed(0)
    expected = torch.rand(3, device=cuda)
    torch.cuda.manual_seed(0)
    change = densifier.step_post_backward(600, seen, params, optimizers)
    assert change.new_count > 50 and params["features_rest"].device.type == "cuda"
    assert torch.equal(torch.rand(3, device=cuda), expected)


@pytest.fixture
def kernels(cuda: torch.device) -> object:
    """The optimiser's Triton kernel."""
    pytest.importorskip("triton")
    found = find_kernels(packed.TRITON_KERNELS, cuda)
    assert found is not None, "Triton is installed, but its kernel does not work"
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_gsplat_evaluates_harmonics(degree: int, dtype: torch.dtype, cuda: torch.device) -> None:
    directions, dc = torch.randn(1000, 3, device=cuda), torch.rand(1000, 3, device=cuda)
    rest = Parameter((0.3 * torch.randn(1000, 15, 3, device=cuda)).to(dtype))
    expected = sh_colors(degree, directions, dc, rest.float())
    torch.testing.assert_close(packed_sh_colors(degree, directions, dc, rest), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", MOMENTS)
def test_the_kernel_takes_the_steps_of_torch(
    kind: str, dtype: torch.dtype, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly up to rounding in float32; in the mean where numbers are rounded by chance."""
    count = 4000
    results = []
    for in_torch in (True, False):
        with monkeypatch.context() as patch:
            if in_torch:
                for module in (adam, packed):
                    patch.setattr(module, "find_kernels", lambda *_: None)
            rest = Parameter(torch.full((count, 15, 3), 0.3, device=cuda, dtype=dtype))
            optimizer = PackedAdam([rest], lr=1e-3, moments=kind)  # type: ignore[arg-type]
            for step in range(6):
                generator = torch.Generator().manual_seed(step)
                directions = torch.randn(1, 3, generator=generator).to(cuda).expand(count, 3)
                weights = (
                    torch.randn(1, 3, generator=generator).to(cuda)
                    * (torch.arange(count, device=cuda) % 3 > step % 2)[:, None]
                )
                (packed_sh_colors(3, directions, torch.full_like(directions, 9.0), rest) * weights).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append(rest.detach().float())
    if (kind, dtype) == ("float32", torch.float32):
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-7)
    else:
        for kept in range(3):
            one, other = (value[kept::3].mean(dim=0) for value in results)
            assert (one - other).abs().max() < 1e-4


@pytest.mark.usefixtures("kernels")
def test_a_step_of_the_harmonics_does_not_wait_for_the_gpu(cuda: torch.device) -> None:
    rest = Parameter(torch.zeros(5000, 15, 3, device=cuda))
    optimizer = PackedAdam([rest])
    directions, dc = torch.randn(5000, 3, device=cuda), torch.rand(5000, 3, device=cuda)
    for mode in ("default", "error"):  # the first step compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            packed_sh_colors(3, directions, dc, rest).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
