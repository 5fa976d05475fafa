"""Codebooks of numbers, and clusters of vectors."""

import numpy as np
import pytest
import torch
from scipy.cluster.vq import kmeans2

from f3rm_ext.splat.files.clustering import cluster_vectors, fit_codebook, nearest_entries

RANDOM = np.random.default_rng(0)
VALUES = {
    "normal": RANDOM.normal(size=20_000),
    "two heaps": np.concatenate([RANDOM.normal(-9, 0.1, 9_000), RANDOM.normal(5, 2, 1_000)]),
    "outliers": np.concatenate([RANDOM.normal(size=5_000), [-80.0, 90.0]]),
}


def squared_error(values: np.ndarray, codebook: np.ndarray) -> float:
    return float(((codebook[nearest_entries(values, codebook)] - values) ** 2).mean())


@pytest.mark.parametrize("name", VALUES)
def test_codebook_is_better_than_simple_ones(name: str) -> None:
    values = VALUES[name]
    codebook = fit_codebook(values)
    assert codebook.shape == (256,) and codebook.dtype == np.float32 and (np.diff(codebook) >= 0).all()
    uniform = np.linspace(values.min(), values.max(), 256)
    quantiles = np.quantile(values, (np.arange(256) + 0.5) / 256)
    assert squared_error(values, codebook) < 0.9 * min(squared_error(values, uniform), squared_error(values, quantiles))


@pytest.mark.parametrize("values", [np.array([3.0]), np.full(9, -2.0), RANDOM.normal(size=100).repeat(3)])
def test_a_few_different_values_are_kept(values: np.ndarray) -> None:
    codebook = fit_codebook(values)
    np.testing.assert_allclose(codebook[nearest_entries(values, codebook)], values, rtol=1e-6)


def test_nearest_entries() -> None:
    values, codebook = RANDOM.normal(size=(500, 3)), np.sort(RANDOM.normal(size=256)).astype(np.float32)
    brute = np.abs(values[..., None] - codebook).argmin(axis=-1)
    assert np.array_equal(nearest_entries(values, codebook), brute)


def vectors(count: int = 3_000) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    centres = torch.randn(60, 9, generator=random)
    spread = 0.2 * torch.randn(count, 9, generator=random)
    return centres[torch.randint(60, (count,), generator=random)] + spread


@pytest.mark.parametrize("count", [1, 16, 256, 600])
def test_clusters_are_as_tight_as_those_of_a_search_over_all(count: int) -> None:
    data = vectors(800)
    means, labels = cluster_vectors(data, count, torch.ones(len(data)))
    assert means.shape == (count, 9) and labels.min() >= 0 and labels.max() < count
    peer, found = kmeans2(data.numpy().astype(np.float64), count, iter=8, minit="++", rng=np.random.default_rng(0))
    theirs = ((peer[found] - data.numpy()) ** 2).sum(axis=1).mean()
    assert (means[labels] - data).square().sum(dim=1).mean() < 1.15 * theirs
    assert len(labels.unique()) > 0.95 * count


def test_as_many_clusters_as_vectors_lose_nothing() -> None:
    data = vectors(500)
    means, labels = cluster_vectors(data, 500, torch.ones(500))
    torch.testing.assert_close(means[labels], data)


def test_equal_vectors_leave_cells_empty() -> None:
    data = torch.ones(400, 9)
    data[:5] = torch.arange(5.0)[:, None] * 10
    means, labels = cluster_vectors(data, 100, torch.ones(400))
    torch.testing.assert_close(means[labels], data)


def test_heavy_vectors_pull_their_mean() -> None:
    data, weights = vectors(), torch.ones(3_000)
    weights[::10] = 1000.0
    means, labels = cluster_vectors(data, 256, weights)
    errors = (means[labels] - data).square().sum(dim=1)
    assert errors[::10].mean() < 0.5 * errors.mean()


def test_same_vectors_give_the_same_clusters_and_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    data = vectors()
    first = cluster_vectors(data, 100, torch.ones(3_000), lambda done, total: told.append((done, total)))
    second = cluster_vectors(data, 100, torch.ones(3_000))
    assert all(map(torch.equal, first, second))
    assert told == [(cell + 1, 10) for cell in range(10)]
