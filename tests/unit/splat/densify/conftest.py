"""Small sets of Gaussians with optimisers, and what a renderer would have seen of them."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.splat.rasterize import Rasterization


@dataclass
class World:
    """Gaussians in training."""

    params: dict[str, Parameter]
    optimizers: dict[str, torch.optim.Optimizer]

    def step(self) -> None:
        """One step of every optimiser, so that there are moments: 1 for the first one of Gaussian i is i + 1."""
        for name, parameter in self.params.items():
            rows = torch.arange(1.0, len(parameter) + 1).view(-1, *[1] * (parameter.dim() - 1))
            parameter.grad = rows.expand(parameter.shape).to(parameter.dtype).clone()
            self.optimizers[name].step()
            parameter.grad = None

    def moments(self, name: str) -> Tensor:
        """First moments of a parameter, divided by what :meth:`step` gives Gaussian 0."""
        return self.optimizers[name].state[self.params[name]]["exp_avg"].float() / 0.1


@pytest.fixture
def make_world() -> Callable[..., World]:
    """Gaussian i stands at (i, 0, 0), has size `sizes[i]` and opacity `alphas[i]`; its SH are all i."""

    def make(sizes: list[float], alphas: list[float], rate: float = 0.0) -> World:
        count = len(sizes)
        rows = torch.arange(float(count))
        generator = torch.Generator().manual_seed(0)
        tensors = {
            "means": torch.stack((rows, rows * 0, rows * 0), dim=1),
            "scales": torch.tensor(sizes).log()[:, None].repeat(1, 3),
            "quats": torch.randn(count, 4, generator=generator),
            "opacities": torch.tensor(alphas).logit()[:, None],
            "features_dc": rows[:, None].repeat(1, 3),
            "features_rest": rows.view(-1, 1, 1).repeat(1, 15, 3),
        }
        params = {name: Parameter(value) for name, value in tensors.items()}
        optimizers: dict[str, torch.optim.Optimizer] = {
            name: torch.optim.Adam([value], lr=rate, eps=1e-15) for name, value in params.items()
        }
        return World(params, optimizers)

    return make


@pytest.fixture
def make_seen() -> Callable[..., Rasterization]:
    """A picture of 20 × 10 pixels in which Gaussian i has a gradient of norm `gradients[i]`, in half pictures."""

    def make(gradients: list[float], radii: list[int] | None = None) -> Rasterization:
        means2d = torch.zeros(len(gradients), 2, requires_grad=True)
        means2d.grad = torch.tensor([[g / 10, 0.0] for g in gradients])
        seen = torch.tensor(radii if radii is not None else [1] * len(gradients), dtype=torch.int32)
        return Rasterization(torch.zeros(10, 20, 3), torch.zeros(10, 20), torch.zeros(10, 20), means2d, seen)

    return make
