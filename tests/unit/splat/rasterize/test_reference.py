"""The definition itself: hand-computed pixels, gradcheck, and agreement with gsplat's torch pieces."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize import rasterize
from f3rm_ext.splat.rasterize.camera import Camera
from f3rm_ext.splat.rasterize.reference import project, tile_bounds

Run = Callable[..., dict[str, Tensor]]
F64 = torch.float64


def _round_ones(depths: list[float], alphas: list[float], colors: list[float], x: float = 0.0, **options: Any) -> Any:
    """Balls of size 0.1 on (or beside) the axis of a camera with 100 px focal length and a 31 × 31 picture."""
    count = len(depths)
    means = torch.tensor([[x, 0.0, depth] for depth in depths], dtype=F64)
    K = torch.tensor([[100.0, 0.0, 15.5], [0.0, 100.0, 15.5], [0.0, 0.0, 1.0]], dtype=F64)
    quats = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=F64).expand(count, 4)
    shapes = Ellipsoids(means, quats, torch.full((count, 3), 0.1, dtype=F64), torch.tensor(alphas, dtype=F64))
    payload, camera = torch.tensor(colors, dtype=F64)[:, None], Camera(torch.eye(4, dtype=F64), K, 31, 31)
    return rasterize(shapes, payload, camera, backend="torch", **options)


def test_one_gaussian_by_hand() -> None:
    # σ = 100 px · 0.1 / 2 = 5 px, so the variance is 25 + 0.3; 3 px beside the centre the power is 9 / (2 · 25.3).
    rendered = _round_ones([2.0], [0.6], [0.8], background=torch.tensor([0.5], dtype=F64))
    weight = 0.6 * math.exp(-9 / (2 * 25.3))
    assert rendered.alpha[15, 15].item() == pytest.approx(0.6, rel=1e-12)
    assert rendered.alpha[15, 18].item() == pytest.approx(weight, rel=1e-12)
    assert rendered.alpha[12, 15].item() == pytest.approx(weight, rel=1e-12)
    assert rendered.colors[15, 18, 0].item() == pytest.approx(0.8 * weight + 0.5 * (1 - weight), rel=1e-12)
    assert rendered.depth[15, 18].item() == pytest.approx(2.0 * weight, rel=1e-12)
    assert rendered.means2d[0].tolist() == [15.5, 15.5]
    # Longest variance by the usual formula: mean + sqrt(max(0.01, mean² − det)).
    assert rendered.radii[0].item() == math.ceil(3 * math.sqrt(25.3 + 0.1))


@pytest.mark.parametrize(
    ("depths", "alphas", "colors", "alpha", "color"),
    [
        ([3.0, 2.0], [0.5, 0.4], [1.0, 0.0], 0.4 + 0.6 * 0.5, 0.6 * 0.5),  # the nearer one is in front
        ([2.0, 2.0], [0.5, 0.4], [1.0, 0.0], 0.7, 0.5),  # of equal depths, the first
        # 0.001 · 0.2 = 2e-4 is left after the second; the third would leave 4e-5, so it is not drawn.
        ([2.0, 2.1, 2.2], [1.0, 0.8, 0.8], [0.0, 1.0, 1.0], 1 - 2e-4, 1e-3 * 0.8),
        ([2.0], [0.9 / 255], [1.0], 0.0, 0.0),
        ([2.0], [1.1 / 255], [1.0], 1.1 / 255, 1.1 / 255),
    ],
)
def test_compositing_by_hand(
    depths: list[float], alphas: list[float], colors: list[float], alpha: float, color: float
) -> None:
    rendered = _round_ones(depths, alphas, colors)
    assert rendered.alpha[15, 15].item() == pytest.approx(alpha, abs=1e-12)
    assert rendered.colors[15, 15, 0].item() == pytest.approx(color, abs=1e-12)


def test_a_gaussian_ends_with_the_tiles_its_radius_touches() -> None:
    # Centre at pixel 0.5, σ² = 25.3: radius 16 px, so the tiles from 16 px on are touched.
    rendered = _round_ones([2.0], [0.99], [1.0], x=-0.3)
    assert rendered.radii[0].item() == 16
    assert rendered.alpha[15, 16] > 0  # 16 px away: exp(−5.06) · 0.99 is over 1 / 255
    further = _round_ones([2.0], [0.99], [1.0], x=-0.3 - 0.02)  # one pixel to the left: ends at 15.5 px
    assert further.alpha[15, 15] > 0 and further.alpha[15, 16] == 0
    first, stop = tile_bounds(torch.tensor([[-0.5, 15.5]]), torch.tensor([16], dtype=torch.int32))
    assert first.tolist() == [[-2.0, -1.0]] and stop.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("antialiased", [False, True])
def test_gradcheck(antialiased: bool, make_scene: Any) -> None:
    scene = make_scene(count=4, size=(5, 4), spread=0.4, channels=2, antialiased=antialiased)
    leaves = scene.leaves(F64)

    def render(*values: Tensor) -> tuple[Tensor, ...]:
        rendered = scene.draw(dict(zip(leaves, values, strict=True)), backend="torch")
        return rendered.colors, rendered.depth, rendered.alpha, rendered.means2d

    assert (render(*leaves.values())[2] > 0).any()
    assert torch.autograd.gradcheck(render, tuple(leaves.values()), eps=1e-7, atol=1e-5, rtol=1e-4)


def test_absolute_gradients_are_sums_over_pixels(make_scene: Any, differentiate: Run) -> None:
    scene = make_scene(count=5, size=(18, 6), spread=0.3)
    found = differentiate(scene, "torch", F64)["means2d absgrad"]
    generator = torch.Generator().manual_seed(7)
    upstream = [torch.randn(*shape, generator=generator).double() for shape in ((6, 18, 3), (6, 18), (6, 18))]
    rendered = scene.draw(scene.leaves(F64), backend="torch")
    total = torch.zeros(5, 2, dtype=F64)
    for row in range(6):
        for column in range(18):
            outputs = [value[row, column] for value in (rendered.colors, rendered.depth, rendered.alpha)]
            seeds = [value[row, column] for value in upstream]
            (gradient,) = torch.autograd.grad(outputs, rendered.means2d, seeds, retain_graph=True)
            total += gradient.abs()
    torch.testing.assert_close(found, total)


def test_the_order_of_gaussians_does_not_matter(make_scene: Any, differentiate: Run) -> None:
    scene = make_scene()
    order = torch.randperm(len(scene.means), generator=torch.Generator().manual_seed(1))
    names = ("means", "quats", "sizes", "alphas", "colors")
    shuffled = replace(scene, **{name: getattr(scene, name)[order] for name in names})
    ours, theirs = differentiate(scene, "torch", F64), differentiate(shuffled, "torch", F64)
    torch.testing.assert_close(ours["colors"], theirs["colors"])
    for name in names:
        torch.testing.assert_close(ours[f"{name} gradient"][order], theirs[f"{name} gradient"])


def test_small_chunks_change_nothing(make_scene: Any, differentiate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from f3rm_ext.splat.rasterize import reference

    scene = make_scene()
    whole = differentiate(scene, "torch", F64)
    monkeypatch.setattr(reference, "CHUNK", 500)
    for name, value in differentiate(scene, "torch", F64).items():
        torch.testing.assert_close(value, whole[name], msg=name)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("eps2d", [0.3, 0.1])
def test_projection_is_gsplats(seed: int, eps2d: float, make_scene: Any) -> None:
    from gsplat.cuda._torch_impl import _fully_fused_projection, _quat_scale_to_covar_preci

    def scatter(scene: Any) -> None:
        scene.means[::3] *= 4.0  # behind, off-screen and where the Jacobian is clamped

    scene = make_scene(count=200, seed=seed, change=scatter, eps2d=eps2d, antialiased=True)
    shapes, camera = scene.shapes()._replace(alphas=torch.ones(200, dtype=F64)), scene.camera()
    covariances, _ = _quat_scale_to_covar_preci(shapes.quats, shapes.sizes, compute_preci=False)
    radii, means2d, depths, conics, compensations = _fully_fused_projection(
        shapes.means, covariances, camera.viewmat[None], camera.K[None], 37, 29, eps2d=eps2d, calc_compensations=True
    )
    ours = project(shapes, camera)
    assert torch.equal(ours.radii, radii[0])
    drawn = ours.radii > 0
    assert 20 < drawn.sum() < 200
    for mine, theirs in (
        (ours.means2d, means2d),
        (ours.depths, depths),
        (ours.conics, conics),
        (ours.alphas, compensations),
    ):
        torch.testing.assert_close(mine[drawn], theirs[0][drawn])
        assert mine[~drawn].abs().sum() == 0


def test_tiles_are_gsplats(make_scene: Any) -> None:
    from gsplat.cuda._torch_impl import _isect_tiles

    scene = make_scene(count=60, size=(70, 45))
    found = project(scene.shapes(), scene.camera())
    counts, _, _ = _isect_tiles(found.means2d[None].float(), found.radii[None], found.depths[None].float(), 16, 5, 3)
    first, stop = tile_bounds(found.means2d, found.radii)
    limit = torch.tensor([5, 3], dtype=F64)
    mine = (stop.clamp(min=0).minimum(limit) - first.clamp(min=0).minimum(limit)).prod(dim=-1)
    assert torch.equal(torch.where(found.radii > 0, mine, 0.0).int(), counts[0])
