"""Surface regularisation and the 3D filter on CUDA against the CPU: neighbours, field, losses and gradients, memory."""

import pytest
import torch

from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import smoothing_filter
from f3rm_ext.splat.surface.neighbours import nearest_neighbours
from f3rm_ext.splat.surface.options import Mode, RegularizationOptions
from f3rm_ext.splat.surface.regularizer import Regularizer


def made(n: int, device: torch.device | str = "cpu") -> Gaussians:
    """Gaussians in a cube of side 2 at depth 4 to 6, as large as their distances."""
    generator = torch.Generator().manual_seed(n)
    means = 2 * torch.rand(n, 3, generator=generator) - 1 + torch.tensor([0.0, 0.0, 5.0])
    scales = torch.log((0.2 + torch.rand(n, 3, generator=generator)) * n ** (-1 / 3))
    quats, opacities = torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator)
    gaussians = Gaussians(means, scales, quats, opacities, torch.zeros(n, 3), torch.zeros(n, 0, 3)).to(device)
    return Gaussians.of({name: value.clone().requires_grad_() for name, value in gaussians.tensors().items()})


def test_neighbours_are_those_of_the_tree(cuda: torch.device) -> None:
    means = made(20_000).means.detach()
    found = nearest_neighbours(means.to(cuda), 16)
    assert found.device.type == "cuda" and found.dtype == torch.int32
    there = nearest_neighbours(means, 16)
    # Distances that agree in float32 may come in either order.
    assert (found.cpu() == there).float().mean() > 0.9999


@pytest.mark.parametrize("mode", ["density", "sdf", "dn-consistency"])
def test_losses_and_gradients(mode: Mode, cuda: torch.device) -> None:
    results = []
    for device in (torch.device("cpu"), cuda):
        torch.set_float32_matmul_precision("high")  # as nerfstudio's commands have it
        gaussians = made(3000, device)
        K = torch.tensor([[60.0, 0, 32], [0, 60, 24], [0, 0, 1]], device=device)
        ramp = torch.linspace(0.6, 1, 64, device=device).expand(48, 64)
        losses = Regularizer(RegularizationOptions(mode=mode, samples=20_000, chunk_points=3000)).losses(
            9001,
            gaussians,
            torch.ones(3000, dtype=torch.bool, device=device),
            torch.eye(4, device=device),
            K,
            extent=1.0,
            depth=5 * ramp,
            alpha=ramp,
            normals=torch.tensor([0.0, 0.6, -0.8], device=device).expand(48, 64, 3),
            generator=torch.Generator().manual_seed(0),
        )
        total = torch.stack(list(losses.values())).sum()
        total.backward()
        grads = [getattr(gaussians, name).grad.cpu() for name in ("means", "scales", "quats", "opacities")]
        results.append((float(total.detach()), grads))
    (here, here_grads), (there, there_grads) = results
    assert there == pytest.approx(here, rel=1e-4)
    for one, other in zip(here_grads, there_grads, strict=True):
        assert float((one - other).norm()) < 1e-3 * float(one.norm())


def test_memory_does_not_grow_with_the_chunks(cuda: torch.device) -> None:
    """1 M points without chunks would hold 5 GiB."""
    gaussians = made(100_000, cuda)
    regularizer = Regularizer(RegularizationOptions(mode="density"))
    visible = torch.ones(100_000, dtype=torch.bool, device=cuda)
    regularizer.neighbours.at(9001, gaussians.means)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    eye = torch.eye(4, device=cuda)
    losses = regularizer.losses(9001, gaussians, visible, eye, eye[:3, :3], extent=1.0)
    torch.stack(list(losses.values())).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 1.2 * 2**30


def test_three_dimensional_filter(cuda: torch.device) -> None:
    means = made(5000).means.detach()
    viewmats = torch.eye(4).repeat(3, 1, 1)
    viewmats[:, 2, 3] = torch.tensor([0.0, -4.5, 2.0])
    Ks = torch.tensor([[60.0, 0, 32], [0, 60, 24], [0, 0, 1]]).repeat(3, 1, 1)
    widths, heights = torch.tensor([64, 64, 64]), torch.tensor([48, 48, 48])
    here = smoothing_filter(means, viewmats, Ks, widths, heights)
    there = smoothing_filter(means.to(cuda), viewmats.to(cuda), Ks.to(cuda), widths.to(cuda), heights.to(cuda))
    assert torch.allclose(here, there.cpu(), rtol=1e-5)
