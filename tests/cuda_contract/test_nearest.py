"""The nearest Gaussians on CUDA are those of exact arithmetic."""

import torch

from f3rm_ext.splat.knn import NearestGaussians


def _truth(points: torch.Tensor, means: torch.Tensor, count: int) -> torch.Tensor:
    apart = (points[:, None].double() - means.double()).square().sum(dim=-1)
    return apart.topk(count, dim=1, largest=False).indices


def test_close_together_far_from_the_origin(cuda: torch.device) -> None:
    # A product of matrices subtracts squares of 300 to find squares of 1e-4.
    generator = torch.Generator().manual_seed(0)
    means = torch.tensor([10.0, -8.0, 12.0]) + 0.02 * torch.rand(2000, 3, generator=generator)
    points = means[:300] + 1e-4 * torch.randn(300, 3, generator=generator)
    found = NearestGaussians(means.to(cuda))(points.to(cuda), 4)
    assert found.device == cuda and found.dtype == torch.int64
    assert torch.equal(found.cpu(), _truth(points, means, 4))
