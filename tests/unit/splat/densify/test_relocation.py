"""The maths of relocation and noise, against the published formula and cases worked out by hand."""

import math
from fractions import Fraction

import pytest
import torch

from f3rm_ext.splat.densify.mcmc import MAX_COPIES, add_noise, compute_relocation, sample_rows
from f3rm_ext.splat.gaussians import quats_to_rotations


def published(alpha: float, copies: int) -> tuple[float, float]:
    """Opacity and shrinkage by the formula as printed, with exact binomials and a double sum."""
    new = 1 - (1 - alpha) ** (1 / copies)
    total = 0.0
    for i in range(1, copies + 1):
        for k in range(i):
            total += math.comb(i - 1, k) * (-1) ** k * new ** (k + 1) / math.sqrt(k + 1)
    return new, alpha / total


@pytest.mark.parametrize("copies", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("alpha", [0.01, 0.3, 0.9])
def test_agrees_with_the_published_double_sum(alpha: float, copies: int) -> None:
    alphas, sizes = compute_relocation(
        torch.tensor([alpha], dtype=torch.float64),
        torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64),
        torch.tensor([copies]),
    )
    new, shrink = published(alpha, copies)
    assert alphas.item() == pytest.approx(new, rel=1e-9)
    torch.testing.assert_close(sizes[0], shrink * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), rtol=1e-8, atol=0)


def test_more_copies_than_the_table_has_count_as_its_last() -> None:
    last, more = (
        compute_relocation(torch.tensor([0.7]), torch.ones(1, 3), torch.tensor([n]))
        for n in (MAX_COPIES, MAX_COPIES + 30)
    )
    assert last[0] == more[0] and torch.equal(last[1], more[1])


def test_nearly_opaque_and_many_copies_stay_accurate() -> None:
    """Terms of both signs up to 1e5 nearly cancel there: single precision would be off by percents."""
    alpha = 1 - 2**-20
    new = Fraction(1 - (1 - alpha) ** (1 / 51))
    exact = sum(Fraction(math.comb(51, j)) * (-1) ** (j + 1) * new**j / Fraction(math.sqrt(j)) for j in range(1, 52))
    _, sizes = compute_relocation(torch.tensor([alpha]), torch.ones(1, 3), torch.tensor([51]))
    assert sizes[0, 0].item() == pytest.approx(float(Fraction(alpha) / exact), rel=1e-5)


def test_rows_are_drawn_in_proportion_and_zero_weights_never() -> None:
    torch.manual_seed(0)
    rows = sample_rows(torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]), 20_000)
    shares = torch.bincount(rows, minlength=5) / 20_000
    assert shares[[0, 2, 4]].tolist() == [0, 0, 0]
    assert shares[3].item() == pytest.approx(0.75, abs=0.02)


def test_noise_has_the_covariance_of_the_gaussian_squared() -> None:
    """Σ η has covariance Σ Σᵀ; a transparent Gaussian's gate is sigmoid(100 (1 − 0.005))."""
    torch.manual_seed(0)
    count = 40_000
    quat = torch.tensor([0.9, 0.1, -0.3, 0.2])
    sizes = torch.tensor([0.5, 1.0, 2.0])
    means, scales, quats = torch.zeros(count, 3), sizes.log().expand(count, 3), quat.expand(count, 4)
    opacities = torch.full((count, 1), -12.0)
    add_noise({"means": means, "scales": scales, "quats": quats, "opacities": opacities}, 0.1)
    rotation = quats_to_rotations(quat)
    covariance = rotation @ (sizes**2).diag() @ rotation.T
    gate = 1 / (1 + math.exp(-100 * (1 - 1 / (1 + math.exp(12)) - 0.995)))
    expected = covariance @ covariance.T * (0.1 * gate) ** 2
    torch.testing.assert_close(torch.cov(means.T), expected, rtol=0.05, atol=0.002)


def test_noise_leaves_opaque_gaussians_where_they_are() -> None:
    params = {"means": (10, 3), "scales": (10, 3), "quats": (10, 4), "opacities": (10, 1)}
    opaque = {name: torch.zeros(shape) for name, shape in params.items()}
    add_noise(opaque, 1.0)
    assert opaque["means"].abs().max() < 1e-15
