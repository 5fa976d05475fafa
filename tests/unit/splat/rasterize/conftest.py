"""Scenes of a few Gaussians, and everything a renderer says about them: values and gradients."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numba
import pytest
import torch
from torch import Tensor

from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize import Backend, Rasterization, rasterize
from f3rm_ext.splat.rasterize.camera import MIN_ALPHA, MIN_TRANSMITTANCE, Camera
from f3rm_ext.splat.rasterize.reference import project

LEAVES = ("means", "quats", "sizes", "alphas", "colors", "viewmat", "background")


@dataclass
class Scene:
    """Gaussians, a camera and options."""

    means: Tensor
    quats: Tensor
    sizes: Tensor
    alphas: Tensor
    colors: Tensor
    viewmat: Tensor
    K: Tensor
    width: int
    height: int
    background: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Copies to differentiate by."""
        return {name: getattr(self, name).to(dtype, copy=True).requires_grad_() for name in LEAVES}

    def shapes(self, dtype: torch.dtype = torch.float64) -> Ellipsoids:
        """The Gaussians without colours."""
        return Ellipsoids(self.means, self.quats, self.sizes, self.alphas).map(lambda value: value.to(dtype))

    def camera(self, dtype: torch.dtype = torch.float64) -> Camera:
        """The camera alone."""
        return Camera(self.viewmat.to(dtype), self.K.to(dtype), self.width, self.height, **self.options)

    def draw(self, leaves: dict[str, Tensor], **options: Any) -> Rasterization:
        """Renders other tensors in place of its own."""
        shapes = Ellipsoids(*(leaves[name] for name in Ellipsoids._fields))
        camera = replace(self.camera(leaves["viewmat"].dtype), viewmat=leaves["viewmat"])
        return rasterize(shapes, leaves["colors"], camera, leaves["background"], **options)

    def decided(self) -> bool:
        """Whether no pixel is so close to a threshold that float32 and float64 could decide otherwise."""
        found = project(self.shapes(), self.camera())
        drawn = found.radii.nonzero().squeeze(-1)
        drawn = drawn[found.depths[drawn].argsort(stable=True)]
        rows, columns = torch.meshgrid(torch.arange(self.height), torch.arange(self.width), indexing="ij")
        pixels = torch.stack([columns, rows], dim=-1).reshape(-1, 1, 2) + 0.5
        dx, dy = (pixels - found.means2d[drawn]).unbind(-1)
        xx, xy, yy = found.conics[drawn].unbind(-1)
        alphas = (found.alphas[drawn] * torch.exp(-0.5 * (xx * dx**2 + yy * dy**2) - xy * dx * dy)).clamp(max=0.999)
        through = torch.cumprod(1 - torch.where(alphas < MIN_ALPHA, 0.0, alphas), dim=1)
        near = ((alphas / MIN_ALPHA - 1).abs() < 1e-5) | ((through / MIN_TRANSMITTANCE - 1).abs() < 1e-5)
        return not bool(near.any())


def turned(angle: float) -> Tensor:
    """A camera 3 units away from the origin, turned about its vertical axis."""
    viewmat = torch.eye(4)
    c, s = math.cos(angle), math.sin(angle)
    viewmat[:3, :3] = torch.tensor([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])
    viewmat[:3, 3] = torch.tensor([0.1, -0.05, 3.0])
    return viewmat


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Pictures of these sizes are done before a second thread has woken up."""
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_scene() -> Callable[..., Scene]:
    """Makes a scene of random Gaussians around the origin; ``change`` spoils it, seeds near a threshold are passed."""

    def make(
        count: int = 40,
        seed: int = 0,
        channels: int = 3,
        size: tuple[int, int] = (37, 29),
        spread: float = 0.12,
        change: Callable[[Scene], None] | None = None,
        **options: Any,
    ) -> Scene:
        for attempt in range(50):
            generator = torch.Generator().manual_seed(1000 * seed + attempt)
            width, height = size
            scene = Scene(
                means=(torch.rand(count, 3, generator=generator) * 2 - 1),
                quats=torch.randn(count, 4, generator=generator),
                sizes=spread * torch.exp(0.6 * torch.randn(count, 3, generator=generator)),
                alphas=torch.rand(count, generator=generator) * 0.98 + 0.01,
                colors=torch.rand(count, channels, generator=generator),
                viewmat=turned(0.3),
                K=torch.tensor(
                    [[1.2 * width, 0.0, 0.5 * width + 0.3], [0.0, 1.3 * height, 0.5 * height - 0.2], [0, 0, 1]]
                ),
                width=width,
                height=height,
                background=torch.rand(channels, generator=generator),
                options=options,
            )
            if change is not None:
                change(scene)
            if scene.decided():
                return scene
        raise AssertionError("every seed had a pixel at a threshold")

    return make


@pytest.fixture(scope="session")
def differentiate() -> Callable[..., dict[str, Tensor]]:
    """Renders a scene; values, radii and the gradients of a fixed random functional of all outputs, in float64."""

    def run(scene: Scene, backend: Backend, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        leaves = scene.leaves(dtype)
        rendered = scene.draw(leaves, absgrad=True, backend=backend)
        rendered.means2d.retain_grad()
        generator = torch.Generator().manual_seed(7)
        values = {"colors": rendered.colors, "depth": rendered.depth, "alpha": rendered.alpha}
        total = torch.zeros((), dtype=dtype)
        for value in values.values():
            total = total + (value * torch.randn(value.shape, generator=generator, dtype=torch.float32).to(dtype)).sum()
        total.backward()
        found = {**values, "means2d": rendered.means2d, "radii": rendered.radii}
        found["means2d gradient"] = rendered.means2d.grad
        found["means2d absgrad"] = rendered.means2d.absgrad
        for name, leaf in leaves.items():
            found[f"{name} gradient"] = leaf.grad
        return {name: value.detach().double() for name, value in found.items()}

    return run


@pytest.fixture(scope="session")
def assert_agree() -> Callable[..., None]:
    """Asserts that two results are equal to 1e-4, entry by entry, with a floor for entries that nearly cancel."""

    def check(
        actual: dict[str, Tensor], expected: dict[str, Tensor], relative: float = 1e-4, floor: float = 1e-5
    ) -> None:
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            scale = value.abs().max().item() if value.numel() else 0.0
            torch.testing.assert_close(
                actual[name], value, rtol=relative, atol=floor * scale, msg=lambda text, name=name: f"{name}: {text}"
            )

    return check
