"""The steps of the CUDA backend, taken on the CPU with stand-ins of gsplat's kernels made of its own torch pieces."""

import gc
import itertools
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import gsplat
import pytest
import torch
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.rasterize import gsplat_backend, rasterize
from f3rm_ext.splat.rasterize.camera import TILE_PX
from f3rm_ext.splat.rasterize.reference import pixel_weights


class _AbsoluteGradient(torch.autograd.Function):
    """Leaves an absolute gradient on its input in the way of gsplat's kernel, and passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, centres: Tensor) -> Tensor:
        ctx.save_for_backward(centres)
        return centres.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (centres,) = ctx.saved_tensors
        centres.absgrad = grads[0].abs()
        return grads[0]


def _project(means: Tensor, covars: None, quats: Tensor, scales: Tensor, viewmats: Tensor, Ks: Tensor, width: int,
             height: int, *, eps2d: float, near_plane: float, far_plane: float, radius_clip: float,
             calc_compensations: bool) -> Any:  # fmt: skip
    from gsplat.cuda._torch_impl import _fully_fused_projection, _quat_scale_to_covar_preci

    assert covars is None and radius_clip == 0.0
    covariances, _ = _quat_scale_to_covar_preci(quats, scales, compute_preci=False)
    radii, *values = _fully_fused_projection(
        means, covariances, viewmats, Ks, width, height, eps2d, near_plane, far_plane, calc_compensations
    )
    # The kernel leaves numbers of what is not drawn uninitialised.
    hidden = radii == 0
    spoiled = [
        None if v is None else torch.where(hidden.reshape(1, -1, *[1] * (v.dim() - 2)), torch.nan, v) for v in values
    ]
    return radii, *spoiled


def _composite(centres: Tensor, conics: Tensor, colors: Tensor, alphas: Tensor, width: int, height: int, tile: int,
               offsets: Tensor, flat: Tensor, *, backgrounds: Tensor, absgrad: bool) -> Any:  # fmt: skip
    assert tile == TILE_PX and colors.shape[-1] <= gsplat_backend.CHANNEL_CHUNK
    centres = _AbsoluteGradient.apply(centres)[0] if absgrad else centres[0]
    bounds = [*offsets.flatten().tolist(), len(flat)]
    picture, accumulation = torch.zeros(1, height, width, colors.shape[-1]), torch.zeros(1, height, width, 1)
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        row, column = divmod(number, offsets.shape[2])
        ys = torch.arange(row * tile, min((row + 1) * tile, height))
        xs = torch.arange(column * tile, min((column + 1) * tile, width))
        pixels = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), dim=-1).reshape(-1, 1, 2) + 0.5
        index = flat[start:stop].long()
        everywhere = torch.ones(len(pixels), len(index), dtype=torch.bool)
        weights = pixel_weights(pixels - centres[index], conics[0, index], alphas[0, index], everywhere)
        covered = weights.sum(dim=1, keepdim=True)
        shown = weights @ colors[0, index] + (1 - covered) * backgrounds[0]
        picture[:, ys[0] : ys[-1] + 1, xs[0] : xs[-1] + 1] = shown.reshape(len(ys), len(xs), -1)
        accumulation[:, ys[0] : ys[-1] + 1, xs[0] : xs[-1] + 1] = covered.reshape(len(ys), len(xs), 1)
    return picture, accumulation


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """gsplat without CUDA."""
    from gsplat.cuda._torch_impl import _isect_offset_encode, _isect_tiles

    monkeypatch.setattr(gsplat_backend.compat, "check_gsplat_kernels", lambda: None)
    monkeypatch.setattr(gsplat, "fully_fused_projection", _project)
    monkeypatch.setattr(gsplat, "isect_tiles", _isect_tiles)
    monkeypatch.setattr(gsplat, "isect_offset_encode", _isect_offset_encode)
    monkeypatch.setattr(gsplat, "rasterize_to_pixels", _composite)
    monkeypatch.setattr("f3rm_ext.splat.rasterize.resolve_backend", lambda backend, device: backend)


def _off_screen(scene: Any) -> None:
    scene.means[::3, 0] *= 12.0


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("channels", [3, 40])
def test_steps_give_the_reference(channels: int, antialiased: bool, make_scene: Any, differentiate: Any) -> None:
    scene = make_scene(channels=channels, change=_off_screen, antialiased=antialiased)
    found, expected = differentiate(scene, "gsplat"), differentiate(scene, "torch", torch.float64)
    if channels > gsplat_backend.CHANNEL_CHUNK:
        # Two passes: |a| + |b| where one pass has |a + b|.
        absolute = found.pop("means2d absgrad"), expected.pop("means2d absgrad")
        assert (absolute[0] > 0).any()
    else:
        # The stand-in takes the absolute value after the sum over pixels.
        torch.testing.assert_close(
            found.pop("means2d absgrad"), expected["means2d gradient"].abs(), rtol=1e-3, atol=1e-3
        )
        expected.pop("means2d absgrad")
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-4 * value.norm(), name


@pytest.mark.parametrize("backward", [True, False])
def test_absolute_gradients_leave_nothing_behind(backward: bool, make_scene: Any) -> None:
    scene = make_scene(channels=40)  # two passes
    leaves = scene.leaves(torch.float32)
    gc.collect()
    gc.disable()
    try:
        rendered = rasterize(
            **leaves, K=scene.K, width=scene.width, height=scene.height, absgrad=True, backend="gsplat"
        )
        rendered.means2d.retain_grad()
        if backward:
            rendered.colors.sum().backward()
            assert (rendered.means2d.absgrad > 0).any()
        watched = weakref.ref(rendered.means2d)
        del rendered
        assert watched() is None, "the centres of a step outlive it"
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [0, 7])
def test_nothing_visible_leaves_the_background(count: int, make_scene: Any, differentiate: Any) -> None:
    def behind(scene: Any) -> None:
        scene.means[:, 2] -= 9.0

    scene = make_scene(count=count, change=behind)
    found, expected = differentiate(scene, "gsplat"), differentiate(scene, "torch", torch.float64)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_without_kernels_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, make_scene: Any) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("f3rm_ext.splat.rasterize.resolve_backend", lambda backend, device: backend)
    monkeypatch.setitem(sys.modules, "gsplat.cuda._backend", SimpleNamespace(_C=None))
    scene = make_scene(count=3)
    with pytest.raises(ConfigError, match=r"gsplat has no kernels here .*CUDA toolkit"):
        rasterize(**scene.leaves(torch.float32), K=scene.K, width=scene.width, height=scene.height, backend="gsplat")
