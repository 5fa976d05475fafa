"""Rasterisation on the CPU with numba kernels: projection, tiles, compositing; differentiable once, float32."""

from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.memory.shapes import lacks_values
from f3rm_ext.splat.rasterize.camera import TILE_PX, Camera, Composite, Strips, shift_to_strip
from f3rm_ext.splat.rasterize.compositing import (
    BUFFER,
    LANES,
    PIXELS,
    SHAPE_GRADS,
    add_rows,
    backward,
    backward_colors,
    forward,
)
from f3rm_ext.splat.rasterize.projection import project_numba
from f3rm_ext.splat.rasterize.tiles import Bins, balance, bin_gaussians


def _runs(starts: np.ndarray, row: int) -> Iterator[tuple[int, int]]:
    """Yields consecutive runs of tiles whose intersections, with ``row`` numbers each, fit into the buffer."""
    tile, tiles = 0, len(starts) - 1
    while tile < tiles:
        fitting = int(np.searchsorted(starts, starts[tile] + BUFFER // row, side="right")) - 1
        stop = min(tiles, max(tile + 1, fitting))
        yield tile, stop
        tile = stop


def _array(value: Tensor) -> np.ndarray:
    return value.detach().contiguous().numpy()


def _to_image(tiles: np.ndarray, height: int, width: int) -> Tensor:
    """Arranges values of the tiles' pixels as an image."""
    rows, columns = -(-height // TILE_PX), -(-width // TILE_PX)
    blocks = tiles.reshape(rows, columns, TILE_PX // LANES, TILE_PX, LANES).transpose(0, 3, 1, 2, 4)
    return torch.from_numpy(blocks.reshape(rows * TILE_PX, columns * TILE_PX)[:height, :width])


def _bin(means2d: Tensor, conics: Tensor, depths: Tensor, alphas: Tensor, radii: Tensor, size: tuple[int, int]) -> Bins:
    return bin_gaussians(_array(means2d), _array(conics), _array(depths), _array(alphas), _array(radii), size)


def _composite(
    bins: Bins, depths: Tensor, colors: Tensor, background: Tensor, size: tuple[int, int]
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[np.ndarray, ...]]:
    """Returns colours, depth and accumulation, and what the backward pass needs."""
    width, height = size
    payload = np.empty((len(bins.order), colors.shape[1] + 1), dtype=np.float32)
    np.take(_array(colors), bins.order, axis=0, out=payload[:, :-1])
    np.take(_array(depths), bins.order, out=payload[:, -1])
    behind = np.append(_array(background), np.float32(0.0))
    tiles = len(bins.starts) - 1
    order = balance(np.diff(bins.starts), numba.get_num_threads())
    final, last = np.empty((tiles, PIXELS), dtype=np.float32), np.empty((tiles, PIXELS), dtype=np.int32)
    picture = torch.empty(height, width, colors.shape[1])
    depth, accumulation = torch.empty(height, width), torch.empty(height, width)
    forward(
        order, bins.starts, bins.ranks, bins.geometry, payload, behind, bins.columns,
        picture.numpy(), depth.numpy(), accumulation.numpy(), final, last,
    )  # fmt: skip
    return (picture, depth, accumulation), (payload, behind, final, last)


class _Composite(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        means2d: Tensor,
        conics: Tensor,
        depths: Tensor,
        alphas: Tensor,
        colors: Tensor,
        background: Tensor,
        radii: Tensor,
        size: tuple[int, int],
        absgrad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        bins = _bin(means2d, conics, depths, alphas, radii, size)
        outputs, (payload, behind, final, last) = _composite(bins, depths, colors, background, size)
        ctx.save_for_backward(means2d)
        ctx.bins, ctx.payload, ctx.behind, ctx.state = bins, payload, behind, (final, last)
        ctx.absgrad = absgrad
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (means2d,) = ctx.saved_tensors
        g_picture, g_depth, g_accumulation = grads
        needs = ctx.needs_input_grad
        g_background = None
        if needs[5]:
            g_background = torch.einsum("hwc,hw->c", g_picture, _to_image(ctx.state[0], *g_picture.shape[:2]))
        if any(needs[:4]):
            gradients = _all_gradients(ctx, g_picture, g_depth, g_accumulation, len(means2d))
            if ctx.absgrad:
                means2d.absgrad = gradients[:, 6:8].contiguous()
            channels = g_picture.shape[2]
            columns = (
                gradients[:, :2],
                gradients[:, 2:5],
                gradients[:, -1],
                gradients[:, 5],
                gradients[:, SHAPE_GRADS:-1],
            )
            assert columns[-1].shape[1] == channels
            wanted = [value if need else None for value, need in zip(columns, needs, strict=False)]
            return (*wanted, g_background, None, None, None)
        g_colors = _color_gradients(ctx, g_picture, len(means2d)) if needs[4] else None
        return (None, None, None, None, g_colors, g_background, None, None, None)


def _all_gradients(ctx: Any, g_picture: Tensor, g_depth: Tensor, g_accumulation: Tensor, count: int) -> Tensor:
    """Returns gradients per Gaussian: centre, conic, opacity, absolute gradient of the centre, colours, depth."""
    bins: Bins = ctx.bins
    final, last = ctx.state
    upstream = torch.cat([g_picture, g_depth[..., None]], dim=-1).numpy()
    gradients = torch.zeros(count, SHAPE_GRADS + upstream.shape[2])
    for tile, stop in _runs(bins.starts, gradients.shape[1]):
        first, end = bins.starts[tile], bins.starts[stop]
        rows = np.zeros((end - first, gradients.shape[1]), dtype=np.float32)
        order = tile + balance(np.diff(bins.starts[tile : stop + 1]), numba.get_num_threads())
        backward(
            order, bins.starts, bins.ranks, bins.geometry, ctx.payload, ctx.behind, bins.columns, upstream,
            _array(g_accumulation), final, last, first, rows,
        )  # fmt: skip
        add_rows(rows, first, bins.slots, bins.slot_starts, bins.order, gradients.numpy())
    return gradients


def _color_gradients(ctx: Any, g_picture: Tensor, count: int) -> Tensor:
    """Returns gradients of the colours per Gaussian."""
    bins: Bins = ctx.bins
    upstream = _array(g_picture)
    gradients = torch.zeros(count, upstream.shape[2])
    for tile, stop in _runs(bins.starts, gradients.shape[1]):
        first, end = bins.starts[tile], bins.starts[stop]
        rows = np.zeros((end - first, gradients.shape[1]), dtype=np.float32)
        order = tile + balance(np.diff(bins.starts[tile : stop + 1]), numba.get_num_threads())
        backward_colors(
            order, bins.starts, bins.ranks, bins.geometry, bins.columns, upstream, ctx.state[1], first, rows
        )  # fmt: skip
        add_rows(rows, first, bins.slots, bins.slot_starts, bins.order, gradients.numpy())
    return gradients


@torch.no_grad()
def bin_view(means: Tensor, quats: Tensor, sizes: Tensor, alphas: Tensor, camera: Camera, antialiased: bool) -> Bins:
    """Projects Gaussians, float32, and lists them by tile; see :func:`render`."""
    means2d, conics, depths, compensations, radii = project_numba(means, quats, sizes, camera)
    opacities = alphas * compensations if antialiased else alphas
    return _bin(means2d, conics, depths, opacities, radii, (camera.width, camera.height))


@torch.no_grad()
def prepare(means: Tensor, quats: Tensor, sizes: Tensor, alphas: Tensor, camera: Camera, antialiased: bool) -> Strips:
    """Projects Gaussians once, and lists them by tile once for each strip; see :func:`render`."""
    means, quats, sizes, alphas = (value.float() for value in (means, quats, sizes, alphas))
    if lacks_values(means):
        from f3rm_ext.splat.rasterize.null import null_strips

        return null_strips(means, quats, sizes, camera)
    means2d, conics, depths, compensations, radii = project_numba(means, quats, sizes, camera)
    opacities = alphas * compensations if antialiased else alphas

    def strip(rows: tuple[int, int]) -> Composite:
        size = camera.width, rows[1] - rows[0]
        bins = _bin(shift_to_strip(means2d, rows), conics, depths, opacities, radii, size)

        def composite(values: Tensor) -> Tensor:
            outputs, _ = _composite(bins, depths, values.float(), values.new_zeros(values.shape[1]).float(), size)
            return outputs[0]

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
    """Returns colours, depth, accumulation, 2D centres and radii; converts CPU tensors to float32."""
    means, quats, sizes, alphas, colors = (value.float() for value in (means, quats, sizes, alphas, colors))
    project, compositing = project_numba, _Composite
    if lacks_values(means):
        from f3rm_ext.splat.rasterize.null import NullCompositing as compositing
        from f3rm_ext.splat.rasterize.null import null_project as project
    means2d, conics, depths, compensations, radii = project(means, quats, sizes, camera)
    if antialiased:
        alphas = alphas * compensations
    behind = colors.new_zeros(colors.shape[1]) if background is None else background.float()
    picture = compositing.apply(
        means2d, conics, depths, alphas, colors, behind, radii, (camera.width, camera.height), absgrad
    )
    return (*picture, means2d, radii)  # type: ignore[misc]
