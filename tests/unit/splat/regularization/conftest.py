"""Sets of Gaussians whose surface is known, and cameras that look at them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.regularization.multiview import DepthView
from f3rm_ext.splat.regularization.regularizer import Regularizer, TrainingView


def assemble(means: Tensor, sizes: Tensor, quats: Tensor, alphas: Tensor) -> Gaussians:
    n = len(means)
    zeros = means.new_zeros
    return Gaussians(means, sizes.log(), quats, alphas.logit()[:, None], zeros(n, 3), zeros(n, 0, 3))


@pytest.fixture
def random_gaussians() -> Callable[..., Gaussians]:
    """Makes N Gaussians in the unit cube, about as large as their distances."""

    def make(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Gaussians:
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        size = max(n, 1) ** (-1 / 3)
        quats = torch.randn(n, 4, generator=generator, dtype=torch.float64)
        made = assemble(rand(n, 3), (0.2 + 0.6 * rand(n, 3)) * size, quats, 0.05 + 0.9 * rand(n))
        return Gaussians.from_tensors({name: value.to(dtype) for name, value in made.tensors().items()})

    return make


@pytest.fixture
def wall() -> Callable[..., Gaussians]:
    """Makes a wall: side² flat Gaussians on the plane z = ``depth``, one unit apart and centred on the z axis.

    Deviations are ½ in the plane and ``thickness`` across; with the default opacity 1 / (2π ¼) their in-plane sum is 1
    up to 3 %.
    """

    def make(
        side: int = 9,
        thickness: float = 0.05,
        depth: float = 10.0,
        alpha: float = 2 / math.pi,
        dtype: torch.dtype = torch.float32,
    ) -> Gaussians:
        places = torch.arange(side, dtype=dtype) - (side - 1) / 2
        y, x = torch.meshgrid(places, places, indexing="ij")
        means = torch.stack([x.flatten(), y.flatten(), torch.full((side * side,), depth, dtype=dtype)], dim=1)
        sizes = torch.tensor([0.5, 0.5, thickness], dtype=dtype).repeat(len(means), 1)
        quats = torch.tensor([1.0, 0, 0, 0], dtype=dtype).repeat(len(means), 1)
        return assemble(means, sizes, quats, torch.full((len(means),), alpha, dtype=dtype))

    return make


@pytest.fixture
def camera() -> Callable[..., tuple[Tensor, Tensor]]:
    """Makes view matrix and intrinsics of a camera at the origin that looks along z, by size and focal length."""

    def make(
        w: int = 40, h: int = 30, focal: float = 40.0, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        K = torch.tensor([[focal, 0, w / 2], [0, focal, h / 2], [0, 0, 1]], dtype=dtype)
        return torch.eye(4, dtype=dtype), K

    return make


@pytest.fixture
def leaves() -> Callable[[Gaussians], Gaussians]:
    """Makes the tensors of Gaussians leaves that want gradients."""

    def make(gaussians: Gaussians) -> Gaussians:
        return Gaussians.from_tensors(
            {name: value.clone().requires_grad_() for name, value in gaussians.tensors().items()}
        )

    return make


@pytest.fixture
def losses_of(camera: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """The losses of a regularizer at a step, of a plane at depth 10 that faces the camera, unless told otherwise."""

    def losses(
        reg: Regularizer, gaussians: Gaussians, step: int = 9001, visible: Tensor | None = None, **given: Any
    ) -> dict[str, Tensor]:
        viewmat, K = camera()
        beside, flat = viewmat.clone(), torch.full((30, 40), 10.0)
        beside[0, 3] = -1.0
        pictures = {
            "depth": flat,
            "alpha": torch.ones(30, 40),
            "normals": torch.tensor([0.0, 0.0, -1.0]).expand(30, 40, 3),
            "plane_depth": flat,
            "photo": torch.full((30, 40, 3), 0.5),
            "other": DepthView(flat, beside, K),
            "picture": torch.rand(30, 40, 3, generator=torch.Generator().manual_seed(0)),
            "generator": torch.Generator().manual_seed(step),
        }
        visible = torch.ones(len(gaussians), dtype=torch.bool) if visible is None else visible
        return reg.losses(step, TrainingView(gaussians, visible, viewmat, K, **{"extent": 1.0, **pictures, **given}))

    return losses
