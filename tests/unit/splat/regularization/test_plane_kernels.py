"""The kernels of planes over pixels agree with their definitions in torch, which double precision takes: values and
gradients, with holes, masks and cameras that differ in everything.

They are those of numba, or those of Triton in its interpreter.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.regularization import multiview, normals, patches, planar
from f3rm_ext.splat.regularization.multiview import DepthView, multiview_consistency
from f3rm_ext.splat.regularization.normals import dn_consistency, facing_planes, plane_depth
from f3rm_ext.splat.regularization.patches import patch_disagreement
from f3rm_ext.splat.regularization.planar import edge_weights

H, W = 37, 45
Case = Callable[[Callable[..., Tensor]], tuple[tuple[Tensor, ...], Callable[..., Tensor]]]


@pytest.fixture(autouse=True)
def kernels(use_triton: Callable[..., None]) -> None:
    """The interpreter takes as long for smaller programs."""
    use_triton(multiview, normals, patches, planar, BLOCK=1024, PATCHES=128)


def rotation(*turn: float) -> Tensor:
    return torch.linalg.matrix_exp(
        torch.tensor([[0, -turn[2], turn[1]], [turn[2], 0, -turn[0]], [-turn[1], turn[0], 0]])
    )


def camera(shift: float = 0.0, turn: tuple[float, float, float] = (0.1, -0.05, 0.2)) -> tuple[Tensor, Tensor]:
    """View matrix and intrinsics."""
    viewmat = torch.eye(4)
    viewmat[:3, :3], viewmat[:3, 3] = rotation(*turn), torch.tensor([shift, 0.2 * shift, 0.1])
    return viewmat, torch.tensor([[40.0, 0, 21.0], [0, 44.0, 19.0], [0, 0, 1.0]])


def bumpy(rand: Callable[..., Tensor], h: int = H, w: int = W) -> Tensor:
    """Depth of a bumpy wall, with holes."""
    row, column = torch.meshgrid(torch.arange(h) / 7.0, torch.arange(w) / 9.0, indexing="ij")
    depth = 4 + 0.2 * row.sin() + 0.1 * column.cos() + 0.01 * rand(h, w)
    depth[rand(h, w) > 0.97] = 0
    return depth


def rendered_normals(rand: Callable[..., Tensor]) -> Tensor:
    return 0.4 * (rand(H, W, 3) - 0.5) - torch.tensor([0.0, 0.0, 0.8])


def planes_of_gaussians(rand: Callable[..., Tensor]) -> Any:
    count, (viewmat, _) = 200, camera()
    tensors = rand(count, 3) - 0.5, rand(count, 4) - 0.5
    scales, rest = rand(count, 3), (rand(count), rand(count, 3), rand(count, 0, 3))

    def compute(means: Tensor, quats: Tensor) -> Tensor:
        given = (value.to(means.dtype) for value in (scales, *rest))
        sizes, alphas, *colors = given
        return facing_planes(Gaussians(means, sizes, quats, alphas[:, None], *colors), viewmat.to(means.dtype))

    return tensors, compute


def depth_of_planes(rand: Callable[..., Tensor]) -> Any:
    distances = -3 - rand(H, W)
    distances[rand(H, W) > 0.9] *= -1
    distances[3, 5], distances[5, 3] = torch.nan, -torch.inf
    across = torch.where(rand(H, W, 1) > 0.9, torch.tensor([1.0, 0.0, 0.0]), rendered_normals(rand))
    return (across, distances), lambda n, d: plane_depth(n, d, camera()[1].to(n.dtype))


def normals_against_depth(divide: bool) -> Case:
    def case(rand: Callable[..., Tensor]) -> Any:
        weights, mask = rand(H, W), rand(H, W) > 0.1
        weights[10:12] = 0
        depth, alpha, facing = bumpy(rand), 0.3 + 0.7 * rand(H, W), rendered_normals(rand)
        depth[3, 5], alpha[8, 9], alpha[8, 20], facing[20, 30] = torch.inf, torch.nan, torch.inf, torch.nan

        def compute(*given: Tensor) -> Tensor:
            options: Any = {"divide": divide, "min_alpha": 0.35, "mask": mask, "weights": weights.to(given[0].dtype)}
            return dn_consistency(*given, camera()[1].to(given[0].dtype), **options)

        return (depth, alpha, facing), compute

    return case


def other_view(rand: Callable[..., Tensor]) -> DepthView:
    viewmat, K = camera(0.3, (0.05, 0.02, 0.1))
    return DepthView(bumpy(rand, 31, 50), viewmat, 1.1 * K)


def errors_between_views(rand: Callable[..., Tensor]) -> Any:
    seen, other = camera(), other_view(rand)

    def compute(depth: Tensor) -> Tensor:
        views = (DepthView(depth, *(v.to(depth.dtype) for v in seen)), DepthView(*(v.to(depth.dtype) for v in other)))
        loss, trust = multiview_consistency(*views)
        return loss + 1e-3 * trust.sum()

    return (bumpy(rand),), compute


def patches_between_views(rand: Callable[..., Tensor]) -> Any:
    seen, other = camera(), other_view(rand)
    photo, trust, pixels = rand(H, W, 3), (rand(H, W) - 0.1).clamp_min(0), rand(300)
    picture = rand(31, 50, 3)

    def compute(depth: Tensor, facing: Tensor) -> Tensor:
        views = DepthView(depth, *(v.to(depth.dtype) for v in seen)), DepthView(*(v.to(depth.dtype) for v in other))
        given = (value.to(depth.dtype) for value in (photo, picture, trust))
        mine, theirs, weight = given
        return patch_disagreement(views[0], facing, mine, views[1], theirs, weight, pixels.to(depth.dtype))

    # Patches of noise disagree; of those that are far from certain, a few must be left.
    return (bumpy(rand), 0.3 * rendered_normals(rand) - torch.tensor([0.0, 0.0, 0.7])), compute


CASES: dict[str, Case] = {
    "planes of Gaussians": planes_of_gaussians,
    "depth of planes": depth_of_planes,
    "normals against depth": normals_against_depth(False),
    "normals against divided depth": normals_against_depth(True),
    "errors between views": errors_between_views,
    "patches between views": patches_between_views,
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    generator = torch.Generator().manual_seed(6)
    inputs, compute = CASES[name](lambda *size: torch.rand(*size, generator=generator))
    results = []
    for dtype in (torch.float64, torch.float32):
        given = [value.to(dtype).requires_grad_() for value in inputs]
        value = compute(*given)
        upstream = torch.linspace(0.5, 1.5, value.numel(), dtype=dtype).view(value.shape)
        grads = torch.autograd.grad(value, given, upstream, materialize_grads=True, allow_unused=True)
        results.append((value.detach().float(), *(grad.float() for grad in grads)))
    assert results[0][1].any(), "the case tests nothing"
    for exact, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, exact, rtol=2e-3, atol=2e-4 * float(exact.abs().max()))


def test_edges_of_photos() -> None:
    photo = torch.rand(H, W, 3, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(edge_weights(photo), edge_weights(photo.double()).float())
    assert torch.equal(edge_weights(torch.full((4, 5, 3), 0.3)), torch.ones(4, 5))
