"""Photometric loss of a rendered image."""

from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.splat.triton_kernels import KernelLoss, choose_kernels

KERNELS = "f3rm_ext.splat.photometric_kernels", "f3rm_ext.splat.triton_photometric"
WINDOW_PX = 11
"""Side of the window of :func:`ssim`, pixels."""
SIGMA_PX = 1.5
"""Standard deviation of the window."""


def photometric_loss(
    predicted: Float[Tensor, "h w 3"],
    truth: Float[Tensor, "h w 3"],
    mask: Bool[Tensor, "h w 1"] | None,
    ssim_weight: float,
) -> Float[Tensor, ""]:
    """Computes 3DGS's loss (1 − λ) mean |p − t| + λ (1 − SSIM); pixels outside the mask are black in both images.

    Images smaller than the SSIM window have no SSIM term.

    Args:
        mask: True for pixels to learn; None for all.
        ssim_weight: λ, 0 to 1.
    """
    if mask is not None:
        predicted, truth = predicted * mask, truth * mask
    has_ssim = ssim_weight > 0 and min(truth.shape[:2]) >= WINDOW_PX
    kernels = None if truth.requires_grad else choose_kernels(KERNELS, predicted, truth)
    if kernels is not None:
        return PhotometricLoss.apply(predicted, truth, ssim_weight, has_ssim, kernels)  # type: ignore[return-value]
    loss = (1 - ssim_weight) * functional.l1_loss(predicted, truth)
    if has_ssim:
        loss = loss + ssim_weight * (1 - ssim(predicted, truth))
    return loss


class PhotometricLoss(KernelLoss):
    """See :func:`photometric_loss`; differentiable in the first image, without a mask."""

    @staticmethod
    def forward(ctx: Any, predicted: Tensor, truth: Tensor, ssim_weight: float, has_ssim: bool, kernels: Any) -> Tensor:
        gradient = predicted.new_empty(predicted.shape)
        parts = kernels.compare_pictures(predicted, truth, ssim_weight, has_ssim, gradient)
        ctx.save_for_backward(gradient)
        return parts.sum().float()


def ssim(one: Float[Tensor, "h w 3"], two: Float[Tensor, "h w 3"]) -> Float[Tensor, ""]:
    """Computes the mean structural similarity (Wang et al. 2004; Gaussian window of 11 px, σ = 1.5); differentiable.

    >>> image = torch.rand(16, 16, 3, generator=torch.Generator().manual_seed(0))
    >>> float(ssim(image, image))
    1.0
    """
    from pytorch_msssim import ssim as of_batch

    batch = (image.permute(2, 0, 1)[None] for image in (one, two))
    return of_batch(*batch, data_range=1.0, win=ssim_window(one.device, one.dtype), size_average=True)


@lru_cache(maxsize=4)
def ssim_window(device: torch.device, dtype: torch.dtype) -> Float[Tensor, "3 1 1 px"]:
    """Returns the window for each colour. Made anew for each image, it would have to be copied to a GPU every time."""
    places = torch.arange(WINDOW_PX, dtype=torch.float32) - WINDOW_PX // 2
    weights = torch.exp(-(places**2) / (2 * SIGMA_PX**2))
    return (weights / weights.sum()).repeat(3, 1, 1, 1).to(device, dtype)
