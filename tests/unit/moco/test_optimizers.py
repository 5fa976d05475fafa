"""LARS by hand in float64, and the rates of the schedule."""

import torch

from f3rm_ext.moco.optimizers import Lars, make_optimizer


def test_lars_is_the_formula() -> None:
    weight = torch.nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64))
    bias = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    optimizer = Lars([weight, bias], lr=0.5, weight_decay=0.1, momentum=0.9, trust=0.01)
    matrix, vector = weight.detach().clone(), bias.detach().clone()
    speed, drift = torch.zeros_like(matrix), torch.zeros_like(vector)
    for step in range(3):
        weight.grad = torch.full((2, 2), 1.0 + step, dtype=torch.float64)
        bias.grad = torch.full((2,), 2.0, dtype=torch.float64)
        optimizer.step()
        decayed = 1.0 + step + 0.1 * matrix
        speed = 0.9 * speed + 0.01 * matrix.norm() / decayed.norm() * decayed
        drift = 0.9 * drift + 2.0
        matrix, vector = matrix - 0.5 * speed, vector - 0.5 * drift
    torch.testing.assert_close(weight.detach(), matrix)
    torch.testing.assert_close(bias.detach(), vector)


def test_lars_moves_a_layer_of_zeros() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.ones(2, 2)
    Lars([weight], lr=0.1).step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), -0.1))


def test_frozen_parameters_are_left_out() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    for name, kind in (("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW), ("lars", Lars)):
        optimizer = make_optimizer(name, layer.parameters(), 0.1, 0.0)  # type: ignore[arg-type]
        assert isinstance(optimizer, kind) and len(optimizer.param_groups[0]["params"]) == 1
