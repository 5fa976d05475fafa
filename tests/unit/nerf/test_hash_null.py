"""The null backend of the hash grid: the memory of the torch backend, and gradients of the right tensors."""

import pytest
import torch

from f3rm_ext.memory.trace import AllocationTracker, tracing
from f3rm_ext.nerf.hash_grid import HashGrid


@pytest.mark.parametrize("count", [500, 20_000])
def test_it_takes_no_less_than_torch_and_not_much_more(count: int) -> None:
    peaks = []
    for trace in (AllocationTracker(), tracing("cpu")):
        grid, points = HashGrid(8, 2, 32, 256, 12, backend="torch"), torch.rand(count, 3)
        with trace as tracker:
            tracker.label([points, *grid.parameters()], "parameters")
            tracker.reset_peak()
            points = points + 0.0
            grid(points).sum().backward()
        peaks.append(sum(tracker.peak.values()))
    assert peaks[0] < peaks[1] < 2.5 * peaks[0]


@pytest.mark.parametrize("meta", [False, True])
def test_frozen_grids_have_no_gradient_of_the_table(meta: bool) -> None:
    """As for normals, which need the gradient of the points alone."""
    with torch.device("meta") if meta else tracing("cuda"):
        grid = HashGrid(3, 2, 4, 16, 9)
        points = torch.zeros(5, 3, requires_grad=True)
        features = grid(points, frozen=True)
        features.sum().backward()
        assert features.shape == (5, 6) and points.grad is not None and grid.table.grad is None
        grid(points).sum().backward()
    assert grid.table.grad is not None and grid.table.grad.shape == grid.table.shape
