"""Search for the Gaussians nearest to points."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


class NearestGaussians:
    """Exact search for the Gaussians with the nearest centres, by scipy's KDTree in CPU memory on any device.

    Args:
        means: centres; those that are not finite are never found.
    """

    def __init__(self, means: Float[Tensor, "gaussians 3"]) -> None:
        from scipy.spatial import KDTree

        self._means = means.detach()
        self._version = means._version
        places = self._means.cpu()
        self._finite = torch.isfinite(places).all(dim=1).nonzero()[:, 0]
        # Boxes split at the middle are several times faster to build and as fast to search.
        self._tree = KDTree(places[self._finite].numpy(), balanced_tree=False, compact_nodes=False)

    def matches(self, means: Float[Tensor, "gaussians 3"]) -> bool:
        """Returns whether the index was built from these centres, in their present state."""
        return means.data_ptr() == self._means.data_ptr() and means._version == self._version

    def __call__(self, points: Float[Tensor, "points 3"], count: int) -> Int64[Tensor, "points neighbours"]:
        """Returns indices of the nearest centres, nearest first, on the device of the points.

        Args:
            count: neighbours per point, 1 or more; all Gaussians if there are fewer.
        """
        count = min(count, len(self._finite))
        _, indices = self._tree.query(points.detach().cpu().numpy(), k=count)
        indices = torch.from_numpy(indices).long().reshape(len(points), count)
        return self._finite[indices].to(points.device)
