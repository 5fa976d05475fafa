"""Triton kernel of PackedAdam, interpreted; run by tests/cuda_contract/test_splat_triton.py."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.splat.gaussians import sh_rest_count
from f3rm_ext.splat.memory import adam, packed, triton_adam
from f3rm_ext.splat.memory.adam import PackedAdam
from f3rm_ext.splat.memory.moments import MOMENTS
from f3rm_ext.splat.memory.packed import packed_sh_colors

COUNT = 37


@pytest.fixture
def kernel_on_cpu() -> Iterator[pytest.MonkeyPatch]:
    """A patch; the kernel is used while it is ``use_kernel``'d."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def use_kernel(patch: pytest.MonkeyPatch, wanted: bool) -> None:
    for module in (adam, packed):
        patch.setattr(module, "find_kernels", lambda *_: triton_adam if wanted else None)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def see(rest: Parameter, seed: int, degree: int = 3) -> None:
    """A backward pass through one image that shows about half of the Gaussians."""
    weights = random(len(rest), 3, seed=100 + seed) * (random(len(rest), 1, seed=200 + seed) > 0)
    colors = packed_sh_colors(degree, random(len(rest), 3, seed=seed), torch.full((len(rest), 3), 9.0), rest)
    (colors * weights).sum().backward()


def take_steps(
    patch: pytest.MonkeyPatch, kernel: bool, rest: Parameter, optimizer: PackedAdam, steps: range, images: int = 1
) -> None:
    use_kernel(patch, kernel)
    for step in steps:
        for image in range(images):
            see(rest, 10 * step + image, min(3, 1 + step // 3))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("images", [1, 2])
def test_in_single_precision_it_is_the_torch_path(images: int, kernel_on_cpu: pytest.MonkeyPatch) -> None:
    results = []
    for kernel in (False, True):
        rest = Parameter(0.1 * random(COUNT, 15, 3))
        optimizer = PackedAdam([rest], lr=0.01)
        take_steps(kernel_on_cpu, kernel, rest, optimizer, range(9), images)
        results.append([rest.detach(), *(optimizer.state[rest][name] for name in ("exp_avg", "exp_avg_sq", "seen"))])
    # Some Gaussians were missed for several steps, and the first steps are of lower degrees.
    assert len(results[0][-1].unique()) > 1
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-8)


@pytest.mark.parametrize("degree", [1, 2])
def test_fewer_coefficients(degree: int, kernel_on_cpu: pytest.MonkeyPatch) -> None:
    results = []
    for kernel in (False, True):
        rest = Parameter(0.1 * random(COUNT, sh_rest_count(degree), 3))
        optimizer = PackedAdam([rest], lr=0.01)
        use_kernel(kernel_on_cpu, kernel)
        see(rest, 0, degree)
        optimizer.step()
        results.append(rest.detach())
    torch.testing.assert_close(results[1], results[0], rtol=2e-6, atol=2e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", MOMENTS)
def test_rounding_goes_to_the_neighbours_and_is_right_in_the_mean(
    kind: str, dtype: torch.dtype, kernel_on_cpu: pytest.MonkeyPatch
) -> None:
    """Many Gaussians with the same gradient: they get one of two numbers, by chance, with the exact one as mean."""
    many = 1000
    kernel_on_cpu.setattr(triton_adam, "ROWS", 1024)
    start = torch.tensor([0.3, -1e-5, 3e-4])
    results = []
    for kernel in (False, True):
        rest = Parameter(start.expand(many, 3, 3).to(dtype).clone())
        optimizer = PackedAdam([rest], lr=1e-4, moments=kind)  # type: ignore[arg-type]
        use_kernel(kernel_on_cpu, kernel)
        for step in range(2):
            directions = random(1, 3, seed=step).expand(many, 3)
            weights = random(1, 3, seed=100 + step).expand(many, 3)
            (packed_sh_colors(1, directions, torch.full((many, 3), 9.0), rest) * weights).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {name: value for name, value in optimizer.state[rest].items() if isinstance(value, Tensor)}
        first, second = MOMENTS[kind].read(state, slice(None))
        results.append([rest.detach().double(), first.double(), second.double().sqrt()])
    for expected, found in zip(*results, strict=True):
        spread = torch.maximum(expected.std(dim=0), found.std(dim=0))
        apart = (found.mean(dim=0) - expected.mean(dim=0)).abs()
        assert (apart < 7 * spread / many**0.5 + 1e-6 * expected.mean(dim=0).abs()).all()
        assert found.std(dim=0).mean().item() == pytest.approx(expected.std(dim=0).mean().item(), rel=0.1, abs=1e-12)


def test_random_numbers_are_those_of_seed_and_step(kernel_on_cpu: pytest.MonkeyPatch) -> None:
    """A resumed run goes on exactly, and Gaussians, seeds and steps differ."""

    def fresh(seed: int = 0) -> tuple[Parameter, PackedAdam]:
        rest = Parameter(torch.full((COUNT, 15, 3), 0.3).half())
        return rest, PackedAdam([rest], lr=1e-4, moments="bfloat16", seed=seed)

    rest, optimizer = fresh()
    take_steps(kernel_on_cpu, True, rest, optimizer, range(2))
    other, resumed = fresh()
    other.data.copy_(rest.data)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    reseeded, third = fresh(1)
    for parameter, taken, steps in ((rest, optimizer, (2, 4)), (other, resumed, (2, 4)), (reseeded, third, (0, 4))):
        take_steps(kernel_on_cpu, True, parameter, taken, range(*steps))
    assert torch.equal(rest, other) and not torch.equal(rest, reseeded)
    assert all(torch.equal(optimizer.state[rest][n], resumed.state[other][n]) for n in ("exp_avg", "exp_avg_sq"))


def test_large_and_small_numbers_stay_in_range(kernel_on_cpu: pytest.MonkeyPatch) -> None:
    use_kernel(kernel_on_cpu, True)
    rest = Parameter(torch.full((COUNT, 3, 3), 65504.0).half())
    rest.data[0], rest.data[1] = -65504.0, 0.0
    optimizer = PackedAdam([rest], lr=1e3)
    for step in range(3):
        see(rest, step, 1)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(rest).all() and rest[1].any()


def test_no_gaussians_and_the_trial(kernel_on_cpu: pytest.MonkeyPatch) -> None:
    use_kernel(kernel_on_cpu, True)
    rest = Parameter(torch.zeros(0, 15, 3))
    see(rest, 0)
    PackedAdam([rest]).step()
    triton_adam.try_out(torch.device("cpu"))
