"""Neighbours: both searches against all distances in numpy, odd sets, the schedule and changes of topology."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from f3rm_ext.splat.regularization import neighbours as module
from f3rm_ext.splat.regularization.neighbours import NeighbourIndex, nearest_neighbours


def points(n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, 3, generator=torch.Generator().manual_seed(seed))


def by_definition(means: torch.Tensor, count: int) -> np.ndarray:
    array = means.double().numpy()
    return np.stack([np.argsort(((array - point) ** 2).sum(1), kind="stable")[:count] for point in array])


@pytest.fixture(params=["tree", "blocks"])
def search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the tests that ask for it run with the tree and with the search of other devices."""
    if request.param == "blocks":
        monkeypatch.setattr(module, "_by_tree", module.search_in_blocks)


@pytest.mark.usefixtures("search")
def test_agrees_with_all_distances() -> None:
    means = points(150)
    found = nearest_neighbours(means, 16)
    assert found.dtype == torch.int32 and found.shape == (150, 16)
    np.testing.assert_array_equal(found.numpy(), by_definition(means, 16))


@pytest.mark.usefixtures("search")
def test_coinciding_centres_stand_at_the_head_of_their_own_rows() -> None:
    means = points(3).repeat_interleave(6, dim=0)
    found = nearest_neighbours(means, 4)
    assert torch.equal(found[:, 0], torch.arange(18, dtype=torch.int32))
    for row in found.tolist():
        assert len(set(row)) == 4
        assert {place // 6 for place in row} == {row[0] // 6}


@pytest.mark.usefixtures("search")
@pytest.mark.parametrize("n", [0, 1, 2, 4, 5])
def test_missing_neighbours_are_minus_one(n: int) -> None:
    found = nearest_neighbours(points(n), 5)
    assert found.shape == (n, 5)
    assert torch.equal((found >= 0).sum(1), torch.full((n,), min(n, 5)))
    assert (found[:, n:] == -1).all()


@pytest.mark.usefixtures("search")
def test_what_is_not_finite_is_nobodys_neighbour() -> None:
    means = points(20)
    means[3, 1], means[7, 0] = torch.nan, torch.inf
    found = nearest_neighbours(means, 4)
    assert found[3].tolist() == [3, -1, -1, -1] and found[7].tolist() == [7, -1, -1, -1]
    others = torch.ones(20, dtype=torch.bool)
    others[[3, 7]] = False
    assert not torch.isin(found[others], torch.tensor([3, 7, -1])).any()
    places = others.nonzero().squeeze(1).numpy()
    np.testing.assert_array_equal(found[others].numpy(), places[by_definition(means[others], 4)])


@pytest.fixture
def searches(watch_calls: Callable[..., list[Any]]) -> list[Any]:
    return watch_calls(module, "nearest_neighbours")


@pytest.mark.parametrize(("first", "dates"), [(101, [101, 151, 201, 251]), (130, [130, 151, 201, 251])])
def test_searches_on_schedule_and_at_first_use(first: int, dates: list[int], searches: list[Any]) -> None:
    index, means, found = NeighbourIndex(3, start=101, every=50), points(10), []
    for step in range(first, 260):
        before = len(searches)
        index.at(step, means)
        found += [step] * (len(searches) > before)
    assert found == dates


def test_a_resumed_index_does_not_search_again(searches: list[Any]) -> None:
    first, means = NeighbourIndex(3, start=101, every=50), points(10)
    kept = first.at(120, means)
    second = NeighbourIndex(3, start=101, every=50)
    second.load_state_dict(first.state_dict())
    # The Gaussians have moved: a search would find others.
    assert torch.equal(second.at(140, points(10, seed=1)), kept)
    assert len(searches) == 1
    assert not torch.equal(second.at(151, points(10, seed=1)), kept)


def test_pruning_crosses_out_neighbours() -> None:
    means = points(60)
    index = NeighbourIndex(8)
    before = index.at(7001, means).clone()
    keep = torch.rand(60, generator=torch.Generator().manual_seed(4)) < 0.8
    kept = keep.nonzero().squeeze(1)
    index.after_change(kept)
    after = index.at(7002, means[keep])
    places = {int(old): new for new, old in enumerate(kept)}
    for new, old in enumerate(kept):
        assert after[new].tolist() == [places.get(int(j), -1) for j in before[old]]
    assert (after == -1).any(), "the case tests nothing"
    assert after.dtype == torch.int32


def test_reordering_is_followed_twice() -> None:
    means = points(30)
    index = NeighbourIndex(5)
    index.at(7001, means)
    for seed in (1, 2):
        order = torch.randperm(len(means), generator=torch.Generator().manual_seed(seed))
        means = means[order]
        index.after_change(order)
    assert torch.equal(index.at(7002, means), nearest_neighbours(means, 5))


@pytest.mark.parametrize("change", [[0, 1, 2, 2], [0, 1, -1], None])
def test_growth_makes_the_next_use_search(change: list[int] | None, searches: list[Any]) -> None:
    """Also a change that nobody told of."""
    index = NeighbourIndex(2)
    index.at(7001, points(3))
    if change is not None:
        index.after_change(torch.tensor(change))
    count = 4 if change is None else len(change)
    assert len(index.at(7002, points(count))) == count and len(searches) == 2
