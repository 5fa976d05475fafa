"""gsplat's compiled kernels, pretended for the Python wrappers of gsplat 1.4.0 and 1.5.3.

Names and order of arguments are those of ``bindings.h`` (1.4.0) and ``Ops.h`` (1.5.3). Every call is checked as the
compiled code does (device, contiguity) and as it should (dtype, shape: it reads memory by them). Projection and
harmonics are gsplat's own torch code. Compositing adds up the Gaussians in view and gives every pixel that sum, which
depends on all arguments: enough to see what goes where. The true pictures are compared in tests/gpu.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pretend.ledger import note_launch, note_wait, uncounted
from pretend.tensors import PretendCuda, on_the_cpu

PADDED = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513)
"""Numbers of channels for which kernels are compiled."""
PINHOLE = "pinhole"
TILE_PX = 16
SEEN_OF_LARGE = 10
"""Intersections of Gaussians without values."""


def check(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """What a kernel needs of a tensor."""
    assert isinstance(tensor, PretendCuda), f"a kernel got {type(tensor)} instead of a tensor on CUDA"
    assert tensor.is_contiguous(), "a kernel got a tensor that is not contiguous"
    assert tensor.dtype == dtype, f"a kernel got {tensor.dtype} instead of {dtype}"
    assert tuple(tensor.shape) == shape, f"a kernel got the shape {tuple(tensor.shape)} instead of {shape}"


def _hold(*tensors: Any) -> list[Any]:
    """Values of tensors; without any where one of them is large."""
    held = [tensor.held if isinstance(tensor, PretendCuda) else tensor for tensor in tensors]
    if any(tensor is not None and tensor.is_meta for tensor in held):
        return [tensor if tensor is None else tensor.to("meta") for tensor in held]
    return held


def _wrap(*tensors: Tensor | None) -> list[PretendCuda | None]:
    return [None if tensor is None else PretendCuda(tensor.detach().contiguous()) for tensor in tensors]


def _differentiate(
    function: Callable[..., Any], leaves: list[Tensor], upstream: list[Tensor | None], keep: Any = None
) -> list[PretendCuda | None]:
    """Returns the gradients of a function's results with respect to its arguments.

    Args:
        function: gives one tensor or None for each of `upstream`.
        upstream: gradients of its results.
        keep: index of the results that have a gradient.
    """
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        values = [value for value in function(*leaves) if value is not None]
        values = values if keep is None else [value[keep] for value in values]
        grads = [
            grad.reshape(value.shape)
            for grad, value in zip((g for g in upstream if g is not None), values, strict=True)
        ]
        return _wrap(*torch.autograd.grad(values, leaves, grads, allow_unused=True))


class Kernels:
    """What both versions compute."""

    per_axis: bool
    """Whether radii are given for x and y."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.CameraModelType = SimpleNamespace(PINHOLE=PINHOLE)
        self.PINHOLE = PINHOLE  # the wrappers ask for it here, since the enumeration is exported

    def _radii(self, images: int, count: int) -> tuple[int, ...]:
        return (images, count, 2) if self.per_axis else (images, count)

    def _seen(self, radii: Tensor) -> Tensor:
        return (radii > 0).all(-1) if self.per_axis else radii > 0

    @contextmanager
    def _launch(self, name: str, waits: bool = False) -> Iterator[None]:
        """Counts a kernel; what it computes is computed on the CPU, where nothing is pretended and nothing counted."""
        self.calls.append(name)
        note_launch(f"gsplat.{name}")
        if waits:
            note_wait("number")  # of the intersections, or of the Gaussians in view
        with uncounted(), on_the_cpu():
            yield

    # --- projection --------------------------------------------------------------------------------------------------

    @staticmethod
    def _check_gaussians(means: Any, covars: Any, quats: Any, scales: Any, viewmats: Any, Ks: Any) -> None:
        count, cameras = len(means), len(viewmats)
        assert covars is None
        shapes = ((count, 3), (count, 4), (count, 3), (cameras, 4, 4), (cameras, 3, 3))
        for tensor, shape in zip((means, quats, scales, viewmats, Ks), shapes, strict=True):
            check(tensor, shape)

    def _project(self, means: Any, covars: Any, quats: Any, scales: Any, opacities: Any, viewmats: Any, Ks: Any,
                 width: int, height: int, eps2d: float, near: float, far: float, clip: float, compensate: bool,
                 camera: str, packed: bool = False) -> Any:  # fmt: skip
        self._check_gaussians(means, covars, quats, scales, viewmats, Ks)
        assert opacities is None and camera == PINHOLE and type(width) is type(height) is int
        assert all(type(value) is float for value in (eps2d, near, far, clip)) and type(compensate) is bool
        with self._launch("project packed" if packed else "project", waits=packed):
            held = _hold(means, quats, scales, viewmats, Ks)
            radii, *values = _project_plain(*held, width, height, eps2d, near, far, compensate)
            seen = self._seen(radii)
            if packed:
                starts = torch.cat([torch.zeros(1, dtype=torch.int64), seen.sum(1).cumsum(0)])
                entries = [None if value is None else value[seen] for value in (radii, *values)]
                return _wrap(starts, *seen.nonzero().unbind(1), *entries)
            # The kernel leaves the values of what is not drawn as they were in memory.
            spoiled = [
                None if v is None else torch.where(seen.reshape(1, -1, *[1] * (v.dim() - 2)), v, torch.nan)
                for v in values
            ]
            return _wrap(radii, *spoiled)

    def _project_back(self, means: Any, covars: Any, quats: Any, scales: Any, viewmats: Any, Ks: Any, width: int,
                      height: int, eps2d: float, camera: str, *rest: Any) -> Any:  # fmt: skip
        self._check_gaussians(means, covars, quats, scales, viewmats, Ks)
        assert camera == PINHOLE and len(rest) in (8, 10)
        if packed := len(rest) == 10:
            *index, conics, compensations, v_means2d, v_depths, v_conics, v_compensations, pose, sparse = rest
            shape: tuple[int, ...] = (len(index[0]),)
            assert not pose and sparse is False
            for ids in index:
                check(ids, shape, torch.int64)
        else:
            radii, conics, compensations, v_means2d, v_depths, v_conics, v_compensations, pose = rest
            shape = 1, len(means)
            check(radii, self._radii(*shape), torch.int32)
        for tensor, width_ in ((conics, (3,)), (v_means2d, (2,)), (v_depths, ()), (v_conics, (3,))):
            check(tensor, (*shape, *width_))
        assert (compensations is None) == (v_compensations is None) and type(pose) is bool
        if v_compensations is not None:
            check(v_compensations, shape)
        with self._launch("project packed backward" if packed else "project backward"):
            held = _hold(means, quats, scales, viewmats, Ks)
            upstream = _hold(v_means2d, v_depths, v_conics, v_compensations)
            keep = None
            if packed:
                keep = tuple(_hold(*index))
            elif not held[0].is_meta:
                keep = self._seen(_hold(radii)[0])
                upstream = [None if grad is None else grad[keep] for grad in upstream]

            def project(*leaves: Tensor) -> Any:
                sizes = width, height, eps2d, 0.0, 1e10, compensations is not None
                return _project_plain(*leaves, held[4], *sizes)[1:]

            v_means, v_quats, v_scales, v_viewmats = _differentiate(project, held[:4], upstream, keep)
            return v_means, None, v_quats, v_scales, v_viewmats if pose else None

    # --- tiles -------------------------------------------------------------------------------------------------------

    def _cross(self, means2d: Any, radii: Any, depths: Any, image_ids: Any, gaussian_ids: Any, images: int,
               tile: int, columns: int, rows: int, sort: bool) -> Any:  # fmt: skip
        count = means2d.shape[1]
        assert image_ids is None and gaussian_ids is None and images == 1 and tile == TILE_PX and sort is True
        check(means2d, (1, count, 2))
        check(radii, self._radii(1, count), torch.int32)
        check(depths, (1, count))
        with self._launch("cross tiles", waits=True):
            (reach,) = _hold(radii)
            per_gaussian = self._seen(reach).int()
            index = torch.arange(SEEN_OF_LARGE) if reach.is_meta else per_gaussian[0].nonzero()[:, 0]
            return _wrap(per_gaussian, index, index.int())

    def _offsets(self, crossings: Any, images: int, columns: int, rows: int) -> Any:
        assert images == 1
        check(crossings, (len(crossings),), torch.int64)
        with self._launch("offsets"):
            return PretendCuda(torch.zeros(1, rows, columns, dtype=torch.int32))

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

    def _composite(self, *args: Any) -> Any:
        self._check_pixels(*args)
        width, height, flat = args[6], args[7], args[10]
        with self._launch("composite"):
            *leaves, behind = _hold(*args[:5])
            made = _composite_plain(*leaves, behind, width, height, _hold(flat)[0].long().to(leaves[0].device))
            return *_wrap(*made), PretendCuda(torch.zeros(1, height, width, dtype=torch.int32))

    def _composite_back(self, *args: Any) -> Any:
        *inputs, alphas, last, v_picture, v_alpha, absolute = args
        self._check_pixels(*inputs)
        width, height, flat = inputs[6], inputs[7], inputs[10]
        check(alphas, (1, height, width, 1))
        check(last, (1, height, width), torch.int32)
        check(v_picture, (1, height, width, inputs[2].shape[-1]))
        check(v_alpha, (1, height, width, 1))
        assert type(absolute) is bool
        with self._launch("composite backward"):
            *leaves, behind = _hold(*inputs[:5])
            index = _hold(flat)[0].long().to(leaves[0].device)
            grads = _differentiate(
                lambda *leaves: _composite_plain(*leaves, behind, width, height, index),
                leaves,
                [grad.to(leaves[0].device) for grad in _hold(v_picture, v_alpha)],
            )
            by_means = grads[0]
            assert by_means is not None
            return PretendCuda(by_means.held.abs()) if absolute else None, *grads

    # --- spherical harmonics -----------------------------------------------------------------------------------------

    def _harmonics(self, degree: int, directions: Any, coefficients: Any, masks: Any) -> Any:
        many = tuple(directions.shape[:-1])
        check(directions, (*many, 3))
        check(coefficients, (*many, coefficients.shape[-2], 3))
        assert (degree + 1) ** 2 <= coefficients.shape[-2] and type(degree) is int
        if masks is not None:
            check(masks, many, torch.bool)  # the others' colours are not defined
        with self._launch("harmonics"):
            return PretendCuda(_harmonics_plain(degree, *_hold(directions, coefficients)))

    def _harmonics_back(self, bases: int, degree: int, directions: Any, coefficients: Any, masks: Any, v_colors: Any,
                        by_direction: bool) -> Any:  # fmt: skip
        check(coefficients, (*directions.shape[:-1], bases, 3))
        check(v_colors, tuple(directions.shape))
        with self._launch("harmonics backward"):
            v_directions, v_coefficients = _differentiate(
                lambda *leaves: [_harmonics_plain(degree, *leaves)], _hold(directions, coefficients), _hold(v_colors)
            )
            return v_coefficients, v_directions if by_direction else None


def _project_plain(means: Tensor, quats: Tensor, scales: Tensor, viewmats: Tensor, Ks: Tensor, width: int,
                   height: int, eps2d: float, near: float, far: float, compensate: bool) -> Any:  # fmt: skip
    from gsplat.cuda._torch_impl import _fully_fused_projection, _quat_scale_to_covar_preci

    covars, _ = _quat_scale_to_covar_preci(quats, scales, compute_preci=False)
    return _fully_fused_projection(means, covars, viewmats, Ks, width, height, eps2d, near, far, compensate)


def _composite_plain(means2d: Tensor, conics: Tensor, colors: Tensor, opacities: Tensor, behind: Tensor | None,
                     width: int, height: int, index: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Colours and accumulation, the same in all pixels."""
    centres, shapes, shown, alphas = (tensor[0][index] for tensor in (means2d, conics, colors, opacities))
    weights = alphas * (1 + 0.1 * (centres.sum(-1) / 100).sin() + 0.1 * shapes.sum(-1).sin()) / 1.2
    weights = weights / max(len(index), 1)  # their sum is an opacity
    color, alpha = weights @ shown, weights.sum()
    if behind is not None:
        color = color + behind[0]
    return color.expand(1, height, width, -1), alpha.expand(1, height, width, 1)


def _harmonics_plain(degree: int, directions: Tensor, coefficients: Tensor) -> Tensor:
    from gsplat.cuda._torch_impl import _spherical_harmonics

    return _spherical_harmonics(degree, directions, coefficients)


class Kernels14(Kernels):
    """``gsplat.csrc`` of 1.4.0."""

    per_axis = False
    fully_fused_projection_bwd = fully_fused_projection_packed_bwd = Kernels._project_back
    isect_offset_encode = Kernels._offsets
    rasterize_to_pixels_fwd, rasterize_to_pixels_bwd = Kernels._composite, Kernels._composite_back
    compute_sh_fwd, compute_sh_bwd = Kernels._harmonics, Kernels._harmonics_back

    def fully_fused_projection_fwd(self, means, covars, quats, scales, *rest):
        return self._project(means, covars, quats, scales, None, *rest)

    def fully_fused_projection_packed_fwd(self, means, covars, quats, scales, *rest):
        return self._project(means, covars, quats, scales, None, *rest, packed=True)

    def isect_tiles(self, *args):
        *args, buffers = args
        assert buffers is True
        return self._cross(*args)


class Kernels15(Kernels):
    """``gsplat.csrc`` of 1.5.3."""

    per_axis = True
    projection_ewa_3dgs_fused_fwd, projection_ewa_3dgs_fused_bwd = Kernels._project, Kernels._project_back
    intersect_offset = Kernels._offsets
    rasterize_to_pixels_3dgs_fwd, rasterize_to_pixels_3dgs_bwd = Kernels._composite, Kernels._composite_back
    spherical_harmonics_fwd, spherical_harmonics_bwd = Kernels._harmonics, Kernels._harmonics_back

    def projection_ewa_3dgs_packed_fwd(self, *args):
        starts, cameras, *rest = self._project(*args, packed=True)
        return starts, cameras * 0, cameras, *rest  # the first are those of the batch

    def projection_ewa_3dgs_packed_bwd(self, *args):
        return self._project_back(*args[:10], *args[11:])

    def intersect_tile(self, *args):
        *args, segmented = args
        assert segmented is False
        return self._cross(*args)


@contextmanager
def gsplat_kernels() -> Iterator[Kernels]:
    """Gives the installed gsplat its kernels."""
    import gsplat.cuda

    kernels = Kernels14() if gsplat.__version__.startswith("1.4") else Kernels15()
    backend: Any = ModuleType("gsplat.cuda._backend")
    backend._C = kernels
    with pytest.MonkeyPatch.context() as patch:
        # Not mock.patch.dict: it would also drop what is imported meanwhile, and classes would exist twice.
        patch.setitem(sys.modules, backend.__name__, backend)
        patch.setattr(gsplat.cuda, "_backend", backend, raising=False)
        yield kernels
