"""The nearest Gaussians to points of space."""

import torch

from f3rm_ext.splat.nearest import NearestGaussians


def test_nearest_first() -> None:
    means = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
    nearest = NearestGaussians(means)
    assert nearest(torch.tensor([[1.1, 0.0, 0.0], [9.0, 0.0, 0.0]]), 2).tolist() == [[1, 0], [2, 1]]
    assert nearest(torch.tensor([[1.1, 0.0, 0.0]]), 9).tolist() == [[1, 0, 2]]


def test_gaussians_that_are_nowhere_are_near_nothing() -> None:
    means = torch.tensor([[torch.nan, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, torch.inf, 0.0], [3.0, 0.0, 0.0]])
    assert NearestGaussians(means)(torch.zeros(1, 3), 4).tolist() == [[1, 3]]


def test_a_change_of_the_centres_is_noticed() -> None:
    means = torch.rand(5, 3)
    nearest = NearestGaussians(means)
    assert nearest.is_of(means) and not nearest.is_of(means.clone())
    means += 1.0
    assert not nearest.is_of(means)
