"""Image metrics and pictures under a mask: pixels outside it have no influence. Pure functions."""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor
from torch.nn import functional

from f3rm_ext.features.base import PatchGrid
from f3rm_ext.memory.shapes import lacks_values

Mask = Bool[Tensor, "h w 1"]

LEFT_OUT_GREY = 0.5
"""Grey level of pixels outside the mask, 0 to 1."""
WINDOW_PX, SIGMA_PX = 11, 1.5
"""Gaussian window of SSIM (Wang et al. 2004), as in torchmetrics."""
_MIN_MSE = 1e-10


def is_empty(mask: Bool[Tensor, "*batch 1"] | None) -> bool:
    """Returns whether there is a mask and it keeps no pixel."""
    return mask is not None and not bool(mask.any())


def grey_out_bytes(picture: UInt8[np.ndarray, "h w 3"], kept: Bool[np.ndarray, "h w"]) -> UInt8[np.ndarray, "h w 3"]:
    """Returns a picture with grey in place of pixels that the mask leaves out."""
    return np.where(kept[..., None], picture, np.uint8(round(255 * LEFT_OUT_GREY)))


def masked_mean(values: Float[Tensor, "*batch channels"], mask: Bool[Tensor, "*batch 1"] | None) -> Float[Tensor, ""]:
    """Returns the mean over kept pixels and channels; NaN if none is kept."""
    return values.mean() if mask is None else values[mask.expand_as(values)].mean()


def psnr(
    pred: Float[Tensor, "*batch channels"],
    target: Float[Tensor, "*batch channels"],
    mask: Bool[Tensor, "*batch 1"] | None = None,
) -> Float[Tensor, ""]:
    """Returns the PSNR of values in [0, 1] over kept pixels, in dB, at most 100; NaN if no pixel is kept.

    >>> photo, rendering = torch.zeros(1, 2, 3), torch.tensor([[[0.1, 0.1, 0.1], [0.9, 0.9, 0.9]]])
    >>> round(float(psnr(rendering, photo, mask=torch.tensor([[[True], [False]]]))), 2)
    20.0
    """
    return -10 * masked_mean((pred - target).square(), mask).clamp(min=_MIN_MSE).log10()


def ssim(pred: Float[Tensor, "h w 3"], target: Float[Tensor, "h w 3"], mask: Mask | None = None) -> Float[Tensor, ""]:
    """Returns the mean structural similarity of kept pixels; without a mask, as torchmetrics computes it.

    Windows take in kept pixels only: means and (co)variances are weighted by the Gaussian window inside the mask, and
    by zero outside.

    Args:
        mask: keeps at least one pixel.

    >>> photo = torch.linspace(0, 1, 16 * 16 * 3).view(16, 16, 3)
    >>> mask = torch.zeros(16, 16, 1, dtype=torch.bool)
    >>> mask[:, :8] = True
    >>> round(float(ssim(torch.where(mask, photo, 0.0), photo, mask)), 4)
    1.0
    """
    if mask is None:
        return _whole_ssim(pred, target)
    # Where few pixels differ little, variances as differences of squares need more precision than float32.
    weight = mask.permute(2, 0, 1)[None].double()
    one, two = (image.permute(2, 0, 1)[None].double() for image in (pred, target))
    maps = torch.cat([one, two, one * one, two * two, one * two], dim=1) * weight
    # The window of a kept pixel contains that pixel, so there is no division by zero where it counts.
    local = _blur(maps) / _blur(weight).clamp(min=torch.finfo(weight.dtype).tiny)
    mean_one, mean_two, square_one, square_two, product = local.split(3, dim=1)
    variances = (square_one - mean_one**2).clamp(min=0) + (square_two - mean_two**2).clamp(min=0)
    spread = max(
        float(image[mask.expand_as(image)].max() - image[mask.expand_as(image)].min()) for image in (pred, target)
    )
    c1, c2 = (0.01 * (spread or 1.0)) ** 2, (0.03 * (spread or 1.0)) ** 2
    luminance = (2 * mean_one * mean_two + c1) / (mean_one**2 + mean_two**2 + c1)
    structure = (2 * (product - mean_one * mean_two) + c2) / (variances + c2)
    return masked_mean((luminance * structure)[0].permute(1, 2, 0), mask)


def _whole_ssim(pred: Float[Tensor, "h w 3"], target: Float[Tensor, "h w 3"]) -> Float[Tensor, ""]:
    if lacks_values(pred):
        return _null_ssim(pred, target)
    from torchmetrics.functional.image import structural_similarity_index_measure

    batch = [image.permute(2, 0, 1)[None] for image in (target, pred)]
    # torchmetrics derives the range from the images, and gets 0 if each has a single colour.
    data_range = None if any(image.min() < image.max() for image in batch) else 1.0
    return structural_similarity_index_measure(*batch, data_range=data_range)  # type: ignore[arg-type,return-value]


def _null_ssim(pred: Tensor, target: Tensor) -> Tensor:
    """Allocates what torchmetrics does, whose import would take a quarter of a plan's time."""
    margin = WINDOW_PX // 2
    one, two = (functional.pad(image.permute(2, 0, 1)[None], (margin,) * 4, mode="reflect") for image in (pred, target))
    maps = torch.cat([one, two, one * one, two * two, one * two])
    local = functional.conv2d(maps, maps.new_empty(3, 1, WINDOW_PX, WINDOW_PX), groups=3)
    moments = [local[0] * local[part] for part in range(5)]
    return (local[0] * moments[4]).mean()


def _blur(maps: Float[Tensor, "1 channels h w"]) -> Float[Tensor, "1 channels h w"]:
    """Returns sums weighted by the Gaussian window; beyond the border the image is mirrored, or zero if it is tiny."""
    margin = WINDOW_PX // 2
    mode = "reflect" if min(maps.shape[2:]) > margin else "constant"
    maps = functional.pad(maps, (margin, margin, margin, margin), mode=mode)
    away = torch.arange(-margin, margin + 1, device=maps.device, dtype=maps.dtype)
    window = torch.exp(-0.5 * (away / SIGMA_PX) ** 2)
    window = (window / window.sum()).expand(maps.shape[1], 1, 1, -1)
    for kernel in (window, window.transpose(2, 3)):
        maps = functional.conv2d(maps, kernel, groups=maps.shape[1])
    return maps


def patch_shares(mask: Mask, grid: PatchGrid) -> Float[Tensor, "rows cols"]:
    """Returns the share of kept pixels among those nearest to each patch centre, 0 to 1; 0 for a patch without pixels.

    >>> grid = PatchGrid.covering(rows=1, cols=2, height_px=2, width_px=4)
    >>> mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)[..., None]
    >>> patch_shares(mask, grid)
    tensor([[1.0000, 0.2500]])
    """
    places = []
    for side, first, stride, count in zip(
        mask.shape[:2], grid.origin_px, grid.stride_px, (grid.rows, grid.cols), strict=True
    ):
        centres = torch.arange(side, device=mask.device) + 0.5
        places.append(((centres - first) / stride).round().long().clamp(0, count - 1))
    patch = (places[0][:, None] * grid.cols + places[1]).flatten()
    sums = torch.zeros(2, grid.rows * grid.cols, device=mask.device)
    sums[0].index_add_(0, patch, mask.flatten().float())
    sums[1].index_add_(0, patch, torch.ones_like(patch, dtype=torch.float32))
    return (sums[0] / sums[1].clamp(min=1)).view(grid.rows, grid.cols)


def grey_out(images: Mapping[str, Float[Tensor, "h width 3"]], mask: Mask | None) -> dict[str, Tensor]:
    """Returns images that are grey outside the mask.

    Args:
        images: by name; an image of several times the mask's width consists of images side by side.
        mask: of a single image; None leaves everything as it is.
    """
    if mask is None:
        return dict(images)
    return {
        name: torch.where(mask.to(image.device).repeat(1, image.shape[1] // mask.shape[1], 1), image, LEFT_OUT_GREY)
        for name, image in images.items()
    }
