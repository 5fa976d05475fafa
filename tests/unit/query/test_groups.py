"""Groups of points: blobs of like features, kept apart by position and by what is seen together."""

import numpy as np
import pytest
import torch

from f3rm_ext.query import groups
from f3rm_ext.query.groups import (
    average_groups,
    group_points,
    join_parts,
    neighbour_pairs,
    reduce_features,
    segment_graph,
)

BLOB = 60


def blobs(centres: np.ndarray, chances: np.random.Generator) -> np.ndarray:
    return (centres[:, None] + chances.uniform(-0.3, 0.3, size=(len(centres), BLOB, 3))).reshape(-1, 3)


def features_of(kinds: list[int], chances: np.random.Generator, dim: int = 48) -> np.ndarray:
    rows = np.eye(dim)[np.repeat(kinds, BLOB)] * chances.uniform(0.5, 2.0, size=(len(kinds) * BLOB, 1))
    return (rows + chances.normal(scale=0.003, size=rows.shape)).astype(np.float16)


def photos_of(blob_photos: list[list[int]]) -> np.ndarray:
    """Square roots of the weights: each blob is seen in its photos, and a little less than the blob before it."""
    seen = np.zeros((len(blob_photos), 4), dtype=np.float16)
    for number, photos in enumerate(blob_photos):
        seen[number, photos] = 4 - 0.5 * number
    return np.repeat(seen, BLOB, axis=0)


EVERYWHERE = [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize(
    ("places", "kinds", "photos", "expected"),
    [
        ([0, 1, 2, 3], [0, 0, 1, 1], EVERYWHERE, [0, 0, 1, 1]),  # by feature
        ([0, 1, 9, 10], [0, 0, 0, 0], EVERYWHERE, [0, 0, 1, 1]),  # by position
        ([0, 1, 2, 3], [0, 0, 0, 0], [[0, 1], [0, 1], [2, 3], [2, 3]], [0, 0, 1, 1]),  # by what photos see
        ([0, 1, 2, 3], [0, 0, 0, 0], EVERYWHERE, [0, 0, 0, 0]),
    ],
)
def test_blobs_are_grouped(places: list[float], kinds: list[int], photos: list[list[int]], expected: list[int]) -> None:
    chances = np.random.default_rng(0)
    points = blobs(np.asarray(places)[:, None] * [0.5, 0.0, 0.0], chances)
    found = group_points(points, features_of(kinds, chances), photos_of(photos), np.ones(len(points), bool))
    np.testing.assert_array_equal(found.reshape(4, BLOB), np.repeat(expected, BLOB).reshape(4, BLOB))


def test_what_is_not_solid_not_seen_or_has_no_feature_has_no_group() -> None:
    chances = np.random.default_rng(0)
    points, features = blobs(np.zeros((1, 3)), chances), features_of([0], chances)
    seen, solid = photos_of([[0]]), np.ones(BLOB, bool)
    solid[0], seen[1], features[2], points[3] = False, 0, 0, np.nan
    assert group_points(points, features, seen, solid).tolist() == [-1] * 4 + [0] * (BLOB - 4)
    for count in (0, 1, 2):
        few = np.arange(BLOB) >= BLOB - count
        assert group_points(points, features, seen, few).max(initial=-1) == (0 if count else -1)


def test_unit_features_keep_their_distances() -> None:
    features = np.random.default_rng(0).normal(size=(300, 20)) @ np.random.default_rng(1).normal(size=(20, 90))
    chosen = np.arange(5, 300)
    unit = features[chosen] / np.linalg.norm(features[chosen], axis=1, keepdims=True)
    reduced = reduce_features(features.astype(np.float16), chosen)
    assert reduced.shape == (295, 32)
    np.testing.assert_allclose(reduced @ reduced.T, unit @ unit.T, atol=3e-3)


def test_neighbours_are_near_and_come_once() -> None:
    points = np.concatenate([np.random.default_rng(0).uniform(size=(100, 3)), [[50.0, 0.0, 0.0]]])
    pairs = neighbour_pairs(points)
    assert (pairs[:, 0] < pairs[:, 1]).all() and len(np.unique(pairs, axis=0)) == len(pairs)
    assert 100 not in pairs and len(np.unique(pairs)) == 100
    nearest = np.linalg.norm(points[:100, None] - points[:100], axis=2).argsort(axis=1)[:, 1]
    found = set(map(tuple, pairs.tolist()))
    assert all((min(pair), max(pair)) in found for pair in enumerate(nearest.tolist()))


@pytest.fixture
def graph() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points with descriptors, pairs of neighbours, and masses."""
    chances = np.random.default_rng(3)
    points = chances.uniform(size=(80, 3))
    masses = chances.uniform(0.1, 1.0, size=80)
    return 0.7 * points[:, :2] + 0.1 * chances.normal(size=(80, 2)), neighbour_pairs(points), masses / masses.sum()


def as_sets(labels: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in np.unique(labels)}


def test_parts_are_those_of_the_paper(graph: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Against the definition: Int(C) as the longest edge of the minimum spanning tree of C."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import minimum_spanning_tree

    descriptors, pairs, _ = graph
    apart = np.linalg.norm(descriptors[pairs[:, 0]] - descriptors[pairs[:, 1]], axis=1)

    def inside(part: frozenset[int]) -> float:
        own = np.isin(pairs, list(part)).all(axis=1)
        edges = coo_matrix((apart[own], pairs[own].T), shape=(80, 80))
        tree = minimum_spanning_tree(edges).data
        return float(tree.max(initial=0.0)) + 0.3 / len(part)

    parts = [frozenset([index]) for index in range(80)]
    for one, two, length in sorted(zip(*pairs.T.tolist(), apart.tolist(), strict=True), key=lambda edge: edge[2]):
        first, second = (next(part for part in parts if index in part) for index in (one, two))
        if first != second and length <= min(inside(first), inside(second)):
            parts = [part for part in parts if part not in (first, second)] + [first | second]
    found = as_sets(segment_graph(80, pairs, apart, 0.3))
    assert found == set(parts) and 3 < len(found) < 60


@pytest.mark.parametrize("large", [1e-6, 0.05])
def test_joining_is_the_plain_algorithm(
    graph: tuple[np.ndarray, np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch, large: float
) -> None:
    """Against the nearest pair of all adjacent ones, found anew each time."""
    descriptors, pairs, masses = graph
    monkeypatch.setattr(groups, "_LARGE", large)
    monkeypatch.setattr(groups, "_ALIKE", 0.2)
    labels = np.arange(80)
    while True:
        best: tuple[float, int, int] = (np.inf, 0, 0)
        for one, two in {tuple(sorted(pair)) for pair in labels[pairs].tolist() if pair[0] != pair[1]}:
            means, weights = [], []
            for label in (one, two):
                weights.append(masses[labels == label].sum())
                means.append(masses[labels == label] @ descriptors[labels == label] / weights[-1])
            apart = np.linalg.norm(means[0] - means[1]) * min(1.0, min(weights) / large) ** 0.5
            best = min(best, (float(apart), one, two))
        if best[0] > 0.2:
            break
        labels[labels == best[2]] = best[1]
    found = join_parts(np.arange(80), pairs, descriptors, masses)
    assert as_sets(found) == as_sets(labels) and 1 < len(as_sets(found)) < 60


def test_codes_are_drawn_towards_the_mean_of_their_group() -> None:
    """Of more codes than are averaged at a time."""
    codes = torch.randn(20_000, 5, generator=torch.Generator().manual_seed(0)).half()
    numbers, before = torch.arange(20_000, dtype=torch.int32) % 4 - 1, codes.clone().float()
    average_groups(codes, numbers)
    for group in range(3):
        own = before[numbers == group]
        wanted = (own + own.mean(dim=0)) / 2
        torch.testing.assert_close(codes[numbers == group].float(), wanted, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(codes[numbers < 0].float(), before[numbers < 0])
    average_groups(codes[:1], torch.full((1,), -1))
