"""Functions of autograd over the kernels of planes and of views: numba's on the CPU, Triton's on CUDA.

Each is given the module of its kernels by :func:`~f3rm_ext.splat.triton_kernels.choose_kernels`. A loss comes with its
gradient, which the backward pass only multiplies.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROOM = "f3rm_ext.splat.regularization"
PLANES = f"{ROOM}.plane_kernels", f"{ROOM}.triton_planes"
"""Modules for :class:`FacingPlanes`, :class:`PlaneDepth`, :class:`DnConsistency` and the weights of edges."""


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


class DnConsistency(torch.autograd.Function):
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

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        depth, alpha, normals = (grads[0] * saved if saved.numel() else None for saved in ctx.saved_tensors)
        return depth, alpha, normals, None, None, None, None, None
