"""Pictures compared and shown where a mask keeps them: nothing that it leaves out decides anything. Pure maths."""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from f3rm_ext.features.base import PatchGrid

Mask = Bool[Tensor, "h w 1"]

LEFT_OUT_GREY = 0.5
"""Level of the grey in which left-out pixels are shown."""
WINDOW_PX, SIGMA_PX = 11, 1.5
"""Gaussian window of SSIM (Wang et al. 2004), as torchmetrics has it."""
_MIN_MSE = 1e-10


def keeps_nothing(mask: Bool[Tensor, "*batch 1"] | None) -> bool:
    """Whether there is a mask and it leaves out every pixel."""
    return mask is not None and not bool(mask.any())


def kept_mean(values: Float[Tensor, "*batch channels"], mask: Bool[Tensor, "*batch 1"] | None) -> Float[Tensor, ""]:
    """Mean over kept pixels and channels; NaN where nothing is kept."""
    return values.mean() if mask is None else values[mask.expand_as(values)].mean()


def psnr(
    pred: Float[Tensor, "*batch channels"],
    target: Float[Tensor, "*batch channels"],
    mask: Bool[Tensor, "*batch 1"] | None = None,
) -> Float[Tensor, ""]:
    """PSNR of values in [0, 1] over kept pixels, dB, at most 100; NaN where nothing is kept."""
    return -10 * kept_mean((pred - target).square(), mask).clamp(min=_MIN_MSE).log10()


def ssim(pred: Float[Tensor, "h w 3"], target: Float[Tensor, "h w 3"], mask: Mask | None = None) -> Float[Tensor, ""]:
    """Mean structural similarity of kept pixels, as torchmetrics computes it where there is no mask.

    At the edge of a mask the window of a pixel takes the kept pixels only: means and (co)variances are weighted by the
    window where the mask keeps, and by nothing elsewhere.

    Args:
        pred: a picture in [0, 1].
        target: the true picture.
        mask: keeps at least one pixel.
    """
    if mask is None:
        return _whole_ssim(pred, target)
    # Few pixels may differ little: variances as differences of squares need more than float32 then.
    weight = mask.permute(2, 0, 1)[None].double()
    one, two = (image.permute(2, 0, 1)[None].double() for image in (pred, target))
    maps = torch.cat([one, two, one * one, two * two, one * two], dim=1) * weight
    # Every kept pixel has its own weight in its window: no division by zero where it counts.
    local = _blurred(maps) / _blurred(weight).clamp(min=torch.finfo(weight.dtype).tiny)
    mean_one, mean_two, square_one, square_two, product = local.split(3, dim=1)
    variances = (square_one - mean_one**2).clamp(min=0) + (square_two - mean_two**2).clamp(min=0)
    spread = max(
        float(image[mask.expand_as(image)].max() - image[mask.expand_as(image)].min()) for image in (pred, target)
    )
    c1, c2 = (0.01 * (spread or 1.0)) ** 2, (0.03 * (spread or 1.0)) ** 2
    luminance = (2 * mean_one * mean_two + c1) / (mean_one**2 + mean_two**2 + c1)
    structure = (2 * (product - mean_one * mean_two) + c2) / (variances + c2)
    return kept_mean((luminance * structure)[0].permute(1, 2, 0), mask)


def _whole_ssim(pred: Float[Tensor, "h w 3"], target: Float[Tensor, "h w 3"]) -> Float[Tensor, ""]:
    from torchmetrics.functional.image import structural_similarity_index_measure

    batch = [image.permute(2, 0, 1)[None] for image in (target, pred)]
    # The range that torchmetrics takes from images is 0 where they are of a single colour.
    data_range = None if any(image.min() < image.max() for image in batch) else 1.0
    return structural_similarity_index_measure(*batch, data_range=data_range)  # type: ignore[arg-type,return-value]


def _blurred(maps: Float[Tensor, "1 channels h w"]) -> Float[Tensor, "1 channels h w"]:
    """Weighted sums over the Gaussian window; the picture is mirrored at its border, a tiny one has nothing there."""
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
    """Share of kept pixels among those that are nearest to each patch centre, 0 to 1; 0 where a patch has no pixel."""
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


def shown(images: Mapping[str, Float[Tensor, "h width 3"]], mask: Mask | None) -> dict[str, Tensor]:
    """Pictures with grey where the mask leaves out.

    Args:
        images: by name; those of several times the mask's width are pictures side by side.
        mask: of one picture; None leaves everything as it is.
    """
    if mask is None:
        return dict(images)
    return {
        name: torch.where(mask.to(image.device).repeat(1, image.shape[1] // mask.shape[1], 1), image, LEFT_OUT_GREY)
        for name, image in images.items()
    }
