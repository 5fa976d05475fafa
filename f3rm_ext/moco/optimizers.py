"""Optimisers of the papers: SGD (v2), LARS (v3 with ResNets), AdamW (v3 with ViTs)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Parameter

from f3rm_ext.moco.options import OptimizerName

MOMENTUM = 0.9
TRUST = 0.001


class Lars(torch.optim.Optimizer):
    """SGD with momentum whose step is scaled layer by layer (LARS, arXiv 1708.03888).

    The gradient g of a tensor θ, with weight decay λ, becomes trust · ‖θ‖ / ‖g + λθ‖ · (g + λθ) before the momentum.
    Tensors of one dimension, such as biases and batch norms, have neither decay nor scale, as in MoCo v3.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = MOMENTUM,
        trust: float = TRUST,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes a step; there is no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                step = parameter.grad
                if parameter.dim() > 1:
                    step = step.add(parameter, alpha=group["weight_decay"])
                    size, length = parameter.norm(), step.norm()
                    scale = torch.where((size > 0) & (length > 0), group["trust"] * size / length, 1.0)
                    step = step * scale
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                state["momentum_buffer"].mul_(group["momentum"]).add_(step)
                parameter.add_(state["momentum_buffer"], alpha=-group["lr"])


def make_optimizer(
    name: OptimizerName, parameters: Iterable[Parameter], learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=learning_rate, weight_decay=weight_decay)
    if name == "lars":
        return Lars(trained, lr=learning_rate, weight_decay=weight_decay)
    return torch.optim.SGD(trained, lr=learning_rate, momentum=MOMENTUM, weight_decay=weight_decay)
