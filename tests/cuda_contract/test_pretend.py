"""The pretended GPU is strict where a real one is."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch


def test_values_travel(cuda: torch.device) -> None:
    numbers = torch.arange(6.0).reshape(2, 3)
    there = numbers.to(cuda)
    assert there.device == cuda and (there * 2).device == cuda and there.cpu().device.type == "cpu"
    there += torch.ones(3, device=cuda)
    there[0] = 0.0
    torch.testing.assert_close(there.cpu(), torch.tensor([[0.0, 0.0, 0.0], [4.0, 5.0, 6.0]]))
    assert there.sum().item() == 15.0


def test_devices_do_not_mix(cuda: torch.device) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=cuda) + torch.ones(3)
    with pytest.raises(TypeError, match="to numpy"):
        torch.ones(3, device=cuda).numpy()


def test_products_are_half_under_autocast(
    cuda: torch.device, cuda_autocast: Callable[..., AbstractContextManager[None]]
) -> None:
    square = torch.rand(3, 3, device=cuda)
    with cuda_autocast():
        assert (square @ square).dtype == torch.float16 and (square + square).dtype == torch.float32
    assert (square @ square).dtype == torch.float32
