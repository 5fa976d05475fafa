"""Rasterisation on CUDA with the kernels of gsplat 1.4 or 1.5.

This calls the steps of ``gsplat.rasterization`` one by one, because callers read the gradient and the absolute gradient
of the 2D centres, which therefore must be one tensor (gaussians, 2) between the Gaussians and the image.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from f3rm_ext import compat
from f3rm_ext.memory.shapes import lacks_values
from f3rm_ext.splat.rasterize.camera import TILE_PX, Camera, Composite, Strips, shift_to_strip

CHANNEL_CHUNK = 32
"""Channels composited at a time: the backward kernel keeps them in shared memory."""
FORWARD_CHUNK = 64
"""Channels composited at a time where there is no backward pass: the kernel keeps them in registers."""


def kernels_for(tensor: Tensor) -> Any:
    """Returns gsplat, or its null backend for a tensor without values."""
    if lacks_values(tensor):
        from f3rm_ext.splat.rasterize.null import NullGsplat

        return NullGsplat
    import gsplat

    return gsplat


def _batch_and_watch(means2d: Tensor) -> Tensor:
    """Adds a batch dimension to the centres; a hook adds gsplat's absolute gradients to ``means2d.absgrad``.

    Python's collector does not see through autograd's graph, so a reference cycle in it would never be freed. The
    centres hold the batch and the batch holds the hook, so neither may be held by what it holds: the batch is a copy,
    since a view would hold the centres.
    """
    batch = torch.stack([means2d])
    total: Tensor = means2d.absgrad  # type: ignore[attr-defined]
    watched = weakref.ref(batch)

    def add(_: Tensor) -> None:
        source = watched()
        assert source is not None, "the batch was freed before its gradient arrived"
        total.add_(source.absgrad[0])  # type: ignore[attr-defined]

    batch.register_hook(add)
    means2d.batches = [*getattr(means2d, "batches", ()), batch]  # type: ignore[attr-defined]
    return batch


def scalar_radii(reaches: Tensor) -> Tensor:
    """Returns one radius for each of (gaussians,), 0 if it is not drawn, or of (gaussians, 2), as gsplat 1.5 gives."""
    return reaches if reaches.dim() == 1 else reaches.amax(dim=1) * (reaches.amin(dim=1) > 0)


@dataclass
class KernelProjection:
    """Gaussians in an image; tensors for gsplat have a first dimension of 1."""

    means2d: Tensor
    """Centres, (gaussians, 2), pixels."""
    conics: Tensor
    """Inverses of the covariances, (1, gaussians, 3), px⁻²."""
    depths: Tensor
    """(1, gaussians), scene units."""
    reaches: Tensor
    """Radii, (1, gaussians), or by axis in gsplat 1.5, (1, gaussians, 2), pixels."""
    alphas: Tensor
    """Opacities, compensated if antialiased, (1, gaussians)."""


def _project(
    means: Tensor, quats: Tensor, sizes: Tensor, alphas: Tensor, camera: Camera, antialiased: bool
) -> KernelProjection:
    if not lacks_values(means):
        compat.check_gsplat_kernels()
    reaches, batched, depths, conics, compensations = kernels_for(means).fully_fused_projection(
        means,
        None,
        quats,
        sizes,
        camera.viewmat[None],
        camera.K[None],
        camera.width,
        camera.height,
        eps2d=camera.eps2d,
        near_plane=camera.near_plane,
        far_plane=camera.far_plane,
        radius_clip=camera.radius_clip,
        calc_compensations=antialiased,
    )
    # gsplat leaves the values of invisible Gaussians uninitialised.
    drawn = scalar_radii(reaches[0]) > 0
    means2d = torch.where(drawn[:, None], batched[0], 0.0)
    depths = torch.where(drawn, depths[0], 0.0)[None]
    if antialiased:
        alphas = alphas * torch.where(drawn, compensations[0], 0.0)
    return KernelProjection(means2d, conics, depths, reaches, alphas[None])


def _tiles(projected: KernelProjection, means2d: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns where the Gaussians of each tile begin, and the Gaussians; the host waits for their number."""
    gsplat = kernels_for(means2d)
    columns, rows = (-(-side // TILE_PX) for side in size)
    _, crossings, flat = gsplat.isect_tiles(
        means2d.detach()[None], projected.reaches, projected.depths.detach(), TILE_PX, columns, rows
    )
    return gsplat.isect_offset_encode(crossings, 1, columns, rows), flat


@torch.no_grad()
def prepare(means: Tensor, quats: Tensor, sizes: Tensor, alphas: Tensor, camera: Camera, antialiased: bool) -> Strips:
    """Projects Gaussians once, and lists them by tile once for each strip; see :func:`render`."""
    gsplat = kernels_for(means)
    means, quats, sizes, alphas = (value.float() for value in (means, quats, sizes, alphas))
    projected = _project(means, quats, sizes, alphas, camera, antialiased)

    @torch.no_grad()
    def strip(rows: tuple[int, int]) -> Composite:
        size = camera.width, rows[1] - rows[0]
        means2d = shift_to_strip(projected.means2d, rows)
        offsets, flat = _tiles(projected, means2d, size)

        @torch.no_grad()
        def composite(values: Tensor) -> Tensor:
            pictures = [
                gsplat.rasterize_to_pixels(
                    means2d[None], projected.conics, channels[None], projected.alphas, *size, TILE_PX, offsets, flat
                )[0][0]
                for channels in values.float().split(FORWARD_CHUNK, -1)
            ]  # fmt: skip
            return pictures[0] if len(pictures) == 1 else torch.cat(pictures, dim=-1)

        return composite

    return strip


def render(
    means: Tensor,
    quats: Tensor,
    sizes: Tensor,
    alphas: Tensor,
    colors: Tensor,
    camera: Camera,
    background: Tensor | None,
    antialiased: bool,
    absgrad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns colours, depth, accumulation, 2D centres and radii for tensors on a CUDA device, in float32.

    More than 32 channels are composited in several passes. Absolute gradients are then summed over the passes, and may
    exceed those of a single pass.
    """
    # The kernels take float32 alone; under autocast a product of matrices, such as features in few colours, is half.
    means, quats, sizes, alphas, colors = (value.float() for value in (means, quats, sizes, alphas, colors))
    behind = colors.new_zeros(colors.shape[1]) if background is None else background
    projected = _project(means, quats, sizes, alphas, camera, antialiased)
    picture, depth, alpha = composite(projected, colors, (camera.width, camera.height), behind, absgrad)
    return picture, depth, alpha, projected.means2d, scalar_radii(projected.reaches[0])


def composite(
    projected: KernelProjection, colors: Tensor, size: tuple[int, int], behind: Tensor, absgrad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Composites projected Gaussians; returns colours, depth and accumulation.

    Args:
        absgrad: whether ``means2d.absgrad`` is to hold absolute gradients after the backward pass.
    """
    gsplat = kernels_for(colors)
    means2d = projected.means2d
    offsets, flat = _tiles(projected, means2d, size)
    payload = torch.cat([colors, projected.depths[0, :, None]], dim=-1)
    backdrop = torch.cat([behind, behind.new_zeros(1)])
    if absgrad:
        means2d.absgrad = torch.zeros_like(means2d)  # type: ignore[attr-defined]
    pictures, alpha = [], None
    for channels, beyond in zip(payload.split(CHANNEL_CHUNK, -1), backdrop.split(CHANNEL_CHUNK), strict=True):
        centres = _batch_and_watch(means2d) if absgrad and means2d.requires_grad else means2d[None]
        picture, accumulation = gsplat.rasterize_to_pixels(
            centres, projected.conics, channels[None], projected.alphas, *size, TILE_PX, offsets, flat,
            backgrounds=beyond[None], absgrad=absgrad,
        )  # fmt: skip
        pictures.append(picture[0])
        alpha = accumulation[0, ..., 0] if alpha is None else alpha
    picture = torch.cat(pictures, dim=-1)
    assert alpha is not None
    return picture[..., :-1], picture[..., -1], alpha
