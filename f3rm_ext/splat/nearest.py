"""The Gaussians nearest to points of space."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

_PAIRS = 1 << 25
"""Distances computed at a time where there is no tree."""


class NearestGaussians:
    """Finds them by a tree (scipy's KDTree) on the CPU, and by comparing all with all on other devices.

    Args:
        means: centres.
    """

    def __init__(self, means: Float[Tensor, "gaussians 3"]) -> None:
        self._means = means.detach()
        self._version = means._version
        self._tree = None
        if means.device.type == "cpu":
            from scipy.spatial import KDTree

            self._tree = KDTree(self._means.numpy(), balanced_tree=False, compact_nodes=False)

    def is_of(self, means: Float[Tensor, "gaussians 3"]) -> bool:
        """Whether these are still the centres."""
        return means.data_ptr() == self._means.data_ptr() and means._version == self._version

    def __call__(self, points: Float[Tensor, "points 3"], count: int) -> Int64[Tensor, "points neighbours"]:
        """Indices of the nearest centres, nearest first; fewer than ``count`` where there are not so many.

        Args:
            points: anywhere.
            count: 1 or more.
        """
        count = min(count, len(self._means))
        if self._tree is not None:
            _, found = self._tree.query(points.numpy(), k=count)
            return torch.from_numpy(found).long().reshape(len(points), count)
        size = max(1, _PAIRS // len(self._means))
        distances = (torch.cdist(part, self._means) for part in points.split(size))
        return torch.cat([apart.topk(count, dim=1, largest=False).indices for apart in distances])
