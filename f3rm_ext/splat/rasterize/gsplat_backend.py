"""Rasterisation on CUDA with the kernels of gsplat 1.4 or 1.5.

This calls the steps of ``gsplat.rasterization`` one by one, because callers read the gradient and the absolute gradient
of the 2D centres, which therefore must be one tensor (gaussians, 2) between the Gaussians and the image.
"""

import weakref

import torch
from torch import Tensor

from f3rm_ext import compat
from f3rm_ext.splat.rasterize.camera import TILE_PX, Camera

CHANNEL_CHUNK = 32
"""Channels composited at a time: the backward kernel keeps them in shared memory."""


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
        found = watched()
        assert found is not None, "the batch was freed before its gradient arrived"
        total.add_(found.absgrad[0])  # type: ignore[attr-defined]

    batch.register_hook(add)
    means2d.batches = [*getattr(means2d, "batches", ()), batch]  # type: ignore[attr-defined]
    return batch


def radii_of(reaches: Tensor) -> Tensor:
    """Returns one radius for each of (gaussians,), 0 if it is not drawn, or of (gaussians, 2), as gsplat 1.5 gives."""
    return reaches if reaches.dim() == 1 else reaches.amax(dim=1) * (reaches.amin(dim=1) > 0)


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

    Raises:
        ConfigError: gsplat has no kernels on this machine.
    """
    compat.check_gsplat_kernels()
    from gsplat import fully_fused_projection

    # The kernels take float32 alone; under autocast a product of matrices, such as features in few colours, is half.
    means, quats, sizes, alphas, colors = (value.float() for value in (means, quats, sizes, alphas, colors))
    width, height = camera.width, camera.height
    behind = colors.new_zeros(colors.shape[1]) if background is None else background
    reaches, batched, depths, conics, compensations = fully_fused_projection(
        means,
        None,
        quats,
        sizes,
        camera.viewmat[None],
        camera.K[None],
        width,
        height,
        eps2d=camera.eps2d,
        near_plane=camera.near_plane,
        far_plane=camera.far_plane,
        radius_clip=camera.radius_clip,
        calc_compensations=antialiased,
    )
    # gsplat leaves the values of invisible Gaussians uninitialised.
    radii = radii_of(reaches[0])
    drawn = radii > 0
    means2d = camera.in_strip(torch.where(drawn[:, None], batched[0], 0.0))
    width, height = camera.size
    depths = torch.where(drawn, depths[0], 0.0)[None]
    if antialiased:
        alphas = alphas * torch.where(drawn, compensations[0], 0.0)
    picture, depth, alpha = composite(
        means2d, reaches, depths, conics, colors, alphas, (width, height), behind, absgrad
    )
    return picture, depth, alpha, means2d, radii


def composite(
    means2d: Tensor,
    reaches: Tensor,
    depths: Tensor,
    conics: Tensor,
    colors: Tensor,
    alphas: Tensor,
    size: tuple[int, int],
    behind: Tensor,
    absgrad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Composites projected Gaussians; returns colours, depth and accumulation.

    Args:
        means2d: centres, (gaussians, 2), pixels.
        reaches: radii as gsplat's projection gives them, (1, gaussians) or (1, gaussians, 2), pixels.
        depths: (1, gaussians), scene units.
        conics: inverses of the covariances, (1, gaussians, 3), px⁻².
        colors: (gaussians, channels).
        alphas: opacities, (gaussians,).
        size: width and height of the image, pixels.
        behind: colour behind the Gaussians, (channels,).
        absgrad: whether ``means2d.absgrad`` is to hold absolute gradients after the backward pass.
    """
    from gsplat import isect_offset_encode, isect_tiles, rasterize_to_pixels

    width, height = size
    columns, rows = -(-width // TILE_PX), -(-height // TILE_PX)
    _, crossings, flat = isect_tiles(means2d.detach()[None], reaches, depths.detach(), TILE_PX, columns, rows)
    offsets = isect_offset_encode(crossings, 1, columns, rows)

    payload = torch.cat([colors, depths[0, :, None]], dim=-1)
    backdrop = torch.cat([behind, behind.new_zeros(1)])
    if absgrad:
        means2d.absgrad = torch.zeros_like(means2d)  # type: ignore[attr-defined]
    pictures, alpha = [], None
    for channels, beyond in zip(payload.split(CHANNEL_CHUNK, -1), backdrop.split(CHANNEL_CHUNK), strict=True):
        centres = _batch_and_watch(means2d) if absgrad and means2d.requires_grad else means2d[None]
        picture, accumulation = rasterize_to_pixels(
            centres, conics, channels[None], alphas[None], width, height, TILE_PX, offsets, flat,
            backgrounds=beyond[None], absgrad=absgrad,
        )  # fmt: skip
        pictures.append(picture[0])
        alpha = accumulation[0, ..., 0] if alpha is None else alpha
    picture = torch.cat(pictures, dim=-1)
    assert alpha is not None
    return picture[..., :-1], picture[..., -1], alpha
