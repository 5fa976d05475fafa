"""The nearest neighbours of every Gaussian, kept up to date while Gaussians are added and removed."""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from f3rm_ext.memory.shapes import lacks_values
from f3rm_ext.splat.regularization.block_search import search_in_blocks

NONE = -1
"""Entry for a missing neighbour."""


def nearest_neighbours(means: Float[Tensor, "gaussians 3"], count: int) -> Int[Tensor, "gaussians neighbours"]:
    """Finds the nearest Gaussians of every Gaussian by distance of centres, nearest first.

    Uses scipy's KDTree on the CPU, and :func:`search_in_blocks` on other devices so that nothing leaves the device.
    Both are exact.

    Args:
        means: centres. A centre that is not finite has no neighbour except itself and is nobody else's neighbour.
        count: neighbours per Gaussian, including itself.

    Returns:
        int32 indices. Column 0 is the Gaussian itself. The last columns are -1 if there are fewer than ``count``
        Gaussians.
    """
    means = means.detach()
    total = len(means)
    neighbours = torch.full((total, count), NONE, dtype=torch.int32, device=means.device)
    if total == 0 or lacks_values(means):
        return neighbours
    finite = torch.isfinite(means).all(dim=1)
    usable = finite.nonzero().squeeze(1)
    if len(usable):
        points, most = means[usable], min(count, len(usable))
        local = _by_tree(points, most) if means.device.type == "cpu" else search_in_blocks(points, most)
        neighbours[usable, : local.shape[1]] = usable.to(torch.int32)[_self_first(local).long()]
    neighbours[:, 0] = torch.arange(total, dtype=torch.int32, device=means.device)
    return neighbours


def _by_tree(means: Tensor, count: int) -> Tensor:
    from scipy.spatial import KDTree

    points = means.double().numpy()
    # A tree split at the middle of its boxes is several times faster to build and as fast to search.
    tree = KDTree(points, leafsize=16, balanced_tree=False, compact_nodes=False)
    _, index = tree.query(points, k=count, workers=-1)
    return torch.from_numpy(np.asarray(index, dtype=np.int32).reshape(len(points), count))


def _self_first(index: Tensor) -> Tensor:
    """Puts every Gaussian first in its own row, from where coincident centres may have displaced it."""
    own = torch.arange(len(index), dtype=index.dtype, device=index.device)
    displaced = (index[:, 0] != own).nonzero().squeeze(1)
    if len(displaced):
        rows, own = index[displaced], own[displaced, None]
        # Drops the Gaussian itself from its row, or the last entry if it is not in the row.
        rank = (rows == own).int()
        rank[:, -1] += 1 - rank.amax(dim=1).clamp(max=1)
        others = rows.gather(1, rank.argsort(dim=1, stable=True))[:, :-1]
        index = index.clone()
        index[displaced] = torch.cat([own, others], dim=1)
    return index


class NeighbourIndex:
    """The neighbours of all Gaussians, searched on a schedule.

    Takes 4 bytes per Gaussian and neighbour, itself included (366 MiB for 16 of 6 M Gaussians), half as much as int64.
    """

    def __init__(self, count: int = 16, start: int = 7001, every: int = 500) -> None:
        self.count, self.start, self.every = count, start, every
        self.index: Int[Tensor, "gaussians neighbours"] | None = None
        """Current neighbours, -1 for none; None before the first search and after any growth."""
        self._period: float = -math.inf

    def at(self, step: int, means: Float[Tensor, "gaussians 3"]) -> Int[Tensor, "gaussians neighbours"]:
        """Returns the neighbours at a step; searches if the schedule or a change of the Gaussians requires it.

        The schedule depends only on the step, not on when the process was started.
        """
        period = (step - self.start) // self.every  # searches that the schedule has before the step
        if self.index is None or len(self.index) != len(means) or period > self._period:
            self.index = nearest_neighbours(means, self.count)
            self._period = period
        elif self.index.device != means.device:
            self.index = self.index.to(means.device)
        return self.index

    def after_change(self, source: Int[Tensor, " gaussians"]) -> None:
        """Applies a change of the Gaussians, without a search if possible.

        Drops the rows of removed Gaussians and replaces them by -1 in other rows; the remaining neighbours are still
        the nearest, only fewer. Duplicated or new Gaussians force a search at the next use. The source is for each
        Gaussian after the change its index before, -1 for a new one.
        """
        if self.index is None:
            return
        if len(source) and (int(source.min()) < 0 or len(source.unique()) != len(source)):
            self.index = None
            return
        places = torch.full((len(self.index) + 1,), NONE, dtype=torch.int32, device=self.index.device)
        old = source.long().to(places.device)
        places[old] = torch.arange(len(old), dtype=torch.int32, device=places.device)
        # Index -1 looks up the last entry, which is -1.
        self.index = places[self.index[old].long()]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which a resumed run continues with the same neighbours."""
        return {"index": self.index, "period": self._period}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self.index, self._period = state["index"], state["period"]
