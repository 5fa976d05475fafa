"""Triton kernel of PackedAdam, interpreted; run by tests/cuda_contract/test_splat_triton.py."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.splat.memory import adam, packed, triton_adam
from f3rm_ext.splat.memory.adam import PackedAdam
from f3rm_ext.splat.memory.moments import MOMENTS
from f3rm_ext.splat.memory.packed import packed_sh_colors

COUNT = 37


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is used on the CPU."""
    for module in (adam, packed):
        monkeypatch.setattr(module, "find_kernels", lambda *_: triton_adam)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def take_steps(rest: Parameter, optimizer: PackedAdam, steps: range, degree: int = 3) -> None:
    """Takes steps for an image each that shows about half of the Gaussians."""
    for step in steps:
        weights = random(len(rest), 3, seed=100 + step) * (random(len(rest), 1, seed=200 + step) > 0)
        colors = packed_sh_colors(degree, random(len(rest), 3, seed=step), torch.full((len(rest), 3), 9.0), rest)
        (colors * weights).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", MOMENTS)
def test_rounding_goes_to_the_neighbours_and_is_right_in_the_mean(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many Gaussians with the same gradient: they get one of two numbers, by chance, with the exact one as mean."""
    many = 1000
    monkeypatch.setattr(triton_adam, "ROWS", 1024)
    start = torch.tensor([0.3, -1e-5, 3e-4])
    results = []
    for kernels in (triton_adam, None):
        for module in (adam, packed):
            monkeypatch.setattr(module, "find_kernels", lambda *_, kernels=kernels: kernels)
        rest = Parameter(start.expand(many, 3, 3).to(dtype).clone())
        optimizer = PackedAdam([rest], lr=1e-4, moments=kind)  # type: ignore[arg-type]
        for step in range(2):
            directions = random(1, 3, seed=step).expand(many, 3)
            weights = random(1, 3, seed=100 + step).expand(many, 3)
            (packed_sh_colors(1, directions, torch.full((many, 3), 9.0), rest) * weights).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {name: value for name, value in optimizer.state[rest].items() if isinstance(value, Tensor)}
        first, second = MOMENTS[kind].read(state, slice(None))
        results.append([rest.detach().double(), first.double(), second.double().sqrt()])
    for found, expected in zip(*results, strict=True):
        spread = torch.maximum(expected.std(dim=0), found.std(dim=0))
        apart = (found.mean(dim=0) - expected.mean(dim=0)).abs()
        assert (apart < 7 * spread / many**0.5 + 1e-6 * expected.mean(dim=0).abs()).all()
        assert found.std(dim=0).mean().item() == pytest.approx(expected.std(dim=0).mean().item(), rel=0.1, abs=1e-12)


def test_random_numbers_are_those_of_seed_and_step() -> None:
    """A resumed run goes on exactly, and Gaussians, seeds and steps differ."""

    def fresh(seed: int = 0) -> tuple[Parameter, PackedAdam]:
        rest = Parameter(torch.full((COUNT, 15, 3), 0.3).half())
        return rest, PackedAdam([rest], lr=1e-4, moments="bfloat16", seed=seed)

    rest, optimizer = fresh()
    take_steps(rest, optimizer, range(2))
    other, resumed = fresh()
    other.data.copy_(rest.data)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    reseeded, third = fresh(1)
    for parameter, taken, steps in ((rest, optimizer, (2, 4)), (other, resumed, (2, 4)), (reseeded, third, (0, 4))):
        take_steps(parameter, taken, range(*steps))
    assert torch.equal(rest, other) and not torch.equal(rest, reseeded)
    assert all(torch.equal(optimizer.state[rest][n], resumed.state[other][n]) for n in ("exp_avg", "exp_avg_sq"))


def test_large_and_small_numbers_stay_in_range() -> None:
    rest = Parameter(torch.full((COUNT, 3, 3), 65504.0).half())
    rest.data[0], rest.data[1] = -65504.0, 0.0
    take_steps(rest, PackedAdam([rest], lr=1e3), range(3), degree=1)
    assert torch.isfinite(rest).all() and rest[1].any()


def test_no_gaussians() -> None:
    rest = Parameter(torch.zeros(0, 15, 3))
    take_steps(rest, PackedAdam([rest]), range(1))
