"""Comparing what a mask keeps: by definition, and untouched by anything that it leaves out."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from f3rm_ext.features.base import PatchGrid
from f3rm_ext.memory.shapes import shapes_only
from f3rm_ext.memory.trace import AllocationTracker, BlockedConvolutions
from f3rm_ext.model_components import masks

HEIGHT, WIDTH = 24, 30


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(HEIGHT, WIDTH, 3, generator=generator)
    return (target + 0.1 * torch.randn(HEIGHT, WIDTH, 3, generator=generator)).clamp(0, 1), target


@pytest.fixture
def disc() -> Tensor:
    y, x = torch.meshgrid(torch.arange(HEIGHT) - 12, torch.arange(WIDTH) - 13, indexing="ij")
    return (y**2 + x**2 < 49)[..., None]


def slow_ssim(pred: Tensor, target: Tensor, mask: Tensor) -> float:
    """Pixel by pixel, from the definition: moments weighted by a Gaussian window over the kept pixels."""
    kept = mask[..., 0].numpy()
    one, two = (image.double().numpy() for image in (pred, target))
    spread = max(np.ptp(one[kept]), np.ptp(two[kept]))
    c1, c2 = (0.01 * spread) ** 2, (0.03 * spread) ** 2
    rows, cols = np.mgrid[:HEIGHT, :WIDTH]
    found = []
    for row, col in np.argwhere(kept):
        near = kept & (abs(rows - row) <= 5) & (abs(cols - col) <= 5)
        weight = np.exp(-((rows[near] - row) ** 2 + (cols[near] - col) ** 2) / (2 * 1.5**2))[:, None]
        weight = weight / weight.sum()
        a, b = one[near], two[near]
        mean_a, mean_b = (weight * a).sum(0), (weight * b).sum(0)
        var_a, var_b = (weight * (a - mean_a) ** 2).sum(0), (weight * (b - mean_b) ** 2).sum(0)
        both = (weight * (a - mean_a) * (b - mean_b)).sum(0)
        found.append(
            (2 * mean_a * mean_b + c1) * (2 * both + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
        )
    return float(np.mean(found))


def test_ssim_is_that_of_windows_of_kept_pixels(pair: tuple[Tensor, Tensor], disc: Tensor) -> None:
    assert float(masks.ssim(*pair, disc)) == pytest.approx(slow_ssim(*pair, disc), abs=1e-5)
    dim = (0.5 + 0.1 * pair[0], 0.5 + 0.1 * pair[1])  # far from black, so that the spread is not the largest value
    assert float(masks.ssim(*dim, disc)) == pytest.approx(slow_ssim(*dim, disc), abs=1e-4)


def test_ssim_without_values_takes_what_torchmetrics_takes() -> None:
    peaks = []
    one, two = torch.rand(300, 400, 3), torch.rand(300, 400, 3)
    masks.ssim(one, two)  # imports
    with AllocationTracker() as tracker, BlockedConvolutions():
        masks.ssim(one, two)
    peaks.append(sum(tracker.peak.values()))
    with shapes_only(), AllocationTracker() as tracker, BlockedConvolutions():
        one, two = torch.empty(300, 400, 3), torch.empty(300, 400, 3)
        tracker.reset_peak()
        masks.ssim(one, two)
    peaks.append(sum(tracker.peak.values()))
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


def test_a_mask_that_keeps_everything_changes_nothing(pair: tuple[Tensor, Tensor]) -> None:
    everything = torch.ones(HEIGHT, WIDTH, 1, dtype=torch.bool)
    batch = [image.permute(2, 0, 1)[None] for image in pair]
    expected = float(structural_similarity_index_measure(*batch))  # type: ignore[arg-type]
    assert float(masks.ssim(*pair, everything)) == pytest.approx(expected, abs=1e-5)
    assert float(masks.ssim(*pair)) == pytest.approx(expected, abs=1e-6)


def test_few_pixels_have_an_ssim(pair: tuple[Tensor, Tensor]) -> None:
    pred, target = pair
    border = torch.zeros(HEIGHT, WIDTH, 1, dtype=torch.bool)
    border[:3] = True
    assert float(masks.ssim(target, target, border)) == pytest.approx(1, abs=1e-5)
    assert 0 < float(masks.ssim(pred, target, border)) < 1
    single = torch.zeros_like(border)
    single[7, 9] = True
    assert float(masks.ssim(target, target, single)) == pytest.approx(1, abs=1e-5)
    for size in ((1, 1), (4, 40), (11, 11)):
        small, corner = torch.rand(*size, 3), torch.zeros(*size, 1, dtype=torch.bool)
        corner[0, 0] = True
        assert float(masks.ssim(small, small, corner)) == pytest.approx(1, abs=1e-5)
    assert masks.is_empty(torch.zeros_like(border)) and not masks.is_empty(border) and not masks.is_empty(None)


def test_shares_of_patches() -> None:
    mask = torch.zeros(8, 12, 1, dtype=torch.bool)
    mask[:4, :6] = True
    shares = masks.patch_shares(mask, PatchGrid.covering(2, 3, 8, 12))
    torch.testing.assert_close(shares, torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.0, 0.0]]))


def test_pixels_outside_of_a_grid_count_for_its_outermost_patches() -> None:
    """So that whatever is kept has some weight."""
    mask = torch.zeros(8, 12, 1, dtype=torch.bool)
    mask[7, 11] = True
    shares = masks.patch_shares(mask, PatchGrid(2, 2, origin_px=(2.0, 2.0), stride_px=(2.0, 2.0)))
    assert shares[1, 1] > 0 and shares.count_nonzero() == 1


def test_shown_pictures_are_grey_where_the_mask_leaves_out(disc: Tensor) -> None:
    single, double = torch.rand(HEIGHT, WIDTH, 3), torch.rand(HEIGHT, 2 * WIDTH, 3)
    given = masks.grey_out({"depth": single, "img": double}, disc)
    kept = disc[..., 0]
    for picture, original in ((given["depth"], single), (given["img"][:, :WIDTH], double[:, :WIDTH])):
        assert torch.equal(picture[kept], original[kept]) and (picture[~kept] == masks.LEFT_OUT_GREY).all()
    assert (given["img"][:, WIDTH:][~kept] == masks.LEFT_OUT_GREY).all()
    assert masks.grey_out({"img": double}, None)["img"] is double
