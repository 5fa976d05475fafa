"""The pretended GPU is strict where a real one is."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from pretend.ledger import counted
from pretend.tensors import PretendCuda, on_the_cpu, pretended


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


def test_generators_belong_to_a_device(cuda: torch.device) -> None:
    torch.rand(3, device=cuda, generator=torch.Generator(cuda).manual_seed(0))
    for place, generator in ((cuda, "cpu"), ("cpu", cuda)):
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(3, device=place, generator=torch.Generator(generator))


def test_products_are_half_under_autocast(
    cuda: torch.device, cuda_autocast: Callable[..., AbstractContextManager[None]]
) -> None:
    square = torch.rand(3, 3, device=cuda)
    with cuda_autocast():
        assert (square @ square).dtype == torch.float16 and (square + square).dtype == torch.float32
    assert (square @ square).dtype == torch.float32


def _train(device: str) -> torch.Tensor:
    """Two steps of a small network."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2).to(device)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        numbers = torch.arange(12.0).reshape(4, 3).to(device)
        layer(numbers).prod(dim=1).square().mean().backward()
        optimizer.step()
    return layer.weight.detach()


def test_whole_steps_are_those_of_the_cpu() -> None:
    expected = _train("cpu")
    with pretended("backward"), counted() as ledger:
        found = _train("cuda")
    assert isinstance(found, PretendCuda) and found.device.type == "cuda"
    torch.testing.assert_close(found.held, expected)
    assert ledger.launches["addmm"] == 2 and ledger.launches["_foreach_addcdiv_"] == 2
    assert not any(kind != "copy to the GPU" for _, kind in ledger.waits)


def test_devices_do_not_mix_in_steps_either() -> None:
    with pretended("backward") as device:
        there = torch.ones(3, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3)
        assert there.cpu().device.type == "cpu" and torch.ones(3).to(there).device == device
        with on_the_cpu():
            assert torch.ones(3).device.type == "cpu"


def test_large_tensors_may_have_shapes_only() -> None:
    with pretended("backward", most_values=100) as device:
        large = torch.zeros(10_000, 3, device=device)
        assert large.held.is_meta and not torch.zeros(9, device=device).held.is_meta  # type: ignore[attr-defined]
        weight = torch.nn.Parameter(torch.ones(3, 2, device=device))
        (large[large[:, 0] >= 0] @ weight).sum().backward()
        assert weight.grad is not None and weight.grad.shape == (3, 2)
        assert large.nonzero().shape == (30_000, 2) and float(large.max()) == 1.0
