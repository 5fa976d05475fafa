"""Splat rendering on CUDA: gsplat's kernels give the pictures and gradients of the reference, and of the CPU."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize import Backend, Rasterization, rasterize
from f3rm_ext.splat.rasterize.camera import Camera
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_colors

WIDTH, HEIGHT = 75, 50


def _leaves(count: int, channels: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    viewmat, (c, s) = torch.eye(4), (math.cos(0.3), math.sin(0.3))
    viewmat[:3, :3] = torch.tensor([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])
    viewmat[2, 3] = 3.0
    return {
        "means": torch.rand(count, 3, generator=generator) * 2 - 1,
        "quats": torch.randn(count, 4, generator=generator),
        "sizes": 0.08 * torch.exp(0.5 * torch.randn(count, 3, generator=generator)),
        "alphas": torch.rand(count, generator=generator) * 0.95 + 0.02,
        "colors": torch.rand(count, channels, generator=generator),
        "viewmat": viewmat,
        "background": torch.rand(channels, generator=generator),
    }


def _draw(leaves: dict[str, Tensor], backend: Backend = "auto", absgrad: bool = False, **options: Any) -> Rasterization:
    viewmat = leaves["viewmat"]
    K = torch.tensor([[80.0, 0.0, 37.2], [0.0, 82.0, 25.1], [0.0, 0.0, 1.0]]).to(viewmat)
    shapes = Ellipsoids(*(leaves[name] for name in Ellipsoids._fields))
    camera = Camera(viewmat, K, WIDTH, HEIGHT, **options)
    return rasterize(shapes, leaves["colors"], camera, leaves["background"], absgrad=absgrad, backend=backend)


def _results(
    leaves: dict[str, Any], device: torch.device, dtype: torch.dtype, backend: Backend, **options: Any
) -> dict[str, Tensor]:
    """Values and gradients, on the CPU in float64."""
    inputs = {name: value.to(device, dtype, copy=True).requires_grad_() for name, value in leaves.items()}
    rendered = _draw(inputs, backend, **options)
    rendered.means2d.retain_grad()
    values = {"colors": rendered.colors, "depth": rendered.depth, "alpha": rendered.alpha}
    generator, total = torch.Generator().manual_seed(5), torch.zeros((), device=device, dtype=dtype)
    for value in values.values():
        total = total + (value * torch.randn(value.shape, generator=generator).to(value)).sum()
    total.backward()
    found = {**values, "means2d": rendered.means2d, "radii": rendered.radii, "by means2d": rendered.means2d.grad}
    if options.get("absgrad"):
        found["absgrad"] = rendered.means2d.absgrad  # type: ignore[attr-defined]
    found.update({f"by {name}": value.grad for name, value in inputs.items()})
    return {name: value.detach().double().cpu() for name, value in found.items() if value is not None}


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # By norm: among thousands of pixels one may be within rounding of a threshold and decide otherwise.
        error = (found[name] - value).norm() / value.norm().clamp(min=1e-12)
        assert error < 2e-3, f"{name}: {error:.1e}"


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("channels", [1, 3, 31, 40])
def test_gsplat_equals_the_reference(antialiased: bool, channels: int, cuda: torch.device) -> None:
    for seed in range(3):
        leaves = _leaves(200, channels, seed)
        options = {"antialiased": antialiased, "absgrad": channels < 32}
        expected = _results(leaves, torch.device("cpu"), torch.float64, "torch", **options)
        _assert_close(_results(leaves, cuda, torch.float32, "auto", **options), expected)


def test_gsplat_equals_the_kernels_of_the_cpu_at_size(cuda: torch.device) -> None:
    leaves = _leaves(20_000, 3, 1)
    leaves["sizes"] *= 0.2
    expected = _results(leaves, torch.device("cpu"), torch.float32, "numba", absgrad=True)
    _assert_close(_results(leaves, cuda, torch.float32, "gsplat", absgrad=True), expected)


def test_the_reference_runs_on_cuda(cuda: torch.device) -> None:
    leaves = _leaves(50, 3, 2)
    expected = _results(leaves, torch.device("cpu"), torch.float64, "torch", absgrad=True)
    _assert_close(_results(leaves, cuda, torch.float64, "torch", absgrad=True), expected)


@pytest.mark.parametrize("count", [0, 20])
def test_nothing_visible_leaves_the_background(count: int, cuda: torch.device) -> None:
    leaves = _leaves(count, 3, 3)
    leaves["means"][:, 2] -= 50.0
    inputs = {name: value.to(cuda).requires_grad_() for name, value in leaves.items()}
    rendered = _draw(inputs, absgrad=True)
    assert torch.equal(rendered.colors, inputs["background"].expand(HEIGHT, WIDTH, 3))
    assert rendered.alpha.abs().sum() == 0 and rendered.radii.abs().sum() == 0
    assert rendered.means2d.shape == (count, 2)
    rendered.colors.sum().backward()
    assert inputs["background"].grad is not None
    assert torch.equal(inputs["background"].grad, torch.full((3,), float(WIDTH * HEIGHT), device=cuda))


def test_gradients_of_colors_alone(cuda: torch.device) -> None:
    leaves = {name: value.to(cuda) for name, value in _leaves(300, 128, 4).items()}
    colors = leaves.pop("colors").requires_grad_()
    upstream = torch.randn(HEIGHT, WIDTH, 128, device=cuda)
    found = {}
    for backend in ("gsplat", "torch"):
        picture = _draw({**leaves, "colors": colors}, backend).colors
        (found[backend],) = torch.autograd.grad(picture, colors, upstream)
    assert (found["gsplat"] - found["torch"]).norm() < 2e-3 * found["torch"].norm()


@pytest.mark.parametrize("degree", range(4))
def test_colors_by_direction(degree: int, cuda: torch.device) -> None:
    generator = torch.Generator().manual_seed(6)
    directions, dc, rest = (torch.randn(500, *tail, generator=generator) for tail in ((3,), (3,), (15, 3)))
    expected = sh_colors(degree, directions, dc, rest)
    found = sh_colors(degree, directions.to(cuda), dc.to(cuda), rest.to(cuda))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
