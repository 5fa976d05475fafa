"""The nearest Gaussians to points of space."""

import pytest
import torch

from f3rm_ext.splat.knn import NearestGaussians


@pytest.mark.parametrize("count", [1, 4, 99])
def test_those_of_all_distances(count: int) -> None:
    means = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    points = torch.randn(9, 3, generator=torch.Generator().manual_seed(1))
    apart = (points[:, None].double() - means.double()).norm(dim=-1)
    assert torch.equal(NearestGaussians(means)(points, count), apart.argsort(dim=1)[:, :count])


def test_gaussians_that_are_nowhere_are_near_nothing() -> None:
    means = torch.tensor([[torch.nan, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, torch.inf, 0.0], [3.0, 0.0, 0.0]])
    assert NearestGaussians(means)(torch.zeros(1, 3), 4).tolist() == [[1, 3]]


def test_a_change_of_the_centres_is_noticed() -> None:
    means = torch.rand(5, 3)
    nearest = NearestGaussians(means)
    assert nearest.matches(means) and not nearest.matches(means.clone())
    means += 1.0
    assert not nearest.matches(means)
