"""Exact nearest neighbours in plain torch, for devices without a tree library.

Points are divided into boxes of at most 64 by halving at the median of the widest axis, level by level for all boxes
at once. Each box then searches its nearest boxes, and doubles their number while a box not searched could still hold
a nearer neighbour. Work grows as N log N plus (N / 64)² distances between boxes, and memory is bounded: 1 M points
have 10¹² distances, but their boxes only 2.7 · 10⁸.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

BOX = 64
"""Upper limit of points per box."""
FIRST = 32
"""Boxes searched at first."""
LAST = 128
"""Upper limit of boxes searched for a whole box. Points that need more are searched one by one, since a large, sparse
box beside a dense part of the scene is near more boxes than any of its points."""
ELEMENTS = 1 << 25
"""Distances in memory at once: 128 MiB of float32, plus about three times as much for intermediates."""


def search_in_blocks(means: Float[Tensor, "gaussians 3"], count: int) -> Int[Tensor, "gaussians neighbours"]:
    """Returns the ``count`` (at most all) nearest points of every point, itself included, nearest first; int32."""
    total = len(means)
    points, order = _boxes(means)
    boxes, size = order.shape
    low, high = _bounds(points)
    nearest = torch.zeros(total + 1, count, dtype=torch.int32, device=means.device)
    groups, names = points, order
    searched = min(boxes, max(FIRST, -(-count // size)))
    while len(groups):
        # An empty entry, which ends the search if it stays alone; others may be boxes of another size.
        left = [(groups[:0], names[:0])]
        rows = max(1, ELEMENTS // max(boxes, groups.shape[1] * searched * size))
        for group, name in zip(groups.split(rows), names.split(rows), strict=True):
            near = _gaps(*_bounds(group), low, high).topk(min(boxes, searched + 1), dim=1, largest=False, sorted=True)
            others = near.indices[:, :searched]
            squared, places = _nearest(group, points[others].flatten(1, 2), count)
            nearest[name] = order[others].flatten(1, 2).gather(1, places.flatten(1)).view_as(places).int()
            if searched < boxes:
                unsure = (name < total) & (squared[..., -1] > near.values[:, -1:])
                if searched >= LAST:
                    left.append((group[unsure][:, None], name[unsure][:, None]))
                else:
                    left.append((group[unsure.any(1)], name[unsure.any(1)]))
        groups, names = (torch.cat(parts) for parts in zip(*left[len(left) > 1 :], strict=True))
        searched = min(boxes, 2 * searched)
    return nearest[:total]


def _bounds(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Returns lower and upper corners of the boxes, (boxes, 3) each; an empty box is infinitely far away."""
    there = torch.isfinite(groups)
    return torch.where(there, groups, torch.inf).amin(1), torch.where(there, groups, -torch.inf).amax(1)


def _boxes(means: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the points of each box (boxes, size, 3) and their indices; padding is infinite and has index N."""
    total = len(means)
    levels = max(0, (-(-total // BOX) - 1).bit_length())
    size = -(-total // 2**levels)
    padding = size * 2**levels - total
    points = torch.cat([means, means.new_full((padding, 3), torch.inf)])[None]
    order = torch.arange(len(points[0]), device=means.device).clamp(max=total)[None]
    for _ in range(levels):
        low, high = _bounds(points)
        axis = (high - low).argmax(1)
        along = points.gather(2, axis[:, None, None].expand(-1, points.shape[1], 1)).squeeze(2)
        ranks = along.argsort(dim=1)
        half = points.shape[1] // 2
        points = points.gather(1, ranks[..., None].expand(-1, -1, 3)).reshape(-1, half, 3)
        order = order.gather(1, ranks).reshape(-1, half)
    return points, order


def _gaps(low: Tensor, high: Tensor, lows: Tensor, highs: Tensor) -> Tensor:
    """Returns squared distances between boxes, (boxes, all boxes); 0 for boxes that overlap."""
    total = None
    for axis in range(3):
        apart = torch.maximum(lows[:, axis] - high[:, None, axis], low[:, None, axis] - highs[:, axis]).clamp_min(0)
        total = apart.square_() if total is None else total.addcmul_(apart, apart)
    assert total is not None
    return total


def _nearest(points: Tensor, candidates: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns squared distances and positions of the nearest candidates, (boxes, size, count)."""
    squared = None
    for axis in range(3):
        apart = points[..., axis, None] - candidates[:, None, :, axis]
        squared = apart.square_() if squared is None else squared.addcmul_(apart, apart)
    assert squared is not None
    # Padding against padding gives NaN, which must never be chosen.
    smallest = squared.nan_to_num_(nan=torch.inf).topk(count, dim=2, largest=False, sorted=True)
    return smallest.values, smallest.indices
