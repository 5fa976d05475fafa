"""Functions of autograd over the kernels of planes and of views: numba's on the CPU, Triton's on CUDA.

Each is given the module of its kernels by :func:`~f3rm_ext.splat.triton_kernels.choose_kernels`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from f3rm_ext.splat.triton_kernels import KernelLoss

ROOM = "f3rm_ext.splat.regularization"
PLANES = f"{ROOM}.plane_kernels", f"{ROOM}.triton_planes"
"""Modules for :class:`FacingPlanes`, :class:`PlaneDepth`, :class:`DnConsistency` and the weights of edges."""
VIEWS = f"{ROOM}.view_kernels", f"{ROOM}.triton_views"
"""Modules for :class:`MultiviewConsistency` and :class:`PatchDisagreement`."""


class FacingPlanes(torch.autograd.Function):
    """See :func:`~f3rm_ext.splat.regularization.normals.facing_planes`."""

    @staticmethod
    def forward(ctx: Any, means: Tensor, quats: Tensor, scales: Tensor, viewmat: Tensor, kernels: Any) -> Tensor:
        planes = means.new_empty(len(means), 4)
        ctx.kernels = kernels
        ctx.save_for_backward(means, quats, scales, viewmat)
        kernels.facing_planes(means, quats, scales, viewmat, planes)
        return planes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        means, quats, _, _ = ctx.saved_tensors
        grad_means, grad_quats = means.new_empty(means.shape), quats.new_empty(quats.shape)
        ctx.kernels.facing_planes_backward(*ctx.saved_tensors, grads[0], grad_means, grad_quats)
        return grad_means, grad_quats, None, None, None


class PlaneDepth(torch.autograd.Function):
    """See :func:`~f3rm_ext.splat.regularization.normals.plane_depth`."""

    @staticmethod
    def forward(ctx: Any, normals: Tensor, distances: Tensor, K: Tensor, least_cosine: float, kernels: Any) -> Tensor:
        depth, slopes = (distances.new_empty(distances.shape) for _ in range(2))
        kernels.plane_depth(normals, distances, K, least_cosine, depth, slopes)
        ctx.kernels = kernels
        ctx.save_for_backward(depth, slopes, K)
        return depth

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        depth = ctx.saved_tensors[0]
        grad_normals, grad_distances = depth.new_empty(*depth.shape, 3), depth.new_empty(depth.shape)
        ctx.kernels.plane_depth_backward(*ctx.saved_tensors, grads[0], grad_normals, grad_distances)
        return grad_normals, grad_distances, None, None, None


class DnConsistency(KernelLoss):
    """See :func:`~f3rm_ext.splat.regularization.normals.dn_consistency`, without ``rebuild_z``; pixels of weight 0 do
    not count."""

    @staticmethod
    def forward(
        ctx: Any, depth: Tensor, alpha: Tensor, normals: Tensor, weights: Tensor, K: Tensor, divide: bool, least: float,
        kernels: Any,
    ) -> Tensor:  # fmt: skip
        shapes = depth.shape, depth.shape if divide else (0, 0), normals.shape
        grads = tuple(depth.new_empty(shape) for shape in shapes)
        parts = kernels.dn_consistency(depth, alpha, normals, weights, K, divide, least, *grads)
        ctx.save_for_backward(*grads)
        return parts.sum().float()


class MultiviewConsistency(KernelLoss):
    """See :func:`~f3rm_ext.splat.regularization.multiview.multiview_consistency`."""

    @staticmethod
    def forward(ctx: Any, depth: Tensor, view: Any, other: Any, most: float, kernels: Any) -> tuple[Tensor, Tensor]:
        trust, gradient = (depth.new_empty(depth.shape) for _ in range(2))
        parts = kernels.multiview_consistency(depth, view, other, most, trust, gradient)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(trust)
        return parts.sum().float(), trust


class PatchDisagreement(torch.autograd.Function):
    """See :func:`~f3rm_ext.splat.regularization.patches.patch_disagreement`; the middles are given as flat indices."""

    @staticmethod
    def forward(
        ctx: Any, depth: Tensor, normals: Tensor, photo: Tensor, picture: Tensor, trust: Tensor, places: Tensor,
        view: Any, other: Any, limits: tuple[int, float, float], kernels: Any,
    ) -> Tensor:  # fmt: skip
        grads = depth.new_empty(len(places)), depth.new_empty(len(places), 3)
        losses = depth.new_empty(len(places))
        pictures = depth, normals, photo, picture, trust
        kernels.patch_disagreement(*pictures, places, view, other, limits, *grads, losses)
        ctx.save_for_backward(places, *grads)
        ctx.shape = depth.shape
        return losses.sum() / max(1, len(places))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        places, *parts = ctx.saved_tensors
        factor, (h, w) = grads[0] / max(1, len(places)), ctx.shape
        depth, normals = parts[0].new_zeros(h * w), parts[1].new_zeros(h * w, 3)
        depth.index_add_(0, places, factor * parts[0])
        normals.index_add_(0, places, factor * parts[1])
        return depth.view(h, w), normals.view(h, w, 3), *(None,) * 8
