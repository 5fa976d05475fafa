"""The Gaussians nearest to points of space."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


class NearestGaussians:
    """Finds them by a tree (scipy's KDTree) in the CPU's memory, whatever the device: exact, and quick for millions.

    Args:
        means: centres; those that are not finite are near nothing.
    """

    def __init__(self, means: Float[Tensor, "gaussians 3"]) -> None:
        from scipy.spatial import KDTree

        self._means = means.detach()
        self._version = means._version
        places = self._means.cpu()
        self._finite = torch.isfinite(places).all(dim=1).nonzero()[:, 0]
        self._tree = KDTree(places[self._finite].numpy(), balanced_tree=False, compact_nodes=False)

    def is_of(self, means: Float[Tensor, "gaussians 3"]) -> bool:
        """Whether these are still the centres."""
        return means.data_ptr() == self._means.data_ptr() and means._version == self._version

    def __call__(self, points: Float[Tensor, "points 3"], count: int) -> Int64[Tensor, "points neighbours"]:
        """Indices of the nearest centres, nearest first; fewer than ``count`` where there are not so many.

        Args:
            points: anywhere; the indices are on their device.
            count: 1 or more.
        """
        count = min(count, len(self._finite))
        _, found = self._tree.query(points.detach().cpu().numpy(), k=count)
        found = torch.from_numpy(found).long().reshape(len(points), count)
        return self._finite[found].to(points.device)
