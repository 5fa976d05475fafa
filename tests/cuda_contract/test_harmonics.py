"""Colours on CUDA by gsplat's kernel, over a stand-in that computes what the kernel computes."""

from collections.abc import Callable
from typing import Any

import gsplat.cuda._wrapper
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.splat.gaussians import sh_rest_count
from f3rm_ext.splat.memory import packed
from f3rm_ext.splat.memory.packed import packed_sh_colors
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_colors_reference

COUNT = 40
FORWARD = ("compute_sh_fwd", "spherical_harmonics_fwd")
"""Names of the kernel in gsplat 1.4 and 1.5."""


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, ...]]]:
    """gsplat has kernels; gives the degrees and shapes of coefficients that the one for harmonics was called with."""
    calls: list[tuple[int, tuple[int, ...]]] = []

    def evaluate(degree: int, directions: Tensor, coefficients: Tensor, masks: Tensor | None) -> Tensor:
        from gsplat.cuda._torch_impl import _spherical_harmonics

        assert masks is None and type(degree) is int
        for tensor in (directions, coefficients):
            assert tensor.is_contiguous() and tensor.dtype == torch.float32 and tensor.device.type == "cuda"
        calls.append((degree, tuple(coefficients.shape)))
        return _spherical_harmonics(degree, directions, coefficients)

    def find(name: str) -> Callable[..., Any]:
        assert name in FORWARD
        return evaluate

    monkeypatch.setattr(gsplat.cuda._wrapper, "_make_lazy_cuda_func", find)
    monkeypatch.setattr("f3rm_ext.compat.gsplat._gsplat_kernels", object)
    monkeypatch.setattr(packed, "CHUNK_KERNEL", 16)
    return calls


def _scene(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    directions, dc = torch.randn(COUNT, 3, generator=generator), torch.randn(COUNT, 3, generator=generator)
    return directions, dc, (torch.randn(COUNT, sh_rest_count(3), 3, generator=generator) * 0.3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_kernel_evaluates_stored_coefficients(
    degree: int, dtype: torch.dtype, cuda: torch.device, kernel_calls: list[tuple[int, tuple[int, ...]]]
) -> None:
    directions, dc, rest = _scene(dtype)
    found = packed_sh_colors(degree, directions.to(cuda), dc.to(cuda), Parameter(rest.to(cuda)))
    assert found.device == cuda and found.dtype == torch.float32
    expected = sh_colors_reference(degree, directions, dc, rest.float())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    assert kernel_calls == [(degree, (rows, (degree + 1) ** 2, 3)) for rows in (16, 16, 8)]


def test_degree_zero_needs_no_kernel(cuda: torch.device, kernel_calls: list[tuple[int, tuple[int, ...]]]) -> None:
    directions, dc, rest = _scene(torch.float32)
    found = packed_sh_colors(0, directions.to(cuda), dc.to(cuda), Parameter(rest.to(cuda)))
    torch.testing.assert_close(found.cpu(), sh_colors_reference(0, directions, dc, rest))
    assert not kernel_calls


def test_without_kernels_torch_evaluates_them(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("nvcc fatal: Unsupported gpu architecture")

    directions, dc, rest = _scene(torch.float32)
    for kernels in (lambda: None, broken):
        monkeypatch.setattr("f3rm_ext.compat.gsplat._gsplat_kernels", kernels)
        found = packed_sh_colors(3, directions.to(cuda), dc.to(cuda), Parameter(rest.to(cuda)))
        torch.testing.assert_close(found.cpu(), sh_colors_reference(3, directions, dc, rest), rtol=1e-5, atol=1e-6)
