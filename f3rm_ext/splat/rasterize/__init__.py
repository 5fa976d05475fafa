"""Rasterisation of Gaussians with one interface: gsplat on CUDA, numba kernels on the CPU, plain torch as reference.

Tensors without values (:mod:`f3rm_ext.memory.shapes`) get outputs of the right shapes, and gsplat's or numba's kernels
allocate as usual, by :mod:`f3rm_ext.splat.rasterize.null`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.shapes import kernel_device
from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize.camera import Camera, Composite, Projection, Strips

Backend = Literal["auto", "gsplat", "numba", "torch"]


@dataclass
class Rasterization:
    """A rendered image, and the data about its Gaussians that densification needs."""

    colors: Float[Tensor, "h w channels"]
    """Colours composited front to back, over the background."""
    depth: Float[Tensor, "h w"]
    """Σ w z, with z along the camera's axis, scene units; not divided by alpha."""
    alpha: Float[Tensor, "h w"]
    """Σ w, the accumulation."""
    means2d: Float[Tensor, "gaussians 2"]
    """Centres in pixels, part of the graph: call ``retain_grad`` to read their gradients. With ``absgrad``, after the
    backward pass ``means2d.absgrad`` holds the sums of absolute per-pixel gradients."""
    radii: Int[Tensor, " gaussians"]
    """Three standard deviations, pixels; 0 if not visible."""
    rows: Int[Tensor, " entries"] | None = None
    """Gaussian to which each entry of `means2d` and `radii` belongs, where Gaussians are divided over ranks; None where
    there is one entry for each Gaussian."""


def resolve_backend(backend: Backend, device: torch.device) -> Literal["gsplat", "numba", "torch"]:
    """Returns the backend for tensors on a device.

    Raises:
        ConfigError: the selected backend does not work on the device.

    >>> resolve_backend("auto", torch.device("cpu"))
    'numba'
    """
    if backend == "auto":
        return {"cuda": "gsplat", "cpu": "numba"}.get(device.type, "torch")  # type: ignore[return-value]
    needed = {"gsplat": "cuda", "numba": "cpu"}.get(backend, device.type)
    if device.type != needed:
        raise ConfigError(
            f"The rasteriser {backend!r} works on {needed} tensors and these are on {device.type}: choose 'auto'."
        )
    return backend


def rasterize(
    shapes: Ellipsoids,
    colors: Float[Tensor, "gaussians channels"],
    camera: Camera,
    background: Float[Tensor, " channels"] | None = None,
    *,
    absgrad: bool = False,
    backend: Backend = "auto",
) -> Rasterization:
    """Renders Gaussians; differentiable in the Gaussians, the background and the pose.

    Args:
        colors: colours or features, any number of channels.
        background: colour behind the Gaussians; 0 if None.
        absgrad: also sum absolute gradients of the 2D centres in the backward pass.
        backend: ``auto`` selects gsplat for CUDA tensors, numba for CPU tensors and torch for others.

    Raises:
        ConfigError: the backend does not work on the tensors' device.
    """
    module = _module(backend, shapes.means)
    projected = module.project(shapes, camera)
    picture, depth, alpha = module.composite(projected, colors, camera.size, background, absgrad)
    return Rasterization(picture, depth, alpha, projected.means2d, projected.radii)


@torch.no_grad()
def prepare(shapes: Ellipsoids, camera: Camera, backend: Backend = "auto") -> Strips:
    """Projects Gaussians once, to composite many channels of many values over 0; not differentiable.

    Arguments and errors are those of :func:`rasterize`, and so are the pictures.

    Returns:
        Function that lists the Gaussians of some rows by tile, given the first (a multiple of 16) and the row after the
        last, and returns another. That composites values of the Gaussians, (gaussians, channels), to these rows of the
        image, (h, w, channels), and may be called again.
    """
    module = _module(backend, shapes.means)
    projected: Projection = module.project(shapes, camera)

    @torch.no_grad()
    def strip(rows: tuple[int, int]) -> Composite:
        # Tiles cut Gaussians off where they do in the whole picture, since a strip begins at a row of tiles.
        x, y = projected.means2d.unbind(-1)
        part = projected._replace(means2d=torch.stack([x, y - rows[0]], dim=-1)) if rows[0] else projected
        return torch.no_grad()(module.strip(part, (camera.width, rows[1] - rows[0])))

    return strip


def _module(backend: Backend, means: Tensor) -> Any:
    chosen = resolve_backend(backend, torch.device(kernel_device(means)))
    if chosen == "gsplat":
        from f3rm_ext.splat.rasterize import gsplat_backend as module
    elif chosen == "numba":
        from f3rm_ext.splat.rasterize import cpu as module
    else:
        from f3rm_ext.splat.rasterize import reference as module
    return module
