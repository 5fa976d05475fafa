"""The search in boxes against the tree, on sets that are easy and on sets that are not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial import KDTree
from torch import Tensor

from f3rm_ext.splat.regularization import block_search
from f3rm_ext.splat.regularization.block_search import search_in_blocks

SIZES = [(1, 1), (2, 2), (64, 16), (65, 16), (200, 200), (500, 300), (1000, 1), (3001, 16)]
"""Points and neighbours."""


def cube(n: int) -> Tensor:
    return torch.rand(n, 3, generator=torch.Generator().manual_seed(n))


def uneven(n: int) -> Tensor:
    """Clumps of very different density, some far away: neighbours of the few lie many boxes off."""
    generator = torch.Generator().manual_seed(n)
    widths = 10.0 ** torch.randint(-3, 2, (n, 1), generator=generator)
    return torch.randn(n, 3, generator=generator) * widths + torch.randint(0, 3, (n, 1), generator=generator) * 7.0


def sheet(n: int) -> Tensor:
    return cube(n) * torch.tensor([1.0, 1.0, 0.0])


def check(means: Tensor, count: int) -> None:
    found = search_in_blocks(means, count)
    assert found.dtype == torch.int32 and found.shape == (len(means), count)
    points = means.double().numpy()
    expected, _ = KDTree(points).query(points, k=np.arange(1, count + 1))
    distances = np.linalg.norm(points[:, None] - points[found.numpy()], axis=2)
    # By distance, since points at equal distance may come in any order.
    np.testing.assert_allclose(distances, expected, rtol=1e-5, atol=1e-7)
    assert (found.sort(dim=1).values.diff(dim=1) > 0).all(), "a neighbour twice"


@pytest.mark.parametrize("make", [cube, uneven, sheet])
@pytest.mark.parametrize(("n", "count"), SIZES)
def test_against_the_tree(make: type, n: int, count: int) -> None:
    check(make(n), count)


def test_points_that_coincide() -> None:
    found = search_in_blocks(torch.zeros(500, 3), 8)
    assert (found.sort(dim=1).values.diff(dim=1) > 0).all() and int(found.max()) < 500


@pytest.mark.parametrize("elements", [1, 20_000])
def test_chunks(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_search, "ELEMENTS", elements)
    check(uneven(700), 5)


def test_points_go_on_one_by_one(monkeypatch: pytest.MonkeyPatch, watch_calls: Callable[..., Any]) -> None:
    monkeypatch.setattr(block_search, "FIRST", 1)
    monkeypatch.setattr(block_search, "LAST", 2)
    searches = watch_calls(block_search, "_nearest")
    check(uneven(2000), 16)
    sizes = [call.args[0].shape[1] for call in searches]
    assert sizes[0] > 32 and sizes[-1] == 1
