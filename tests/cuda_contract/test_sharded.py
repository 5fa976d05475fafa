"""Gaussians divided over ranks, with gsplat's Python code of both versions over kernels that check."""

import dataclasses
from typing import Any

import pytest
import torch
from pretend.gsplat_kernels import Kernels
from pretend.process_group import ThreadRanks
from torch import Tensor

from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize import rasterize
from f3rm_ext.splat.rasterize.camera import Camera
from f3rm_ext.splat.rasterize.sharded import rasterize_sharded
from f3rm_ext.splat.rasterize.spherical_harmonics import sh_colors

WIDTH, HEIGHT = 37, 29
DEGREE = 1
K = torch.tensor([[44.0, 0.0, 18.8], [0.0, 38.0, 14.3], [0.0, 0.0, 1.0]])


@dataclasses.dataclass
class Scene:
    """Gaussians and a camera for each rank, on the CPU."""

    leaves: dict[str, Tensor]
    viewmats: Tensor
    backgrounds: Tensor

    @classmethod
    def make(cls, cameras: int, count: int = 41) -> "Scene":
        """Some of the Gaussians are on screen; cameras stand side by side and see different numbers of them."""
        generator = torch.Generator().manual_seed(3)
        means = torch.rand(count, 3, generator=generator) * 2 - 1
        means[::4, 0] *= 12.0
        leaves = {
            "means": means,
            "quats": torch.randn(count, 4, generator=generator),
            "sizes": 0.12 * torch.exp(0.6 * torch.randn(count, 3, generator=generator)),
            "alphas": torch.rand(count, generator=generator) * 0.98 + 0.01,
            "features_dc": 0.4 * torch.randn(count, 3, generator=generator),
            "features_rest": 0.4 * torch.randn(count, 3, 3, generator=generator),
        }
        viewmats = torch.eye(4).repeat(cameras, 1, 1)
        viewmats[:, 2, 3] = 3.0
        viewmats[:, 0, 3] = torch.arange(cameras) * 0.9
        return cls(leaves, viewmats, torch.rand(cameras, 3, generator=generator))


def loss_of(found: Any) -> Tensor:
    shape = found.colors.shape
    weights = torch.linspace(-1, 1, shape.numel()).reshape(shape).to(found.colors.device)
    return (found.colors * weights).sum() + found.depth.sum() + found.alpha.square().sum()


def draw_in_parts(scene: Scene, ranks: ThreadRanks, antialiased: bool) -> list[dict[str, Tensor]]:
    """Each rank draws its camera with every n-th Gaussian; values and gradients by rank, on the CPU."""

    def work(rank: int) -> dict[str, Tensor]:
        leaves = {
            name: value[rank :: ranks.size].to("cuda").detach().requires_grad_() for name, value in scene.leaves.items()
        }
        shapes, colors = Ellipsoids(*list(leaves.values())[:4]), (leaves["features_dc"], leaves["features_rest"])
        camera = Camera(scene.viewmats[rank].to("cuda"), K.to("cuda"), WIDTH, HEIGHT, antialiased=antialiased)
        found = rasterize_sharded(shapes, *colors, DEGREE, camera, scene.backgrounds[rank].to("cuda"))
        found.means2d.retain_grad()
        loss_of(found).backward()
        assert found.rows is not None and found.means2d.grad is not None
        values = {name: getattr(found, name) for name in ("colors", "depth", "alpha", "rows", "radii")}
        values |= {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
        values["gradient of means2d"] = found.means2d.grad
        return {name: value.detach().cpu() for name, value in values.items()}

    return ranks.run(work)


def draw_whole(scene: Scene, antialiased: bool) -> tuple[list[Any], dict[str, Tensor]]:
    """One process draws all cameras with all Gaussians, with the same kernels."""
    leaves = {name: value.to("cuda").detach().requires_grad_() for name, value in scene.leaves.items()}
    shapes, pictures = Ellipsoids(*list(leaves.values())[:4]), []
    for viewmat, background in zip(scene.viewmats.to("cuda"), scene.backgrounds.to("cuda"), strict=True):
        position = -viewmat[:3, :3].T @ viewmat[:3, 3]
        directions = leaves["means"].detach() - position
        colors = sh_colors(DEGREE, directions, leaves["features_dc"], leaves["features_rest"])
        camera = Camera(viewmat, K.to("cuda"), WIDTH, HEIGHT, antialiased=antialiased)
        found = rasterize(shapes, colors, camera, background)
        found.means2d.retain_grad()
        pictures.append(found)
    torch.stack([loss_of(found) for found in pictures]).sum().backward()
    return pictures, leaves


@pytest.mark.parametrize(("size", "antialiased"), [(2, False), (3, True)])
def test_pictures_and_gradients_are_those_of_one_process(size: int, antialiased: bool, kernels: Kernels) -> None:
    scene, ranks = Scene.make(size), ThreadRanks(size)
    parts = draw_in_parts(scene, ranks, antialiased)
    assert kernels.calls.count("project packed") == kernels.calls.count("project packed backward") == size
    assert kernels.calls.count("composite") == size
    pictures, leaves = draw_whole(scene, antialiased)
    for rank, part in enumerate(parts):
        for name in ("colors", "depth", "alpha"):
            torch.testing.assert_close(part[name], getattr(pictures[rank], name).detach().cpu(), msg=f"{name}, {rank}")
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            expected, found = leaf.grad.cpu()[rank::size], part[f"gradient of {name}"]
            assert (found - expected).norm() <= 1e-4 * expected.norm() + 1e-6, f"{name} of rank {rank}"
        # What densification adds up: the gradients in all images, at the rank that holds the Gaussian.
        norms = torch.stack([
            torch.where(found.radii.cpu() > 0, found.means2d.grad.cpu().norm(dim=1), 0) for found in pictures
        ]).sum(0)  # fmt: skip
        found = torch.zeros(len(part["gradient of means"]))
        found.index_add_(0, part["rows"], part["gradient of means2d"].norm(dim=1))
        assert (found - norms[rank::size]).norm() <= 1e-3 * norms.norm()
        assert bool((part["radii"] > 0).all()) and len(part["radii"]) == len(part["rows"])


def test_only_what_is_seen_is_sent(kernels: Kernels) -> None:
    scene, ranks = Scene.make(2), ThreadRanks(2)
    parts = draw_in_parts(scene, ranks, antialiased=False)
    entries = sum(len(part["rows"]) for part in parts)
    # Centre, depth, conic, opacity, colour and, on the way back, their gradients; radius by axis from 1.5.
    per_entry = 4 * (2 + 1 + 3 + 1 + 3) * 2 + 4 * (2 if kernels.per_axis else 1)
    per_rank = 4 * (16 + 9) + 2 * 8
    assert sum(ranks.sent) == entries * per_entry + 2 * per_rank
    assert 0 < entries < 2 * 41


def test_where_a_rank_has_nothing_in_view_the_others_draw(kernels: Kernels) -> None:
    scene, ranks = Scene.make(2), ThreadRanks(2)
    scene.leaves["means"][0::2, 2] -= 9.0
    first, second = draw_in_parts(scene, ranks, antialiased=False)
    assert len(first["rows"]) == 0 and len(second["rows"]) > 0
    pictures, _ = draw_whole(scene, antialiased=False)
    for part, picture in zip((first, second), pictures, strict=True):
        torch.testing.assert_close(part["colors"], picture.colors.detach().cpu())
    assert not bool(first["gradient of means"].any())
