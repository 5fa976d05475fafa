"""Points near Gaussians: where they come from, how they are spread, and what they depend on."""

from collections.abc import Callable

import torch

from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.regularization.sdf import sample_points


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_visible_gaussian_is_as_likely_as_any_other(random_gaussians: Callable[..., Gaussians]) -> None:
    visible = torch.tensor([False, True, True, False, True])
    _, owners = sample_points(random_gaussians(5), visible, 30_000, generator=generator())
    assert (owners.diff() >= 0).all(), "in ascending order"
    counts = torch.bincount(owners, minlength=5)
    assert counts[~visible].sum() == 0
    assert ((counts[visible] - 10_000).abs() < 400).all()  # 5 standard deviations


def test_draws_repeat_with_the_seed(random_gaussians: Callable[..., Gaussians]) -> None:
    gaussians, visible = random_gaussians(50), torch.ones(50, dtype=torch.bool)
    first, same, other = (sample_points(gaussians, visible, 20, generator=generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first[0], same[0]) and torch.equal(first[1], same[1])
    assert not torch.equal(first[1], other[1])


def test_points_have_the_covariance_of_their_gaussian(random_gaussians: Callable[..., Gaussians]) -> None:
    gaussians = random_gaussians(3)
    visible = torch.tensor([False, True, False])
    rotations, sizes = gaussians.rotations(), gaussians.sizes()
    points, owners = sample_points(gaussians, visible, 40_000, spread=1.5, generator=generator())
    assert (owners == 1).all()
    expected = 1.5**2 * rotations[1] @ sizes[1].square().diag() @ rotations[1].T
    assert torch.allclose(torch.cov(points.T), expected, rtol=0, atol=0.03 * float(expected.diag().max()))
    assert torch.allclose(points.mean(0), gaussians.means[1], rtol=0, atol=0.02)


def test_points_move_with_their_gaussian(
    random_gaussians: Callable[..., Gaussians], leaves: Callable[[Gaussians], Gaussians]
) -> None:
    gaussians = leaves(random_gaussians(2))
    visible = torch.tensor([True, False])
    points, _ = sample_points(gaussians, visible, 7, generator=generator())
    points.sum().backward()
    assert torch.equal(gaussians.means.grad, torch.tensor([[7.0] * 3, [0.0] * 3], dtype=torch.float64))
    assert gaussians.scales.grad is not None and gaussians.scales.grad[0].abs().min() > 0
    assert gaussians.quats.grad is not None and gaussians.quats.grad[0].abs().max() > 0


def test_none_visible_gives_no_points(random_gaussians: Callable[..., Gaussians]) -> None:
    for n in (0, 4):
        gaussians = random_gaussians(n)
        points, owners = sample_points(gaussians, torch.zeros(n, dtype=torch.bool), 10)
        assert points.shape == (0, 3) and owners.shape == (0,)
