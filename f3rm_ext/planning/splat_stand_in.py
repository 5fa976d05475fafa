"""What drawing Gaussians allocates and keeps for the backward pass, without computing anything.

One stand-in for the kernels of numba on the CPU, one for those of gsplat 1.4 and 1.5 on CUDA. Their other code is the
real one. All Gaussians count as visible, the largest case.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from f3rm_ext import compat
from f3rm_ext.mesh.bound import model as bound
from f3rm_ext.mesh.bound.smoothness import TrianglePairs
from f3rm_ext.planning.allowances import REFLECTIVE, TILES_PER_GAUSSIAN
from f3rm_ext.splat import rasterize
from f3rm_ext.splat.memory import adam, packed, remainder
from f3rm_ext.splat.rasterize import cpu
from f3rm_ext.splat.rasterize.camera import TILE_PX, Camera
from f3rm_ext.splat.rasterize.compositing import PIXELS, SHAPE_GRADS
from f3rm_ext.splat.rasterize.tiles import GEOMETRY

CHANNELS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33)
"""Numbers of channels for which gsplat has kernels; others are padded to the next."""
FLOAT, INT32, INT64 = 4, 4, 8


@contextmanager
def splat_stand_in(device_type: str, arrays: bool = True) -> Iterator[None]:
    """While this is entered, drawing Gaussians only allocates.

    Args:
        device_type: of the run.
        arrays: whether arrays of numpy count, which the CPU's kernels use and torch's allocator does not see.
    """
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        if device_type == "cuda":
            stack.enter_context(_module("gsplat", _gsplat()))
            put(compat, "check_gsplat_kernels", lambda: None)
            put(rasterize, "resolve_backend", lambda *_: "gsplat")
            put(packed, "_StoredHarmonics", _HarmonicsOnCuda)
        else:
            put(packed, "_StoredHarmonics", _Harmonics)
            put(cpu, "project_numba", _project)
            put(cpu, "_Compositing", _Compositing if arrays else _CompositingWithoutArrays)
        # Without values, neither neighbours are found nor changes noticed.
        put(bound, "triangle_pairs", _pairs)
        put(bound.BoundModel, "gaussians", property(lambda model: model.bound.gaussians()))
        # A step of harmonics takes little beside its moments: some thousand rows at a time, or one kernel.
        put(adam, "_stepped_by_kernel", lambda *_: True)
        put(remainder, "choose", _remainders)
        yield


@contextmanager
def _module(name: str, module: ModuleType) -> Iterator[None]:
    """Puts a stand-in in place of a module. mock.patch.dict would also drop whatever is imported meanwhile."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def _project(
    means: Tensor, quats: Tensor, sizes: Tensor, camera: Camera
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _Projection.apply(means, quats, sizes, camera.viewmat)  # type: ignore[return-value]


class _Projection(torch.autograd.Function):
    """Of either device: centres, conics, depths, compensations and radii."""

    @staticmethod
    def forward(ctx: Any, means: Tensor, quats: Tensor, sizes: Tensor, viewmat: Tensor) -> tuple[Tensor, ...]:
        means, quats, sizes = (value.detach().contiguous() for value in (means, quats, sizes))
        found = [means.new_empty(len(means), *shape) for shape in ((2,), (3,), (), ())]
        radii = means.new_empty(len(means), dtype=torch.int32)
        ctx.save_for_backward(means, quats, sizes, viewmat, radii)
        ctx.mark_non_differentiable(radii)
        return *found, radii

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept = [gradient.contiguous() for gradient in gradients[:4]]
        found = [torch.empty_like(tensor) for tensor in ctx.saved_tensors[:4]]
        del kept
        return tuple(one if need else None for one, need in zip(found, ctx.needs_input_grad, strict=True))


# --- the CPU ---------------------------------------------------------------------------------------------------------


class _Compositing(torch.autograd.Function):
    ARRAYS = True

    @classmethod
    def _array(cls, count_bytes: int) -> Tensor:
        return torch.empty(count_bytes if cls.ARRAYS else 0, dtype=torch.uint8)

    @classmethod
    def forward(  # type: ignore[override]
        cls,
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
    ) -> tuple[Tensor, ...]:
        width, height = size
        count, channels = colors.shape
        tiles, crossings = -(-width // TILE_PX) * -(-height // TILE_PX), count * TILES_PER_GAUSSIAN
        contiguous = [value.detach().contiguous() for value in (means2d, conics, depths, alphas, radii)]
        of_gaussians = cls._array(count * (2 * INT64 + GEOMETRY * FLOAT + (channels + 1) * FLOAT))
        of_tiles = cls._array(crossings * (INT32 + INT64) + tiles * (INT64 + PIXELS * (FLOAT + INT32)))
        cls._array(count * 4 * INT32)  # rectangles
        del contiguous
        ctx.save_for_backward(means2d, of_gaussians, of_tiles)
        ctx.count, ctx.absgrad, ctx.crossings = count, absgrad, crossings
        return (
            colors.new_empty(height, width, channels),
            colors.new_empty(height, width),
            colors.new_empty(height, width),
        )

    @classmethod
    def backward(cls, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        picture, depth, _ = gradients
        channels = picture.shape[2]
        upstream = torch.cat([picture, depth[..., None]], dim=-1)
        row = SHAPE_GRADS + channels + 1
        found = picture.new_empty(ctx.count, row)
        cls._array(min(ctx.crossings * row, cpu.BUFFER) * FLOAT)
        del upstream
        if ctx.absgrad:
            ctx.saved_tensors[0].absgrad = found[:, 6:8].contiguous()
        columns = (found[:, :2], found[:, 2:5], found[:, -1], found[:, 5], found[:, SHAPE_GRADS:-1])
        wanted = [one if need else None for one, need in zip(columns, ctx.needs_input_grad, strict=False)]
        by_background = picture.new_empty(channels) if ctx.needs_input_grad[5] else None
        return (*wanted, by_background, None, None, None)


class _CompositingWithoutArrays(_Compositing):
    ARRAYS = False


# --- CUDA ------------------------------------------------------------------------------------------------------------


def _gsplat() -> ModuleType:
    """Returns a module with the functions of gsplat that are called."""
    module = ModuleType("gsplat")

    def project(
        means: Tensor, covars: None, quats: Tensor, scales: Tensor, viewmats: Tensor, *_: Any, **more: Any
    ) -> Any:
        centres, conics, depths, compensations, radii = _Projection.apply(means, quats, scales, viewmats[0])  # type: ignore[misc]
        reaches = torch.stack([radii, radii], dim=-1)
        found = (reaches, centres, depths, conics)
        batched = [value[None] for value in found]
        return *batched, compensations[None] if more.get("calc_compensations") else None

    def cross(means2d: Tensor, radii: Tensor, depths: Tensor, tile: int, columns: int, rows: int) -> Any:
        count = means2d.shape[1]
        per_gaussian = means2d.new_empty(1, count, dtype=torch.int32)
        sums = per_gaussian.new_empty(count, dtype=torch.int64)
        unsorted = [sums.new_empty(count * TILES_PER_GAUSSIAN, dtype=dtype) for dtype in (torch.int64, torch.int32)]
        found = [torch.empty_like(tensor) for tensor in unsorted]
        return per_gaussian, *found

    def offsets(crossings: Tensor, images: int, columns: int, rows: int) -> Tensor:
        return crossings.new_empty(images, rows, columns, dtype=torch.int32)

    def composite(
        means2d: Tensor, conics: Tensor, colors: Tensor, opacities: Tensor, width: int, height: int, tile: int,
        starts: Tensor, flat: Tensor, *, backgrounds: Tensor, absgrad: bool = False,
    ) -> Any:  # fmt: skip
        channels = colors.shape[-1]
        padding = next(size for size in CHANNELS if size >= channels) - channels
        if padding:
            colors = torch.cat([colors, colors.new_empty(*colors.shape[:-1], padding)], dim=-1)
        picture, alpha = _CompositingOnCuda.apply(  # type: ignore[misc]
            means2d.contiguous(), conics.contiguous(), colors.contiguous(), opacities.contiguous(), starts, flat,
            (width, height), absgrad,
        )  # fmt: skip
        return picture[..., :channels], alpha

    for name, function in (
        ("fully_fused_projection", project),
        ("isect_tiles", cross),
        ("isect_offset_encode", offsets),
        ("rasterize_to_pixels", composite),
    ):
        setattr(module, name, function)
    return module


class _CompositingOnCuda(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        means2d: Tensor,
        conics: Tensor,
        colors: Tensor,
        opacities: Tensor,
        starts: Tensor,
        flat: Tensor,
        size: tuple[int, int],
        absgrad: bool,
    ) -> tuple[Tensor, Tensor]:
        width, height = size
        picture = colors.new_empty(1, height, width, colors.shape[-1])
        alpha = colors.new_empty(1, height, width, 1)
        last = colors.new_empty(1, height, width, dtype=torch.int32)
        ctx.save_for_backward(means2d, conics, colors, opacities, starts, flat, alpha, last)
        ctx.absgrad = absgrad
        return picture, alpha

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept = [gradient.contiguous() for gradient in gradients]
        means2d = ctx.saved_tensors[0]
        if ctx.absgrad:
            means2d.absgrad = torch.empty_like(means2d)
        found = tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:4])
        del kept
        return (*found, None, None, None, None)


# --- harmonics, on both ----------------------------------------------------------------------------------------------


class _Harmonics(torch.autograd.Function):
    """Colours of stored harmonics, with a packed gradient."""

    CHUNK, ALL = packed.CHUNK_CPU, False

    @classmethod
    def forward(cls, ctx: Any, directions: Tensor, storage: Tensor, owner: list[Tensor], degree: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(directions)
        ctx.owner, ctx.degree = owner, degree
        colors = torch.empty_like(directions)
        part = storage.detach()[: cls.CHUNK].float()
        torch.nn.functional.pad(part, (0, 0, 1, 0))
        return colors

    @classmethod
    def backward(cls, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (directions,) = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        rows = None if cls.ALL else gradient.any(dim=1).nonzero().squeeze(-1)
        if ctx.needs_input_grad[1]:
            found = (directions, gradient) if rows is None else (directions[rows], gradient[rows])
            packed._gather(ctx.owner[0], packed.ColorGradient(rows, *found, ctx.degree))
        return None, None, None, None


class _HarmonicsOnCuda(_Harmonics):
    """By gsplat's kernel; the gradient is for all Gaussians, as Triton's optimiser takes it."""

    CHUNK, ALL = packed.CHUNK_KERNEL, True


def _pairs(faces: Tensor) -> TrianglePairs:
    """Neighbours in a closed mesh: three edges for two triangles."""
    count = 3 * len(faces) // 2
    first, second = (torch.empty(count, dtype=torch.int64) for _ in range(2))
    return TrianglePairs(first, second, torch.empty(count))


def _remainders(state: dict[str, Any], reflective: Tensor, value: Tensor) -> None:
    rows = round(len(value) * REFLECTIVE) + 1
    state[remainder.SLOT] = value.new_empty(len(value), dtype=torch.int32)
    state[remainder.REMAINDER] = value.new_empty(rows, *value.shape[1:])
