"""Tensors without values: what depends on values is answered as the largest case."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from f3rm_ext.planning.shapes import shapes_only


def test_masks_select_everything() -> None:
    with shapes_only():
        values, mask = torch.rand(5, 3), torch.rand(5) > 0.5
        assert values[mask].shape == (5, 3)
        assert mask.nonzero().shape == (5, 1)
        assert torch.masked_select(values, values > 0).shape == (15,)
        assert values.unique().shape == (15,)
        values[mask] = torch.zeros(5, 3)
        grid = torch.rand(4, 5, 3)
        assert grid[torch.rand(4, 5) > 0.5].shape == (20, 3)


def test_numbers_that_are_read_are_one() -> None:
    with shapes_only():
        values = torch.rand(5)
        assert float(values.max()) == 1.0 and int(values.argmax()) == 1
        assert bool((values > 2).any()) and torch.equal(values, values)


def test_small_tensors_from_outside_keep_their_values() -> None:
    width = torch.tensor([[640]])
    with shapes_only():
        assert int(width[0] // 2) == 320
        assert not isinstance(width + 1, FakeTensor)
        assert isinstance(torch.zeros(3), FakeTensor)
        assert isinstance(torch.zeros(3) + width, FakeTensor)


def test_gradients_flow() -> None:
    with shapes_only():
        weight = torch.nn.Parameter(torch.rand(1 << 20, 64))
        (weight[torch.zeros(7, dtype=torch.int64)] ** 2).sum().backward()
        assert weight.grad is not None and weight.grad.shape == weight.shape
        assert isinstance(weight.grad, FakeTensor)
