"""Surface regularisation and the 3D filter on CUDA against the CPU: neighbours, field, losses and gradients, memory."""

import time

import pytest
import torch

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.splat import losses
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions, smoothing_filter
from f3rm_ext.splat.regularization import field, kernel_functions, make_regularizer, multiview, normals, patches, planar
from f3rm_ext.splat.regularization.field import TRITON_KERNELS, neighbour_field
from f3rm_ext.splat.regularization.multiview import DepthView
from f3rm_ext.splat.regularization.neighbours import nearest_neighbours
from f3rm_ext.splat.regularization.options import Mode, RegularizationOptions
from f3rm_ext.splat.regularization.regularizer import Regularizer, TrainingView
from f3rm_ext.splat.regularization.sdf import sample_points
from f3rm_ext.splat.regularization.table import gaussian_table
from f3rm_ext.splat.rendering import SplatScene, render, render_nearby
from f3rm_ext.splat.triton_kernels import find_kernels


def made(n: int, device: torch.device | str = "cpu") -> Gaussians:
    """Gaussians in a cube of side 2 at depth 4 to 6, as large as their distances."""
    generator = torch.Generator().manual_seed(n)
    means = 2 * torch.rand(n, 3, generator=generator) - 1 + torch.tensor([0.0, 0.0, 5.0])
    scales = torch.log((0.2 + torch.rand(n, 3, generator=generator)) * n ** (-1 / 3))
    quats, opacities = torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator)
    gaussians = Gaussians(means, scales, quats, opacities, torch.zeros(n, 3), torch.zeros(n, 0, 3)).to(device)
    return Gaussians.from_tensors({name: value.clone().requires_grad_() for name, value in gaussians.tensors().items()})


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
        view = TrainingView(
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
        options = RegularizationOptions(mode=mode, samples=20_000, chunk_points=3000)
        losses = Regularizer(options).losses(9001, view)
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
    regularizer = Regularizer(RegularizationOptions(mode="density", chunk_points=1 << 15))
    visible = torch.ones(100_000, dtype=torch.bool, device=cuda)
    regularizer.neighbours.at(9001, gaussians.means)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    eye = torch.eye(4, device=cuda)
    losses = regularizer.losses(9001, TrainingView(gaussians, visible, eye, eye[:3, :3], extent=1.0))
    torch.stack(list(losses.values())).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 1.2 * 2**30


def test_three_dimensional_filter(cuda: torch.device) -> None:
    means = made(5000).means.detach()
    viewmats = torch.eye(4).repeat(3, 1, 1)
    viewmats[:, 2, 3] = torch.tensor([0.0, -4.5, 2.0])
    Ks = torch.tensor([[60.0, 0, 32], [0, 60, 24], [0, 0, 1]]).repeat(3, 1, 1)
    widths, heights = torch.tensor([64, 64, 64]), torch.tensor([48, 48, 48])
    views = PinholeCameras(viewmats, Ks, widths, heights)
    here, there = smoothing_filter(means, views), smoothing_filter(means.to(cuda), views.to(cuda))
    assert torch.allclose(here, there.cpu(), rtol=1e-5)


def test_the_field_of_triton_is_that_of_torch(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert find_kernels(TRITON_KERNELS, cuda) is not None, "Triton is installed, but its kernels do not work"
    gaussians = made(5000, cuda)
    visible = torch.ones(5000, dtype=torch.bool, device=cuda)
    points, owners = (part.detach() for part in sample_points(gaussians, visible, 50_000))
    neighbours, table = nearest_neighbours(gaussians.means, 16), gaussian_table(gaussians).detach()
    results = []
    for _ in ("triton", "torch"):
        at, rows = points.clone().requires_grad_(), table.clone().requires_grad_()
        found = neighbour_field(at, owners, rows, neighbours)
        loss = torch.stack([value.square().mean() for value in found]).sum()
        results.append((*(value.detach() for value in found), *torch.autograd.grad(loss, (at, rows))))
        monkeypatch.setattr(field, "choose_kernels", lambda *_: None)
    for found, expected in zip(*results, strict=True):
        assert float((expected - found).norm()) < 1e-4 * float(expected.norm())


def test_chunks_of_any_size_give_the_same(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field, "choose_kernels", lambda *_: None)
    gaussians = made(2000, cuda)
    visible = torch.ones(2000, dtype=torch.bool, device=cuda)
    points, owners = sample_points(gaussians, visible, 100_000)
    neighbours, table = nearest_neighbours(gaussians.means, 16), gaussian_table(gaussians)
    fitted, small = (neighbour_field(points, owners, table, neighbours, chunk=chunk) for chunk in (0, 5000))
    for one, other in zip(fitted, small, strict=True):
        torch.testing.assert_close(one, other)


def test_a_million_neighbours_take_seconds(cuda: torch.device) -> None:
    means = torch.randn(1_000_000, 3, generator=torch.Generator().manual_seed(0)).to(cuda)
    nearest_neighbours(means[:10_000], 16)
    torch.cuda.synchronize()
    began = time.perf_counter()
    found = nearest_neighbours(means, 16)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 10
    some = torch.arange(0, 1_000_000, 10_000, device=cuda)
    apart = (means[some, None].double() - means.double()).square().sum(dim=-1)
    expected = apart.topk(16, dim=1, largest=False).values
    torch.testing.assert_close(apart.gather(1, found[some].long()), expected, rtol=1e-4, atol=1e-12)


def test_planar_and_the_depth_of_planes(cuda: torch.device) -> None:
    """Rendered by gsplat and by the kernels of the CPU, with the losses on top."""
    results = []
    for device in (torch.device("cpu"), cuda):
        gaussians = made(3000, device)
        K = torch.tensor([[60.0, 0, 32], [0, 60, 24], [0, 0, 1]], device=device)
        viewmats = torch.eye(4, device=device).repeat(2, 1, 1)
        viewmats[1, 0, 3] = -0.2
        view, other = (PinholeCameras(v[None], K[None], torch.tensor([64]), torch.tensor([48])) for v in viewmats)
        scene = SplatScene(gaussians, MipOptions(filter_3d=False), sh_degree=0)
        drawn = render(scene, view, planes=True)
        training_view = TrainingView(
            gaussians,
            drawn.rasterization.radii > 0,
            viewmats[0],
            K,
            extent=1.0,
            alpha=drawn.rasterization.alpha,
            normals=drawn.normals,
            plane_depth=drawn.plane_depth,
            photo=torch.full((48, 64, 3), 0.5, device=device),
            other=DepthView(render_nearby(scene, other)[0], viewmats[1], K),
        )
        options = RegularizationOptions(mode="planar", plane_factor=1.0, multiview_factor=1.0)
        losses = make_regularizer(options).losses(9001, training_view)
        torch.stack(list(losses.values())).sum().backward()
        grads = [getattr(gaussians, name).grad.cpu() for name in ("means", "scales", "quats", "opacities")]
        results.append(({name: float(loss.detach()) for name, loss in losses.items()}, grads))
    (here, here_grads), (there, there_grads) = results
    assert there == pytest.approx(here, rel=1e-2)
    for one, other in zip(here_grads, there_grads, strict=True):
        assert float((one - other).norm()) < 0.05 * float(one.norm())


def test_the_losses_of_triton_are_those_of_torch(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a size of many programs: the photometric loss, planes, normals against depth and two views; again the same."""
    pytest.importorskip("triton")
    for names in (losses.KERNELS, kernel_functions.PLANES, kernel_functions.VIEWS):
        assert find_kernels(names[1], cuda) is not None, "Triton is installed, but its kernels do not work"
    h, w = 203, 317
    generator = torch.Generator().manual_seed(0)
    photo, noise = (torch.rand(h, w, 3, generator=generator).to(cuda) for _ in range(2))
    K = torch.tensor([[300.0, 0, 160], [0, 310, 100], [0, 0, 1]], device=cuda)
    viewmats = torch.eye(4, device=cuda).repeat(2, 1, 1)
    viewmats[1, 0, 3] = -0.2
    other = DepthView(torch.full((h, w), 5.0, device=cuda), viewmats[1], K)
    gaussians, pixels = made(3000, cuda), torch.rand(500, generator=generator).to(cuda)

    def compute() -> tuple[torch.Tensor, ...]:
        planes = normals.facing_planes(gaussians, viewmats[0])
        tilt = torch.tensor([0.02, 0.04, -1.0], device=cuda) + 0.02 * noise  # errors stay below the most
        facing = (tilt + 1e-3 * planes[0, :3]).requires_grad_()
        distances = -5 - 0.01 * noise[..., 0] + 1e-3 * planes[1, 3]
        depth = normals.plane_depth(facing, distances, K)
        alpha = 0.4 + 0.6 * noise[..., 1]
        weights = planar.edge_weights(photo)
        consistency = normals.dn_consistency(depth, alpha, facing, K, divide=True, weights=weights)
        seen = DepthView(depth, viewmats[0], K)
        views, trust = multiview.multiview_consistency(seen, other)
        agreement = patches.patch_disagreement(seen, facing, photo, other, photo.roll(12, 1), trust, pixels)
        colors = losses.photometric_loss(facing.abs(), photo, noise[..., :1] > 0.1, 0.2)
        total = consistency + views + agreement + colors
        given = facing, gaussians.means, gaussians.quats
        return weights, depth, trust, consistency, views, agreement, colors, *torch.autograd.grad(total, given)

    found, again = compute(), compute()
    for module in (losses, multiview, normals, patches, planar):
        monkeypatch.setattr(module, "choose_kernels", lambda *_: None)
    for one, two, expected in zip(found, again, compute(), strict=True):
        assert float((one - two).norm()) < 1e-6 * float(one.norm())
        assert float((one - expected).norm()) < 5e-3 * float(expected.norm())
