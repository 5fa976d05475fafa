"""Clustering of numbers and of vectors into a given number of groups, as formats with palettes of values need it.

Numbers get an optimal codebook by Lloyd's algorithm on their sorted list. Vectors are clustered on two levels: into
cells, and each cell into its share of the clusters. With n vectors and k clusters that takes about 2 n √k distances
for each step of Lloyd's algorithm, not n k.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

ENTRIES = 256
"""Length of a codebook."""
_BINS = 4096
_CODEBOOK_STEPS = 30
_ROUNDS, _STEPS = 4, 6
_SAMPLES_PER_CELL = 64
_LARGEST = 1 << 24
"""Distances that are in memory at a time: 64 MiB."""


def fit_codebook(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " 256"]:
    """Returns the numbers that stand for others with the least squared error, ascending, float32.

    They start as dense as the cube root of the density of the values, which is optimal for many of them (Panter and
    Dite, 1951), and are improved by Lloyd's algorithm. Some are repeated where there are fewer different values.

    Args:
        values: one or more, finite.
    """
    ordered = np.sort(values.astype(np.float64))
    low, high = ordered[0], ordered[-1]
    density, edges = np.histogram(ordered, _BINS, (low, high)) if high > low else (np.ones(1), np.array([low, high]))
    share = np.concatenate([[0.0], np.cumsum(np.cbrt(density))])
    codebook = np.interp((np.arange(ENTRIES) + 0.5) / ENTRIES * share[-1], share, edges)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    for _ in range(_CODEBOOK_STEPS):
        ends = np.searchsorted(ordered, (codebook[1:] + codebook[:-1]) / 2)
        ends = np.concatenate([[0], ends, [len(ordered)]])
        counts = np.diff(ends)
        codebook = np.where(counts > 0, np.diff(sums[ends]) / np.maximum(counts, 1), codebook)
    return codebook.astype(np.float32)


def nearest_entries(
    values: Float[np.ndarray, "*shape"], codebook: Float[np.ndarray, " size"]
) -> UInt8[np.ndarray, "*shape"]:
    """Returns the indices of the nearest of at most 256 ascending numbers."""
    return np.searchsorted((codebook[1:] + codebook[:-1]) / 2, values).astype(np.uint8)


def cluster_vectors(
    vectors: Float[Tensor, "n dim"],
    count: int,
    weights: Float[Tensor, " n"],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Float[Tensor, "count dim"], Int[Tensor, " n"]]:
    """Groups vectors so that those of a group are near their weighted mean; the same vectors give the same groups.

    Args:
        vectors: at least as many as clusters, finite, on any device.
        weights: how much the error of each vector matters, more than 0.
        on_progress: is told the cells that are done, and their number.

    Returns:
        The means, and the index of the cluster of each vector.
    """
    generator = torch.Generator().manual_seed(0)
    cells = max(1, round(math.sqrt(count)))
    drawn = torch.randperm(len(vectors), generator=generator)[: cells * _SAMPLES_PER_CELL].to(vectors.device)
    cell_means, _ = _lloyd(vectors[drawn], weights[drawn], cells, generator)
    cell_of, _ = _nearest(vectors, cell_means)
    order = torch.argsort(cell_of, stable=True)
    sizes = torch.bincount(cell_of, minlength=cells)
    shares = _shares(sizes, count)
    means = vectors.new_zeros(count, vectors.shape[1])
    labels = torch.zeros_like(cell_of)
    row = cluster = 0
    for cell, (size, share) in enumerate(zip(sizes.tolist(), shares.tolist(), strict=True)):
        members = order[row : row + size]
        if size:
            centres, which = _lloyd(vectors[members], weights[members], share, generator)
            means[cluster : cluster + share], labels[members] = centres, which + cluster
        row, cluster = row + size, cluster + share
        on_progress(cell + 1, cells)
    return means, labels


def _shares(sizes: Int[Tensor, " cells"], count: int) -> Int[Tensor, " cells"]:
    """Divides the clusters among cells in proportion to their sizes: 1 or more for each that is not empty, and no more
    than its size."""
    wanted = sizes.double() * count / sizes.sum()
    shares = wanted.floor().long().clamp_min(1).minimum(sizes)
    ranked = torch.argsort(wanted - shares, descending=True, stable=True).tolist()
    spare = count - int(shares.sum())
    while spare:
        step = 1 if spare > 0 else -1
        for cell in ranked if spare > 0 else reversed(ranked):
            if spare and (shares[cell] < sizes[cell] if spare > 0 else shares[cell] > 1):
                shares[cell] += step
                spare -= step
    return shares


def _lloyd(
    vectors: Float[Tensor, "n dim"], weights: Float[Tensor, " n"], count: int, generator: torch.Generator
) -> tuple[Float[Tensor, "count dim"], Int[Tensor, " n"]]:
    """Clusters vectors by Lloyd's algorithm. Empty clusters, as equal vectors leave them, go to the worst ones."""
    means = _seeds(vectors, weights, count, generator)
    labels, errors = _nearest(vectors, means)
    for _ in range(_STEPS):
        totals = torch.zeros_like(weights[:count]).index_add_(0, labels, weights)
        sums = torch.zeros_like(means).index_add_(0, labels, vectors * weights[:, None])
        empty = totals == 0
        means = torch.where(empty[:, None], means, sums / totals[:, None])
        means[empty] = vectors[(weights * errors).topk(int(empty.sum())).indices]
        labels, errors = _nearest(vectors, means)
    return means, labels


def _seeds(
    vectors: Float[Tensor, "n dim"], weights: Float[Tensor, " n"], count: int, generator: torch.Generator
) -> Float[Tensor, "count dim"]:
    """Draws vectors in a few rounds, in proportion to what they lose by the seeds so far (k-means||, Bahmani et al.,
    2012)."""
    chance, means = weights, vectors[:0]
    for number in range(_ROUNDS):
        share = count * (number + 1) // _ROUNDS - len(means)
        if share:
            # Nobody's chance is 0, so that there are enough to draw from.
            likely = (chance / chance.max().clamp_min(1e-30)).clamp_min(1e-6).cpu()
            drawn = torch.multinomial(likely, share, generator=generator).to(vectors.device)
            means = torch.cat([means, vectors[drawn]])
            chance = weights * _nearest(vectors, means)[1]
    return means


def _nearest(
    vectors: Float[Tensor, "n dim"], means: Float[Tensor, "count dim"]
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """Returns the index of the nearest mean of each vector, and its squared distance."""
    # |v − m|² / 2 without |v|² / 2, which is the same for all means, is a product of matrices.
    half = (means * means).sum(dim=1) / 2
    rows = max(1, _LARGEST // len(means))
    labels = torch.cat([(half - block @ means.T).argmin(dim=1) for block in vectors.split(rows)])
    return labels, (vectors - means[labels]).square().sum(dim=1)
