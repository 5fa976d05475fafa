"""Rasterisation on CUDA with the kernels of gsplat 1.4 or 1.5.

This calls the steps of ``gsplat.rasterization`` one by one, because callers read the gradient and the absolute gradient
of the 2D centres, which therefore must be one tensor (gaussians, 2) between the Gaussians and the image.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from f3rm_ext import compat
from f3rm_ext.memory.shapes import lacks_values
from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize.camera import TILE_PX, Camera, Composite, Projection, scalar_radii

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


def project(shapes: Ellipsoids, camera: Camera) -> Projection:
    """Projects Gaussians on a CUDA device.

    The kernels take float32 alone, to which everything is converted: under autocast a product of matrices, such as
    features in few colours, is half.
    """
    means, quats, sizes, alphas = shapes.map(Tensor.float)
    if not lacks_values(means):
        compat.check_gsplat_kernels()
    reaches, batched, depths, conics, compensations = kernels_for(means).fully_fused_projection(
        means, None, quats, sizes, camera.viewmat[None], camera.K[None], *camera.size, eps2d=camera.eps2d,
        near_plane=camera.near_plane, calc_compensations=camera.antialiased,
    )  # fmt: skip
    # gsplat leaves the values of invisible Gaussians uninitialised.
    drawn = scalar_radii(reaches[0]) > 0
    means2d = torch.where(drawn[:, None], batched[0], 0.0)
    if camera.antialiased:
        alphas = alphas * torch.where(drawn, compensations[0], 0.0)
    return Projection(means2d, conics.squeeze(0), torch.where(drawn, depths[0], 0.0), alphas, reaches[0])


def _tiles(projected: Projection, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns where the Gaussians of each tile begin, and the Gaussians; the host waits for their number."""
    gsplat = kernels_for(projected.means2d)
    columns, rows = (-(-side // TILE_PX) for side in size)
    batch = (value.detach()[None] for value in (projected.means2d, projected.reaches, projected.depths))
    _, crossings, flat = gsplat.isect_tiles(*batch, TILE_PX, columns, rows)
    return gsplat.isect_offset_encode(crossings, 1, columns, rows), flat


def strip(projected: Projection, size: tuple[int, int]) -> Composite:
    """Lists Gaussians by tile once; returns what composites values of theirs over 0."""
    gsplat, (offsets, flat) = kernels_for(projected.means2d), _tiles(projected, size)
    means2d, conics, _, alphas, _ = (value[None] for value in projected)

    def draw(values: Tensor) -> Tensor:
        pictures = [
            gsplat.rasterize_to_pixels(means2d, conics, channels[None], alphas, *size, TILE_PX, offsets, flat)[0][0]
            for channels in values.float().split(FORWARD_CHUNK, -1)
        ]
        return pictures[0] if len(pictures) == 1 else torch.cat(pictures, dim=-1)

    return draw


def composite(
    projected: Projection, colors: Tensor, size: tuple[int, int], background: Tensor | None, absgrad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Composites projected Gaussians; returns colours, depth and accumulation.

    More than 32 channels are composited in several passes. With absgrad, ``means2d.absgrad`` holds absolute gradients
    after the backward pass, summed over the passes: they may exceed those of a single pass.
    """
    colors, means2d = colors.float(), projected.means2d
    gsplat, (offsets, flat) = kernels_for(colors), _tiles(projected, size)
    payload = torch.cat([colors, projected.depths[:, None]], dim=-1)
    behind = colors.new_zeros(colors.shape[1]) if background is None else background
    backdrop = torch.cat([behind, behind.new_zeros(1)])
    if absgrad:
        means2d.absgrad = torch.zeros_like(means2d)  # type: ignore[attr-defined]
    pictures, alpha = [], None
    for channels, beyond in zip(payload.split(CHANNEL_CHUNK, -1), backdrop.split(CHANNEL_CHUNK), strict=True):
        centres = _batch_and_watch(means2d) if absgrad and means2d.requires_grad else means2d[None]
        picture, accumulation = gsplat.rasterize_to_pixels(
            centres, projected.conics[None], channels[None], projected.alphas[None], *size, TILE_PX, offsets, flat,
            backgrounds=beyond[None], absgrad=absgrad,
        )  # fmt: skip
        pictures.append(picture[0])
        alpha = accumulation[0, ..., 0] if alpha is None else alpha
    picture = torch.cat(pictures, dim=-1)
    assert alpha is not None
    return picture[..., :-1], picture[..., -1], alpha
