"""Rasterisation on the CPU with numba kernels: projection, tiles, compositing; differentiable once, float32."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.memory.shapes import lacks_values
from f3rm_ext.splat.rasterize.camera import TILE_PX, Composite, Projection
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
from f3rm_ext.splat.rasterize.projection import project
from f3rm_ext.splat.rasterize.tiles import Bins, as_array, bin_gaussians

__all__ = ["composite", "project", "strip"]


def split_tiles(starts: np.ndarray, row: int) -> Iterator[tuple[int, int]]:
    """Yields consecutive runs of tiles whose intersections, with ``row`` numbers each, fit into the buffer."""
    tile, tiles = 0, len(starts) - 1
    while tile < tiles:
        fitting = int(np.searchsorted(starts, starts[tile] + BUFFER // row, side="right")) - 1
        stop = min(tiles, max(tile + 1, fitting))
        yield tile, stop
        tile = stop


def _to_image(tiles: np.ndarray, height: int, width: int) -> Tensor:
    """Arranges values of the tiles' pixels as an image."""
    rows, columns = -(-height // TILE_PX), -(-width // TILE_PX)
    blocks = tiles.reshape(rows, columns, TILE_PX // LANES, TILE_PX, LANES).transpose(0, 3, 1, 2, 4)
    return torch.from_numpy(blocks.reshape(rows * TILE_PX, columns * TILE_PX)[:height, :width])


def _sum_over_tiles(bins: Bins, count: int, columns: int, kernel: Callable[..., None], *arguments: Any) -> Tensor:
    """Adds up gradients per Gaussian, (count, columns), over the tiles; a kernel writes those of each intersection."""
    gradients = torch.zeros(count, columns)
    for tile, stop in split_tiles(bins.starts, columns):
        first, end = bins.starts[tile], bins.starts[stop]
        rows = np.zeros((end - first, columns), dtype=np.float32)
        kernel(bins.tile_order(tile, stop), bins.starts, bins.ranks, bins.geometry, *arguments, first, rows)
        add_rows(rows, first, bins.slots, bins.slot_starts, bins.order, gradients.numpy())
    return gradients


class _Composite(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bins: Bins, size: tuple[int, int], absgrad: bool, colors: Tensor, background: Tensor, *shapes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        (width, height), (means2d, _, depths, _) = size, shapes
        payload = np.empty((len(bins.order), colors.shape[1] + 1), dtype=np.float32)
        np.take(as_array(colors), bins.order, axis=0, out=payload[:, :-1])
        np.take(as_array(depths), bins.order, out=payload[:, -1])
        behind = np.append(as_array(background), np.float32(0.0))
        tiles = len(bins.starts) - 1
        final, last = np.empty((tiles, PIXELS), dtype=np.float32), np.empty((tiles, PIXELS), dtype=np.int32)
        picture = torch.empty(height, width, colors.shape[1])
        depth, accumulation = torch.empty(height, width), torch.empty(height, width)
        forward(
            bins.tile_order(), bins.starts, bins.ranks, bins.geometry, payload, behind, bins.columns,
            picture.numpy(), depth.numpy(), accumulation.numpy(), final, last,
        )  # fmt: skip
        ctx.save_for_backward(means2d)
        ctx.bins, ctx.payload, ctx.behind = bins, payload, behind
        ctx.final, ctx.last, ctx.absgrad = final, last, absgrad
        return picture, depth, accumulation

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (means2d,) = ctx.saved_tensors
        g_picture, g_depth, g_accumulation = grads
        bins, needs, channels = ctx.bins, ctx.needs_input_grad[3:], g_picture.shape[2]
        g_background = None
        if needs[1]:
            g_background = torch.einsum("hwc,hw->c", g_picture, _to_image(ctx.final, *g_picture.shape[:2]))
        if not any(needs[2:]):
            colors = backward_colors, bins.columns, as_array(g_picture)
            g_colors = _sum_over_tiles(bins, len(means2d), channels, *colors) if needs[0] else None
            return (None, None, None, g_colors, g_background, None, None, None, None)
        upstream = torch.cat([g_picture, g_depth[..., None]], dim=-1).numpy()
        # Of each Gaussian: centre, conic, opacity, absolute gradient of the centre, colours, depth.
        gradients = _sum_over_tiles(
            bins, len(means2d), SHAPE_GRADS + channels + 1, backward, ctx.payload, ctx.behind, bins.columns, upstream,
            as_array(g_accumulation), ctx.final, ctx.last,
        )  # fmt: skip
        if ctx.absgrad:
            means2d.absgrad = gradients[:, 6:8].contiguous()
        shapes = gradients[:, :2], gradients[:, 2:5], gradients[:, -1], gradients[:, 5]
        wanted = zip((gradients[:, SHAPE_GRADS:-1], g_background, *shapes), needs, strict=True)
        return (None, None, None, *(value if need else None for value, need in wanted))


def composite(
    projected: Projection, colors: Tensor, size: tuple[int, int], background: Tensor | None, absgrad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Composites Gaussians; returns colours, depth and accumulation. Converts tensors to float32."""
    colors = colors.float()
    behind = colors.new_zeros(colors.shape[1]) if background is None else background.float()
    if lacks_values(colors):
        from f3rm_ext.splat.rasterize.null import NullCompositing

        return NullCompositing.apply(size, absgrad, colors, behind, *projected[:4], projected.radii)  # type: ignore[return-value]
    bins = bin_gaussians(projected, size)
    return _Composite.apply(bins, size, absgrad, colors, behind, *projected[:4])  # type: ignore[return-value]


def strip(projected: Projection, size: tuple[int, int]) -> Composite:
    """Lists Gaussians by tile once; returns what composites values of theirs over 0."""
    if lacks_values(projected.means2d):
        from f3rm_ext.splat.rasterize.null import null_strip

        return null_strip(projected, size)
    bins = bin_gaussians(projected, size)

    def draw(values: Tensor) -> Tensor:
        behind = torch.zeros(values.shape[1])
        return _Composite.apply(bins, size, False, values.float(), behind, *projected[:4])[0]  # type: ignore[index]

    return draw
