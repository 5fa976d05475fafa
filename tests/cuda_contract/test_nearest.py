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


def test_fewer_than_asked_for(cuda: torch.device) -> None:
    means = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    nearest = NearestGaussians(means.to(cuda))
    assert nearest(torch.tensor([[0.9, 0.0, 0.0]]).to(cuda), 5).tolist() == [[1, 0]]
    one = NearestGaussians(means[:1].to(cuda))
    assert one(means.to(cuda), 1).tolist() == [[0], [0]]
