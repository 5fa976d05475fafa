"""gsplat's compiled kernels, pretended for the Python wrappers of gsplat 1.4.0 and 1.5.3.

Names and order of arguments are those of ``bindings.h`` (1.4.0) and ``Ops.h`` (1.5.3). Every call is checked as the
compiled code does (device, contiguity) and as it should (dtype, shape: it reads memory by them). What they compute is
either gsplat's own torch code, or numbers of the right shape.
"""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from f3rm_ext.splat.rasterize.reference import pixel_weights
from pretend.ledger import note_launch, note_wait, uncounted
from pretend.tensors import PretendCuda, on_the_cpu

PADDED = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513)
"""Numbers of channels for which kernels are compiled."""
PINHOLE = "pinhole"
TILE_PX = 16


def check(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """What a kernel needs of a tensor."""
    assert isinstance(tensor, PretendCuda), f"a kernel got {type(tensor)} instead of a tensor on CUDA"
    assert tensor.is_contiguous(), "a kernel got a tensor that is not contiguous"
    assert tensor.dtype == dtype, f"a kernel got {tensor.dtype} instead of {dtype}"
    assert tuple(tensor.shape) == shape, f"a kernel got the shape {tuple(tensor.shape)} instead of {shape}"


@contextmanager
def _standing_in() -> Iterator[None]:
    """Computes on the CPU, where nothing is pretended and nothing counted."""
    with uncounted(), on_the_cpu():
        yield


def _plain(value: Any) -> Any:
    return value.held if isinstance(value, PretendCuda) else value


class Kernels:
    """What both versions compute.

    Args:
        exact: compute what the kernels do; otherwise results have the right shapes only.
    """

    per_axis: bool
    """Whether radii are given for x and y."""

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        self.calls: list[str] = []
        self.CameraModelType = SimpleNamespace(PINHOLE=PINHOLE)
        self.PINHOLE = PINHOLE  # the wrappers ask for it here, since the enumeration is exported

    def _radii(self, images: int, count: int) -> tuple[int, ...]:
        return (images, count, 2) if self.per_axis else (images, count)

    def _note(self, name: str) -> None:
        self.calls.append(name)
        note_launch(f"gsplat.{name}")

    # --- projection --------------------------------------------------------------------------------------------------

    def _project(self, means: Any, covars: Any, quats: Any, scales: Any, opacities: Any, viewmats: Any, Ks: Any,
                 width: int, height: int, eps2d: float, near: float, far: float, clip: float, compensate: bool,
                 camera: str) -> Any:  # fmt: skip
        count = len(means)
        assert covars is None and opacities is None and camera == PINHOLE and type(width) is type(height) is int
        for tensor, shape in ((means, (count, 3)), (quats, (count, 4)), (scales, (count, 3))):
            check(tensor, shape)
        check(viewmats, (1, 4, 4))
        check(Ks, (1, 3, 3))
        assert all(type(value) is float for value in (eps2d, near, far, clip)) and type(compensate) is bool
        self._note("project")
        with _standing_in():
            if not self.exact:
                new = means.new_zeros
                found = [new((1, count, 2)), new((1, count)) + 1, new((1, count, 3)), new((1, count))]
                radii = new(self._radii(1, count), dtype=torch.int32) + 3
                return radii, *found[:3], found[3] if compensate else None
            radii, *values = self._project_plain(
                *map(_plain, (means, quats, scales, viewmats, Ks)), width, height, eps2d, near, far, compensate
            )
            # The kernel leaves the values of what is not drawn as they were in memory.
            hidden = (radii == 0).all(-1) if self.per_axis else radii == 0
            spoiled = [
                None if v is None else torch.where(hidden.reshape(1, -1, *[1] * (v.dim() - 2)), torch.nan, v)
                for v in values
            ]
            return PretendCuda(radii), *(None if v is None else PretendCuda(v) for v in spoiled)

    def _project_plain(self, means: Tensor, quats: Tensor, scales: Tensor, viewmats: Tensor, Ks: Tensor, width: int,
                       height: int, eps2d: float, near: float, far: float, compensate: bool) -> Any:  # fmt: skip
        from gsplat.cuda._torch_impl import _fully_fused_projection, _quat_scale_to_covar_preci

        covars, _ = _quat_scale_to_covar_preci(quats, scales, compute_preci=False)
        return _fully_fused_projection(means, covars, viewmats, Ks, width, height, eps2d, near, far, compensate)

    def _project_back(self, means: Any, covars: Any, quats: Any, scales: Any, viewmats: Any, Ks: Any, width: int,
                      height: int, eps2d: float, camera: str, radii: Any, conics: Any, compensations: Any,
                      v_means2d: Any, v_depths: Any, v_conics: Any, v_compensations: Any,
                      pose: bool) -> Any:  # fmt: skip
        count = len(means)
        assert camera == PINHOLE and covars is None and type(pose) is bool
        check(radii, self._radii(1, count), torch.int32)
        check(conics, (1, count, 3))
        check(v_means2d, (1, count, 2))
        check(v_depths, (1, count))
        check(v_conics, (1, count, 3))
        assert (compensations is None) == (v_compensations is None)
        if v_compensations is not None:
            check(v_compensations, (1, count))
        self._note("project backward")
        with _standing_in():
            if not self.exact:
                return (
                    torch.ones_like(means),
                    None,
                    torch.ones_like(quats),
                    torch.ones_like(scales),
                    (torch.ones_like(viewmats) if pose else None),
                )
            leaves = [_plain(tensor).detach().requires_grad_() for tensor in (means, quats, scales, viewmats)]
            hidden = (_plain(radii) == 0).all(-1) if self.per_axis else _plain(radii) == 0
            with torch.enable_grad():
                _, *values = self._project_plain(
                    *leaves, _plain(Ks), width, height, eps2d, 0.0, 1e10, compensations is not None
                )
                total = torch.zeros(())
                for value, grad in zip(values, (v_means2d, v_depths, v_conics, v_compensations), strict=True):
                    if value is not None:
                        at = hidden.reshape(1, -1, *[1] * (value.dim() - 2))
                        total = total + torch.where(at, 0.0, value * _plain(grad)).sum()
                grads = torch.autograd.grad(total, leaves)
            v_means, v_quats, v_scales, v_viewmats = (PretendCuda(grad.nan_to_num(0.0)) for grad in grads)
            return v_means, None, v_quats, v_scales, v_viewmats if pose else None

    # --- projection of what is seen, for several cameras --------------------------------------------------------------

    def _project_packed(self, means: Any, covars: Any, quats: Any, scales: Any, opacities: Any, viewmats: Any, Ks: Any,
                        width: int, height: int, eps2d: float, near: float, far: float, clip: float, compensate: bool,
                        camera: str) -> Any:  # fmt: skip
        count, cameras = len(means), len(viewmats)
        assert covars is None and opacities is None and camera == PINHOLE and type(width) is type(height) is int
        shapes = ((count, 3), (count, 4), (count, 3), (cameras, 4, 4), (cameras, 3, 3))
        for tensor, shape in zip((means, quats, scales, viewmats, Ks), shapes, strict=True):
            check(tensor, shape)
        assert all(type(value) is float for value in (eps2d, near, far, clip)) and type(compensate) is bool
        self._note("project packed")
        note_wait("number")  # how many are seen
        with _standing_in():
            radii, *values = self._project_plain(
                *map(_plain, (means, quats, scales, viewmats, Ks)), width, height, eps2d, near, far, compensate
            )
            seen = (radii > 0).all(-1) if self.per_axis else radii > 0
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), seen.sum(1).cumsum(0)])
            ids = [PretendCuda(found.contiguous()) for found in seen.nonzero().unbind(1)]
            packed = [None if value is None else PretendCuda(value[seen].contiguous()) for value in (radii, *values)]
            return PretendCuda(starts), *ids, *packed

    def _project_packed_back(self, means: Any, covars: Any, quats: Any, scales: Any, viewmats: Any, Ks: Any, width: int,
                             height: int, eps2d: float, camera: str, camera_ids: Any, gaussian_ids: Any, conics: Any,
                             compensations: Any, v_means2d: Any, v_depths: Any, v_conics: Any, v_compensations: Any,
                             pose: bool, sparse: bool) -> Any:  # fmt: skip
        entries = len(camera_ids)
        assert camera == PINHOLE and covars is None and not pose and sparse is False
        for ids in (camera_ids, gaussian_ids):
            check(ids, (entries,), torch.int64)
        check(conics, (entries, 3))
        check(v_means2d, (entries, 2))
        check(v_depths, (entries,))
        check(v_conics, (entries, 3))
        assert (compensations is None) == (v_compensations is None)
        self._note("project packed backward")
        with _standing_in():
            leaves = [_plain(tensor).detach().requires_grad_() for tensor in (means, quats, scales)]
            at = _plain(camera_ids), _plain(gaussian_ids)
            with torch.enable_grad():
                _, *values = self._project_plain(
                    *leaves, *map(_plain, (viewmats, Ks)), width, height, eps2d, 0.0, 1e10, compensations is not None
                )
                upstream = (v_means2d, v_depths, v_conics, v_compensations)
                pairs = [(v, _plain(g)) for v, g in zip(values, upstream, strict=True) if v is not None]
                total = torch.stack([(value[at] * grad).sum() for value, grad in pairs]).sum()
                grads = torch.autograd.grad(total, leaves)
            v_means, v_quats, v_scales = (PretendCuda(grad.nan_to_num(0.0)) for grad in grads)
            return v_means, None, v_quats, v_scales, None

    # --- tiles -------------------------------------------------------------------------------------------------------

    def _cross(self, means2d: Any, radii: Any, depths: Any, image_ids: Any, gaussian_ids: Any, images: int,
               tile: int, columns: int, rows: int, sort: bool) -> Any:  # fmt: skip
        count = means2d.shape[1]
        assert image_ids is None and gaussian_ids is None and images == 1 and tile == TILE_PX and sort is True
        check(means2d, (1, count, 2))
        check(radii, self._radii(1, count), torch.int32)
        check(depths, (1, count))
        self._note("cross tiles")
        note_wait("number")  # the number of intersections
        with _standing_in():
            if not self.exact:
                crossings = depths.new_zeros(10, dtype=torch.int64)
                return depths.new_zeros((1, count), dtype=torch.int32), crossings, crossings.int()
            at, reach, depth = (_plain(tensor)[0] for tensor in (means2d, radii, depths))
            reach = reach if self.per_axis else reach[:, None].expand(-1, 2)
            most = torch.tensor([columns, rows])
            first = ((at - reach) / tile).floor().clamp_min(0).minimum(most)
            stop = ((at + reach) / tile).ceil().clamp_min(0).minimum(most)
            places = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), -1)
            places = places.reshape(-1, 1, 2)
            inside = ((places >= first) & (places < stop)).all(-1) & (reach > 0).all(-1)
            tiles, gaussians = inside.nonzero().unbind(1)
            crossings = (tiles << 32) | depth[gaussians].view(torch.int32).long()
            crossings, order = crossings.sort(stable=True)
            per_gaussian = inside.sum(0, dtype=torch.int32)[None]
            return tuple(PretendCuda(found) for found in (per_gaussian, crossings, gaussians[order].int()))

    def _offsets(self, crossings: Any, images: int, columns: int, rows: int) -> Any:
        assert images == 1
        check(crossings, (len(crossings),), torch.int64)
        self._note("offsets")
        with _standing_in():
            if not self.exact:
                return crossings.new_zeros((1, rows, columns), dtype=torch.int32)
            starts = torch.searchsorted(_plain(crossings) >> 32, torch.arange(rows * columns))
            return PretendCuda(starts.int().reshape(1, rows, columns))

    # --- compositing -------------------------------------------------------------------------------------------------

    def _check_pixels(self, means2d: Any, conics: Any, colors: Any, opacities: Any, backgrounds: Any, masks: Any,
                      width: int, height: int, tile: int, offsets: Any, flat: Any) -> None:  # fmt: skip
        count, channels = means2d.shape[1], colors.shape[-1]
        assert masks is None and tile == TILE_PX and channels in PADDED
        check(means2d, (1, count, 2))
        check(conics, (1, count, 3))
        check(colors, (1, count, channels))
        check(opacities, (1, count))
        if backgrounds is not None:
            check(backgrounds, (1, channels))
        check(offsets, (1, -(-height // tile), -(-width // tile)), torch.int32)
        check(flat, (len(flat),), torch.int32)

    def _composite(self, means2d: Any, conics: Any, colors: Any, opacities: Any, backgrounds: Any, masks: Any,
                   width: int, height: int, tile: int, offsets: Any, flat: Any) -> Any:  # fmt: skip
        self._check_pixels(means2d, conics, colors, opacities, backgrounds, masks, width, height, tile, offsets, flat)
        self._note("composite")
        with _standing_in():
            new = colors.new_zeros
            last = new((1, height, width), dtype=torch.int32)
            if not self.exact:
                return new((1, height, width, colors.shape[-1])) + 0.5, new((1, height, width, 1)) + 0.7, last
            picture, alpha = torch.zeros(1, height, width, colors.shape[-1]), torch.zeros(1, height, width, 1)
            behind = 0.0 if backgrounds is None else _plain(backgrounds)[0]
            inputs = [_plain(tensor)[0] for tensor in (means2d, conics, colors, opacities)]
            for ys, xs, pixels, index in _tiles(width, height, _plain(offsets), _plain(flat)):
                at, shapes, shown, alphas = (value[index] for value in inputs)
                weights = _weights(pixels - at, shapes, alphas)
                covered = weights.sum(1, keepdim=True)
                found = weights @ shown + (1 - covered) * behind
                picture[0, ys, xs] = found.reshape(ys.stop - ys.start, xs.stop - xs.start, -1)
                alpha[0, ys, xs] = covered.reshape(ys.stop - ys.start, xs.stop - xs.start, 1)
            return PretendCuda(picture), PretendCuda(alpha), last

    def _composite_back(self, means2d: Any, conics: Any, colors: Any, opacities: Any, backgrounds: Any, masks: Any,
                        width: int, height: int, tile: int, offsets: Any, flat: Any, alphas: Any, last: Any,
                        v_picture: Any, v_alpha: Any, absolute: bool) -> Any:  # fmt: skip
        self._check_pixels(means2d, conics, colors, opacities, backgrounds, masks, width, height, tile, offsets, flat)
        check(alphas, (1, height, width, 1))
        check(last, (1, height, width), torch.int32)
        check(v_picture, (1, height, width, colors.shape[-1]))
        check(v_alpha, (1, height, width, 1))
        assert type(absolute) is bool
        self._note("composite backward")
        with _standing_in():
            found = [torch.zeros_like(tensor) for tensor in (means2d, means2d, conics, colors, opacities)]
            if not self.exact:
                return found[0] if absolute else None, *found[1:]
            behind = 0.0 if backgrounds is None else _plain(backgrounds)[0]
            absolutes, *sums = (_plain(tensor)[0] for tensor in found)
            inputs = [_plain(tensor)[0].detach() for tensor in (means2d, conics, colors, opacities)]
            for ys, xs, pixels, index in _tiles(width, height, _plain(offsets), _plain(flat)):
                at, *parts = (value[index] for value in inputs)
                leaves = [(pixels - at).requires_grad_(), *(part.requires_grad_() for part in parts)]
                with torch.enable_grad():
                    weights = _weights(leaves[0], leaves[1], leaves[3])
                    covered = weights.sum(1, keepdim=True)
                    shown = weights @ leaves[2] + (1 - covered) * behind
                    upstream = _plain(v_picture)[0, ys, xs].reshape(shown.shape)
                    total = (shown * upstream).sum() + (covered * _plain(v_alpha)[0, ys, xs].reshape(-1, 1)).sum()
                    grads = torch.autograd.grad(total, leaves)
                absolutes.index_add_(0, index, grads[0].abs().sum(0))
                for into, grad in zip(sums, (-grads[0].sum(0), *grads[1:]), strict=True):
                    into.index_add_(0, index, grad)
            return found[0] if absolute else None, *found[1:]

    # --- spherical harmonics -----------------------------------------------------------------------------------------

    def _harmonics(self, degree: int, directions: Any, coefficients: Any, masks: Any) -> Any:
        many = tuple(directions.shape[:-1])
        check(directions, (*many, 3))
        check(coefficients, (*many, coefficients.shape[-2], 3))
        assert (degree + 1) ** 2 <= coefficients.shape[-2]
        if masks is not None:
            check(masks, many, torch.bool)
        self._note("harmonics")
        with _standing_in():
            if not self.exact:
                return directions.new_zeros((*many, 3))
            colors = self._harmonics_plain(degree, _plain(directions), _plain(coefficients))
            return PretendCuda(colors if masks is None else colors * _plain(masks)[..., None])

    @staticmethod
    def _harmonics_plain(degree: int, directions: Tensor, coefficients: Tensor) -> Tensor:
        from gsplat.cuda._torch_impl import _spherical_harmonics

        return _spherical_harmonics(degree, directions, coefficients)

    def _harmonics_back(self, bases: int, degree: int, directions: Any, coefficients: Any, masks: Any, v_colors: Any,
                        by_direction: bool) -> Any:  # fmt: skip
        check(coefficients, (*directions.shape[:-1], bases, 3))
        check(v_colors, tuple(directions.shape))
        self._note("harmonics backward")
        with _standing_in():
            if not self.exact:
                return torch.zeros_like(coefficients), torch.zeros_like(directions) if by_direction else None
            leaves = [_plain(tensor).detach().requires_grad_() for tensor in (coefficients, directions)]
            with torch.enable_grad():
                colors = self._harmonics_plain(degree, leaves[1], leaves[0])
                upstream = _plain(v_colors) if masks is None else _plain(v_colors) * _plain(masks)[..., None]
                grads = torch.autograd.grad(colors, leaves, upstream, allow_unused=True)
            found = [None if grad is None else PretendCuda(grad) for grad in grads]
            return found[0], found[1] if by_direction else None


def _tiles(width: int, height: int, offsets: Tensor, flat: Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    bounds = [*offsets.flatten().tolist(), len(flat)]
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        row, column = divmod(number, offsets.shape[2])
        ys = slice(row * TILE_PX, min((row + 1) * TILE_PX, height))
        xs = slice(column * TILE_PX, min((column + 1) * TILE_PX, width))
        grid = torch.meshgrid(torch.arange(xs.start, xs.stop), torch.arange(ys.start, ys.stop), indexing="xy")
        yield ys, xs, torch.stack(grid, dim=-1).reshape(-1, 1, 2) + 0.5, flat[start:stop].long()


def _weights(offsets: Tensor, conics: Tensor, alphas: Tensor) -> Tensor:
    everywhere = torch.ones(offsets.shape[:2], dtype=torch.bool)
    return pixel_weights(offsets, conics, alphas, everywhere)


class Kernels14(Kernels):
    """``gsplat.csrc`` of 1.4.0."""

    per_axis = False

    def fully_fused_projection_fwd(self, means, covars, quats, scales, *rest):
        return self._project(means, covars, quats, scales, None, *rest)

    def fully_fused_projection_bwd(self, *args):
        return self._project_back(*args)

    def fully_fused_projection_packed_fwd(self, means, covars, quats, scales, *rest):
        return self._project_packed(means, covars, quats, scales, None, *rest)

    def fully_fused_projection_packed_bwd(self, *args):
        return self._project_packed_back(*args)

    def isect_tiles(
        self, means2d, radii, depths, camera_ids, gaussian_ids, images, tile, tile_w, tile_h, sort, buffers
    ):
        assert buffers is True
        return self._cross(means2d, radii, depths, camera_ids, gaussian_ids, images, tile, tile_w, tile_h, sort)

    def isect_offset_encode(self, *args):
        return self._offsets(*args)

    def rasterize_to_pixels_fwd(self, *args):
        return self._composite(*args)

    def rasterize_to_pixels_bwd(self, *args):
        return self._composite_back(*args)

    def compute_sh_fwd(self, *args):
        return self._harmonics(*args)

    def compute_sh_bwd(self, *args):
        return self._harmonics_back(*args)


class Kernels15(Kernels):
    """``gsplat.csrc`` of 1.5.3."""

    per_axis = True

    def projection_ewa_3dgs_fused_fwd(self, *args):
        return self._project(*args)

    def projection_ewa_3dgs_fused_bwd(self, *args):
        return self._project_back(*args)

    def projection_ewa_3dgs_packed_fwd(self, *args):
        starts, cameras, *rest = self._project_packed(*args)
        return starts, cameras * 0, cameras, *rest  # the first are those of the batch

    def projection_ewa_3dgs_packed_bwd(self, *args):
        return self._project_packed_back(*args[:10], *args[11:])

    def intersect_tile(
        self, means2d, radii, depths, image_ids, gaussian_ids, images, tile, tile_w, tile_h, sort, segmented
    ):
        assert segmented is False
        return self._cross(means2d, radii, depths, image_ids, gaussian_ids, images, tile, tile_w, tile_h, sort)

    def intersect_offset(self, *args):
        return self._offsets(*args)

    def rasterize_to_pixels_3dgs_fwd(self, *args):
        return self._composite(*args)

    def rasterize_to_pixels_3dgs_bwd(self, *args):
        return self._composite_back(*args)

    def spherical_harmonics_fwd(self, *args):
        return self._harmonics(*args)

    def spherical_harmonics_bwd(self, *args):
        return self._harmonics_back(*args)


@contextmanager
def gsplat_kernels(exact: bool = False) -> Iterator[Kernels]:
    """Gives the installed gsplat its kernels.

    Args:
        exact: see :class:`Kernels`.
    """
    import gsplat.cuda

    kernels = (Kernels14 if gsplat.__version__.startswith("1.4") else Kernels15)(exact)
    backend: Any = ModuleType("gsplat.cuda._backend")
    backend._C = kernels
    with pytest.MonkeyPatch.context() as patch:
        # Not mock.patch.dict: it would also drop what is imported meanwhile, and classes would exist twice.
        patch.setitem(sys.modules, backend.__name__, backend)
        patch.setattr(gsplat.cuda, "_backend", backend, raising=False)
        yield kernels
