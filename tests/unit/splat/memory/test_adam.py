"""The packed optimiser: Adam where it should be, and stable where plain Adam on half precision is not."""

import importlib
import io
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.densify import Change, apply
from f3rm_ext.splat.gaussians import degree_from_count
from f3rm_ext.splat.memory import adam, packed
from f3rm_ext.splat.memory.adam import PackedAdam, PackedAdamOptimizerConfig
from f3rm_ext.splat.memory.moments import MOMENTS
from f3rm_ext.splat.memory.packed import packed_sh_colors
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_colors

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether tests/cuda_contract/test_splat_triton.py runs the tests of the kernel again, with that of Triton."""
KINDS = pytest.mark.parametrize("kind", MOMENTS)


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of numba, or that of Triton in its interpreter."""
    for module in (adam, packed) if INTERPRETED else ():
        monkeypatch.setattr(module, "find_kernels", lambda name, _: importlib.import_module(name))


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has torch take the steps from now on."""

    def use() -> None:
        for module in (adam, packed):
            monkeypatch.setattr(module, "fits_numba", lambda _: False)
            monkeypatch.setattr(module, "find_kernels", lambda *_: None)

    return use


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks even for few rows."""
    monkeypatch.setattr(adam, "_CHUNK_CPU", 7)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def see(rest: Parameter, step: int, visible: slice = slice(None)) -> None:
    """A backward pass through one picture."""
    directions, weights = random(len(rest), 3, seed=step), random(len(rest), 3, seed=100 + step)
    degree = degree_from_count(rest.shape[1])
    colors = packed_sh_colors(degree, directions, torch.full((len(rest), 3), 9.0), rest)
    (colors * weights)[visible].sum().backward()


def walk(optimizer: PackedAdam, rest: Parameter, steps: range) -> None:
    """Takes steps through one picture each."""
    for step in steps:
        see(rest, step)
        optimizer.step()
        optimizer.zero_grad()


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state by way of a file."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("coeffs", [3, 8, 15])
def test_the_kernel_takes_the_steps_of_torch(images: int, coeffs: int, torch_alone: Callable[[], None]) -> None:
    results = []
    for begin in (lambda: None, torch_alone):
        begin()
        generator = torch.Generator().manual_seed(0)
        rest = Parameter(0.1 * torch.randn(37, coeffs, 3, generator=generator))
        optimizer, colors = PackedAdam([rest], lr=0.01), []
        for step in range(9):  # the first of lower degrees; each image shows half of the Gaussians
            for _ in range(images):
                directions, weights = torch.randn(2, 37, 3, generator=generator)
                weights *= torch.rand(37, 1, generator=generator) > 0.5
                degree = min(degree_from_count(coeffs), 1 + step // 3)
                colors.append(packed_sh_colors(degree, directions, torch.full((37, 3), 9.0), rest))
                (colors[-1] * weights).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state[rest]
        results.append([rest.detach(), *colors, *(state[name] for name in ("exp_avg", "exp_avg_sq", "seen"))])
    assert len(results[0][-1].unique()) > 1
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=2e-6, atol=2e-8)


@pytest.mark.skipif(not INTERPRETED, reason="numba's kernel does not round")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@KINDS
def test_the_kernel_rounds_to_the_neighbours_and_is_right_in_the_mean(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, torch_alone: Callable[[], None]
) -> None:
    """Many Gaussians with the same gradient: they get one of two numbers, by chance, with the exact one as mean."""
    many = 1000
    monkeypatch.setattr("f3rm_ext.splat.memory.triton_adam.ROWS", 1024)
    start = torch.tensor([0.3, -1e-5, 3e-4])
    results = []
    for begin in (lambda: None, torch_alone):
        begin()
        rest = Parameter(start.expand(many, 3, 3).to(dtype).clone())
        optimizer = PackedAdam([rest], lr=1e-4, moments=kind)
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


def test_large_and_small_numbers_stay_in_range() -> None:
    rest = Parameter(torch.full((37, 3, 3), 65504.0).half())
    rest.data[0], rest.data[1] = -65504.0, 0.0
    walk(PackedAdam([rest], lr=1e3), rest, range(3))
    assert torch.isfinite(rest).all() and rest[1].any()


def test_no_gaussians() -> None:
    rest = Parameter(torch.zeros(0, 15, 3))
    see(rest, 0)
    PackedAdam([rest]).step()


@pytest.mark.usefixtures("small_chunks")
def test_with_dense_gradients_it_is_adam() -> None:
    start = random(20, 5)
    ours, theirs = Parameter(start.clone()), Parameter(start.clone())
    pair = (PackedAdam([ours], lr=0.1), ours), (torch.optim.Adam([theirs], lr=0.1, eps=1e-15), theirs)
    for step in range(5):
        for optimizer, parameter in pair:
            parameter.grad = random(20, 5, seed=step)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("small_chunks")
@KINDS
def test_gaussians_that_are_not_visible_stay(kind: str) -> None:
    rest = Parameter(random(20, 15, 3).half())
    optimizer = PackedAdam([rest], lr=0.01, moments=kind)
    walk(optimizer, rest, range(1))
    before = rest.detach().clone()
    state = {k: v.clone() for k, v in optimizer.state[rest].items() if isinstance(v, Tensor)}
    see(rest, 1, slice(5, 15))
    optimizer.step()
    changed = (rest != before).flatten(1).any(1)
    assert changed[5:15].all() and not changed[:5].any() and not changed[15:].any()
    assert all(torch.equal(optimizer.state[rest][name][:5], value[:5]) for name, value in state.items())


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("share", "error"), [(1.0, 1e-5), (0.5, 0.02)])
def test_rows_seen_now_and_then_go_the_way_of_plain_adam(share: float, error: float) -> None:
    """What momentum does to a Gaussian that is not visible is made up for when it is visible again."""
    start = random(40, 15, 3)
    ours, theirs = Parameter(start.clone()), Parameter(start.clone())
    optimizer, reference = PackedAdam([ours], lr=0.01), torch.optim.Adam([theirs], lr=0.01, eps=1e-15)
    dc, last = torch.full((40, 3), 50.0), 80
    for step in range(last + 1):
        directions, weights = random(40, 3, seed=step % 3), 1 + 0.5 * random(40, 3, seed=100 + step)
        chance = torch.rand(40, 1, generator=torch.Generator().manual_seed(step))
        visible = (chance < share) | (step == last)
        for one, parameter, colors in ((optimizer, ours, packed_sh_colors), (reference, theirs, sh_colors)):
            (colors(3, directions, dc, parameter) * weights * visible).sum().backward()
            one.step()
            one.zero_grad()
    way = theirs.detach() - start
    assert (ours.detach() - theirs.detach()).norm() < error * way.norm()
    assert way.abs().mean() > 0.1


def test_updates_below_the_resolution_count_in_the_mean() -> None:
    """Half precision near 1 has steps of 5e-4 and 1e-3; one step of the optimiser is 1e-5."""
    parameter = Parameter(torch.ones(2000, 3).half())
    optimizer = PackedAdam([parameter], lr=1e-5)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameter.detach().double().mean().item() == pytest.approx(1 - 1e-3, abs=5e-5)


@cache
def error_after_training(dtype: torch.dtype, moments: str) -> float:
    """Fits coefficients of 200 Gaussians to noisy colours of random views, half of them visible at a time."""
    truth, rest = random(200, 15, 3) * 0.2, Parameter(torch.zeros(200, 15, 3, dtype=dtype))
    optimizer = PackedAdam([rest], lr=5e-3, moments=moments)
    dc = torch.full((200, 3), 9.0)
    for step in range(300):
        directions = random(200, 3, seed=step)
        target = packed_sh_colors(3, directions, dc, truth) + 0.05 * random(200, 3, seed=1000 + step)
        visible = random(200, seed=2000 + step) > 0
        (packed_sh_colors(3, directions, dc, rest) - target)[visible].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (rest.detach().float() - truth).square().mean().sqrt().item()


@KINDS
def test_learns_as_float32_does(kind: str) -> None:
    reference = error_after_training(torch.float32, "float32")
    assert reference < 0.06  # of 0.2: it has learned
    assert error_after_training(torch.float16, kind) < 1.05 * reference + 1e-4


@pytest.mark.usefixtures("small_chunks")
@KINDS
def test_a_resumed_run_goes_the_same_way(kind: str) -> None:
    whole = Parameter(random(20, 15, 3).half())
    optimizer = PackedAdam([whole], lr=0.01, moments=kind, seed=3)
    walk(optimizer, whole, range(2))
    part, other = Parameter(whole.detach().clone()), Parameter(whole.detach().clone())
    resumed, reseeded = (PackedAdam([parameter], lr=0.5, moments=kind) for parameter in (part, other))
    for one in (resumed, reseeded):
        one.load_state_dict(saved(optimizer))
    reseeded.param_groups[0]["seed"] = 4
    assert resumed.param_groups[0]["lr"] == 0.01 and resumed.param_groups[0]["seed"] == 3
    dtypes = {name: value.dtype for name, value in optimizer.state[whole].items() if isinstance(value, Tensor)}
    assert dtypes == {n: v.dtype for n, v in resumed.state[part].items() if isinstance(v, Tensor)}
    for parameter, one in ((whole, optimizer), (part, resumed), (other, reseeded)):
        walk(one, parameter, range(2, 4))
    assert torch.equal(part, whole) and not torch.equal(other, whole)


@pytest.mark.parametrize(("old", "new"), [(0, 0), (0, 15), (3, 0), (3, 8), (15, 3), (15, 15)])
@pytest.mark.parametrize("theirs", [*MOMENTS, "torch"])
@KINDS
def test_moments_of_another_kind_and_degree_are_converted(kind: str, theirs: Any, old: int, new: int) -> None:
    """Those of torch's Adam, too."""
    written = Parameter(random(20, old, 3))
    writer = torch.optim.Adam([written]) if theirs == "torch" else PackedAdam([written], moments=theirs)
    written.grad = random(20, old, 3, seed=1)
    writer.step()
    kept = min(old, new)
    parameter = Parameter(torch.cat([written.detach()[:, :kept], torch.zeros(20, new - kept, 3)], dim=1))
    reader = PackedAdam([parameter], moments=kind)
    reader.load_state_dict(saved(writer))
    assert reader.param_groups[0]["moments"] == kind
    wanted = MOMENTS["float32" if theirs == "torch" else theirs].read(writer.state[written], slice(None))
    for value, want in zip(MOMENTS[kind].read(reader.state[parameter], slice(None)), wanted, strict=True):
        assert value.shape == (20, new, 3) and not value[:, kept:].any()
        largest = want[:, :kept].abs().max() if kept else 0
        assert ((value[:, :kept] - want[:, :kept]).abs() <= 0.02 * largest).all()
    parameter.grad = random(20, new, 3, seed=2)
    reader.step()
    assert reader.state[parameter]["step"] == 2 and parameter.isfinite().all()


@pytest.mark.parametrize("new", [3, 15])
def test_remainders_of_another_degree_follow_their_coefficients(new: int) -> None:
    written = Parameter(random(20, 8, 3).half())
    writer = PackedAdam([written], reflective_above=0.01)
    written.grad = random(20, 8, 3, seed=1).half()
    writer.step()
    parameter = Parameter(random(20, new, 3).half())
    reader = PackedAdam([parameter], reflective_above=0.01)
    reader.load_state_dict(saved(writer))
    found, wanted = reader.state[parameter]["remainder"], writer.state[written]["remainder"]
    assert found.shape == (1, 21, new, 3) and torch.equal(found[:, :, : min(8, new)], wanted[:, :, : min(8, new)])
    parameter.grad = random(20, new, 3, seed=2).half()
    reader.step()


def test_moments_of_another_shape_are_refused() -> None:
    parameter = Parameter(random(20, 15, 3))
    writer = PackedAdam([parameter])
    see(parameter, 0)
    writer.step()
    for shape in ((19, 15, 3), (20, 15, 4), (20, 15)):
        with pytest.raises(ValueError, match=r"\(20, 15, 3\).*\(\d+, 15"):
            PackedAdam([Parameter(random(*shape))]).load_state_dict(saved(writer))


@KINDS
def test_rows_can_be_added_and_removed(kind: str) -> None:
    params = {"features_rest": Parameter(random(20, 15, 3).half())}
    optimizers = {"features_rest": PackedAdam([params["features_rest"]], lr=0.01, moments=kind)}
    see(params["features_rest"], 0)
    optimizers["features_rest"].step()
    before = MOMENTS[kind].read(optimizers["features_rest"].state[params["features_rest"]], slice(None))
    fresh = torch.tensor([False, True, False])
    apply(Change(20, torch.tensor([19, 19, 3]), fresh), params, optimizers)
    state = optimizers["features_rest"].state[params["features_rest"]]
    assert params["features_rest"].dtype == torch.float16 and state["step"] == 1
    for value, old in zip(MOMENTS[kind].read(state, slice(None)), before, strict=True):
        assert torch.equal(value[[0, 2]], old[[19, 3]]) and value[1].abs().max() == 0
    see(params["features_rest"], 1)
    optimizers["features_rest"].step()
    assert params["features_rest"].isfinite().all()


def test_clipping_is_refused() -> None:
    with pytest.raises(ConfigError, match="max-norm"):
        PackedAdamOptimizerConfig(max_norm=1.0).setup([Parameter(torch.zeros(1))])


def test_a_closure_is_called() -> None:
    parameter = Parameter(torch.ones(2))

    def closure() -> float:
        parameter.grad = torch.ones(2)
        return 5.0

    assert PackedAdam([parameter], lr=0.1).step(closure) == 5.0
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 0.9))
