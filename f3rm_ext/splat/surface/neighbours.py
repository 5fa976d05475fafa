"""The nearest neighbours of every Gaussian, kept as int32 and kept right while Gaussians come and go."""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from f3rm_ext.splat.surface.block_search import search_in_blocks

NONE = -1
"""Stands where a Gaussian has fewer neighbours than asked for."""


def nearest_neighbours(
    means: Float[Tensor, "gaussians 3"], count: int, *, workers: int = -1
) -> Int[Tensor, "gaussians neighbours"]:
    """The nearest Gaussians of every Gaussian by distance of centres, nearest first.

    A tree (scipy's KDTree) on the CPU; on other devices :func:`search_in_blocks`, so that nothing leaves the device.
    Both are exact.

    Args:
        means: centres. Those that are not finite have no neighbours but themselves and are nobody's neighbour.
        count: neighbours per Gaussian, the Gaussian itself included.
        workers: threads of the tree's search, -1 for all cores.

    Returns:
        int32 indices. Column 0 is the Gaussian itself; where there are fewer than ``count`` Gaussians the last
        columns are -1.
    """
    if count < 1:
        raise ValueError(f"count is {count}, must be at least 1")
    means = means.detach()
    total = len(means)
    found = torch.full((total, count), NONE, dtype=torch.int32, device=means.device)
    if total == 0:
        return found
    finite = torch.isfinite(means).all(dim=1)
    usable = finite.nonzero().squeeze(1)
    if len(usable):
        search = _by_tree if means.device.type == "cpu" else _by_blocks
        local = search(means[usable], min(count, len(usable)), workers)
        found[usable, : local.shape[1]] = usable.to(torch.int32)[local.long()]
    found[:, 0] = torch.arange(total, dtype=torch.int32, device=means.device)
    return found


def _by_tree(means: Tensor, count: int, workers: int) -> Tensor:
    from scipy.spatial import KDTree

    points = means.double().numpy()
    # A tree cut at the middle of the boxes is built several times faster and searched as fast.
    tree = KDTree(points, leafsize=16, balanced_tree=False, compact_nodes=False)
    _, index = tree.query(points, k=count, workers=workers)
    return _self_first(torch.from_numpy(np.asarray(index, dtype=np.int32).reshape(len(points), count)))


def _by_blocks(means: Tensor, count: int, workers: int = 1) -> Tensor:
    del workers
    return _self_first(search_in_blocks(means, count))


def _self_first(index: Tensor) -> Tensor:
    """Puts every Gaussian at the head of its own row, where centres that coincide may have displaced it."""
    own = torch.arange(len(index), dtype=index.dtype, device=index.device)
    displaced = (index[:, 0] != own).nonzero().squeeze(1)
    if len(displaced):
        rows, own = index[displaced], own[displaced, None]
        # The row without the Gaussian itself, or without its last where it is not among them.
        rank = (rows == own).int()
        rank[:, -1] += 1 - rank.amax(dim=1).clamp(max=1)
        others = rows.gather(1, rank.argsort(dim=1, stable=True))[:, :-1]
        index = index.clone()
        index[displaced] = torch.cat([own, others], dim=1)
    return index


class NeighbourIndex:
    """The neighbours of all Gaussians, searched again on a schedule.

    Memory: 4 · count bytes per Gaussian (64 at 16 neighbours, 366 MiB for 6 M Gaussians), half of int64.

    Args:
        count: neighbours per Gaussian, itself included.
        start: first step of the schedule.
        every: steps between searches.
        workers: threads of the search on the CPU, -1 for all cores.
    """

    def __init__(self, count: int = 16, start: int = 7001, every: int = 500, workers: int = -1) -> None:
        if count < 1 or every < 1:
            raise ValueError(f"count {count} and every {every} must be at least 1")
        self.count, self.start, self.every, self.workers = count, start, every, workers
        self.index: Int[Tensor, "gaussians neighbours"] | None = None
        """The present neighbours, -1 where there is none; None before the first search and after any growth."""
        self._period: float = -math.inf

    def period(self, step: int) -> int:
        """How many refreshes of the schedule lie before a step."""
        return (step - self.start) // self.every

    def at(self, step: int, means: Float[Tensor, "gaussians 3"]) -> Int[Tensor, "gaussians neighbours"]:
        """The neighbours to use at a step; searches where the schedule or a change of the Gaussians asks for it.

        Which steps search depends on the step alone, not on when the process was started.
        """
        period = self.period(step)
        if self.index is None or len(self.index) != len(means) or period > self._period:
            self.index = nearest_neighbours(means, self.count, workers=self.workers)
            self._period = period
        elif self.index.device != means.device:
            self.index = self.index.to(means.device)
        return self.index

    def forget(self) -> None:
        """Makes the next use search again."""
        self.index = None

    def after_change(self, keep: Bool[Tensor, " gaussians"] | Int[Tensor, " kept"]) -> None:
        """Follows a change of the Gaussians without a search, where that is possible.

        Rows of Gaussians that are gone are dropped, and where they were neighbours stands -1: those left are still
        the nearest, only fewer. An index that repeats Gaussians or brings in new ones (-1) makes the next use search.

        Args:
            keep: mask of those that stay, or for each new Gaussian the place of the old one.
        """
        if self.index is None:
            return
        old = keep.nonzero().squeeze(1) if keep.dtype == torch.bool else keep.long()
        total = len(self.index)
        if keep.dtype == torch.bool and len(keep) != total:
            raise ValueError(f"the mask is of {len(keep)} Gaussians, the neighbours of {total}")
        if len(old) and (int(old.min()) < 0 or len(old.unique()) != len(old)):
            self.index = None
            return
        places = torch.full((total + 1,), NONE, dtype=torch.int32, device=self.index.device)
        old = old.to(places.device)
        places[old] = torch.arange(len(old), dtype=torch.int32, device=places.device)
        # The place behind the last, which -1 looks up, says -1.
        self.index = places[self.index[old].long()]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs so that a resumed run goes on with the same neighbours."""
        return {"index": self.index, "period": self._period}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the place of what :meth:`state_dict` returned."""
        self.index, self._period = state["index"], state["period"]
