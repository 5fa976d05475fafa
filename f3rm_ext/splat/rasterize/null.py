"""Null backend of the rasteriser: it allocates what kernels allocate and keep, and computes nothing.

The modules of numba and gsplat take these functions in place of kernels for tensors without values; their other code is
the same. All Gaussians count as visible, the largest case.
"""

from typing import Any

import torch
from torch import Tensor

from f3rm_ext.memory.shapes import null_array
from f3rm_ext.splat.rasterize.camera import TILE_PX, Composite, Projection
from f3rm_ext.splat.rasterize.compositing import BUFFER, PIXELS, SHAPE_GRADS
from f3rm_ext.splat.rasterize.tiles import GEOMETRY

TILES_PER_GAUSSIAN = 4
"""Tiles of 16 × 16 pixels in which a visible Gaussian lies, on average. An assumption; it decides how long the lists of
the tiles are."""
CHANNELS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33)
"""Numbers of channels for which gsplat has kernels; others are padded to the next."""
FLOAT, INT32, INT64 = 4, 4, 8


class NullProjection(torch.autograd.Function):
    """The projection of either device: centres, conics, depths, compensations and radii."""

    @staticmethod
    def forward(ctx: Any, means: Tensor, quats: Tensor, sizes: Tensor, viewmat: Tensor) -> tuple[Tensor, ...]:
        """Allocates the results, and keeps the arguments."""
        means, quats, sizes = (value.detach().contiguous() for value in (means, quats, sizes))
        results = [means.new_empty(len(means), *shape) for shape in ((2,), (3,), (), ())]
        radii = means.new_empty(len(means), dtype=torch.int32)
        ctx.save_for_backward(means, quats, sizes, viewmat, radii)
        ctx.mark_non_differentiable(radii)
        return *results, radii

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Allocates the gradients."""
        kept = [gradient.contiguous() for gradient in gradients[:4]]
        results = [torch.empty_like(tensor) for tensor in ctx.saved_tensors[:4]]
        del kept
        return tuple(one if need else None for one, need in zip(results, ctx.needs_input_grad, strict=True))


# --- numba -----------------------------------------------------------------------------------------------------------


def _tile_arrays(count: int, channels: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns the arrays of Gaussians and of tiles that compositing keeps."""
    width, height = size
    tiles, crossings = -(-width // TILE_PX) * -(-height // TILE_PX), count * TILES_PER_GAUSSIAN
    of_gaussians = null_array(count * (2 * INT64 + GEOMETRY * FLOAT + (channels + 1) * FLOAT))
    of_tiles = null_array(crossings * (INT32 + INT64) + tiles * (INT64 + PIXELS * (FLOAT + INT32)))
    null_array(count * 4 * INT32)  # rectangles
    return of_gaussians, of_tiles


class NullCompositing(torch.autograd.Function):
    """Compositing by numba, with the arrays of its kernels."""

    @staticmethod
    def forward(
        ctx: Any, size: tuple[int, int], absgrad: bool, colors: Tensor, background: Tensor, *projected: Tensor
    ) -> tuple[Tensor, ...]:
        """Allocates colours, depth and accumulation."""
        width, height = size
        count, channels = colors.shape
        contiguous = [value.detach().contiguous() for value in projected]
        arrays = _tile_arrays(count, channels, size)
        del contiguous
        ctx.save_for_backward(projected[0], *arrays)
        ctx.count, ctx.absgrad = count, absgrad
        maps = (colors.new_empty(height, width) for _ in range(2))
        return colors.new_empty(height, width, channels), *maps

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Allocates the gradients, those of each intersection first."""
        picture, depth, _ = gradients
        channels = picture.shape[2]
        upstream = torch.cat([picture, depth[..., None]], dim=-1)
        row = SHAPE_GRADS + channels + 1
        rows = picture.new_empty(ctx.count, row)
        null_array(min(ctx.count * TILES_PER_GAUSSIAN * row, BUFFER) * FLOAT)
        del upstream
        if ctx.absgrad:
            ctx.saved_tensors[0].absgrad = rows[:, 6:8].contiguous()
        background = picture.new_empty(channels) if ctx.needs_input_grad[3] else None
        results = (rows[:, SHAPE_GRADS:-1], background, rows[:, :2], rows[:, 2:5], rows[:, -1], rows[:, 5], None)
        return None, None, *(one if need else None for one, need in zip(results, ctx.needs_input_grad[2:], strict=True))


def null_strip(projected: Projection, size: tuple[int, int]) -> Composite:
    """Returns what composites values on the CPU."""
    kept = projected, _tile_arrays(len(projected.means2d), 0, size)

    def composite(values: Tensor, _kept: object = kept) -> Tensor:
        null_array(len(values) * (values.shape[1] + 1) * FLOAT)
        return values.new_empty(size[1], size[0], values.shape[1])

    return composite


# --- gsplat ----------------------------------------------------------------------------------------------------------


class NullGsplat:
    """The functions of gsplat 1.4 and 1.5 that the CUDA backend calls, under their names."""

    @staticmethod
    def fully_fused_projection(
        means: Tensor, covars: None, quats: Tensor, scales: Tensor, viewmats: Tensor, *_: Any, **options: Any
    ) -> tuple[Tensor | None, ...]:
        """Returns radii, centres, depths, conics and compensations of one image."""
        centres, conics, depths, compensations, radii = NullProjection.apply(means, quats, scales, viewmats[0])  # type: ignore[misc]
        batched = [value[None] for value in (torch.stack([radii, radii], dim=-1), centres, depths, conics)]
        return *batched, compensations[None] if options.get("calc_compensations") else None

    @staticmethod
    def isect_tiles(
        means2d: Tensor, radii: Tensor, depths: Tensor, tile: int, columns: int, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tiles per Gaussian, intersections and their Gaussians, sorted."""
        count = means2d.shape[1]
        per_gaussian = means2d.new_empty(1, count, dtype=torch.int32)
        sums = per_gaussian.new_empty(count, dtype=torch.int64)
        unsorted = [sums.new_empty(count * TILES_PER_GAUSSIAN, dtype=dtype) for dtype in (torch.int64, torch.int32)]
        crossings, flat = (torch.empty_like(tensor) for tensor in unsorted)
        return per_gaussian, crossings, flat

    @staticmethod
    def isect_offset_encode(crossings: Tensor, images: int, columns: int, rows: int) -> Tensor:
        """Returns where the intersections of each tile begin."""
        return crossings.new_empty(images, rows, columns, dtype=torch.int32)

    @staticmethod
    def rasterize_to_pixels(
        means2d: Tensor, conics: Tensor, colors: Tensor, opacities: Tensor, width: int, height: int, tile: int,
        starts: Tensor, flat: Tensor, *, backgrounds: Tensor | None = None, absgrad: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns colours and accumulation."""
        channels = colors.shape[-1]
        padding = next(size for size in CHANNELS if size >= channels) - channels if channels <= CHANNELS[-1] else 0
        if padding:
            colors = torch.cat([colors, colors.new_empty(*colors.shape[:-1], padding)], dim=-1)
        given = (value.contiguous() for value in (means2d, conics, colors, opacities))
        picture, alpha = _NullGsplatCompositing.apply((width, height), absgrad, *given, starts, flat)  # type: ignore[misc]
        return picture[..., :channels], alpha

    @staticmethod
    def spherical_harmonics(degree: int, directions: Tensor, coefficients: Tensor) -> Tensor:
        """Returns colours."""
        return torch.empty_like(directions)


class _NullGsplatCompositing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, size: tuple[int, int], absgrad: bool, *given: Tensor) -> tuple[Tensor, Tensor]:
        (width, height), colors = size, given[2]
        picture = colors.new_empty(1, height, width, colors.shape[-1])
        alpha = colors.new_empty(1, height, width, 1)
        last = colors.new_empty(1, height, width, dtype=torch.int32)
        ctx.save_for_backward(*given, alpha, last)
        ctx.absgrad = absgrad
        return picture, alpha

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept = [gradient.contiguous() for gradient in gradients]
        means2d = ctx.saved_tensors[0]
        if ctx.absgrad:
            means2d.absgrad = torch.empty_like(means2d)
        results = tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:4])
        del kept
        return (None, None, *results, None, None)
