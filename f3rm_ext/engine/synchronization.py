"""Optimisers of a data-parallel run: they add up the gradients of all ranks before each step."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from nerfstudio.engine.optimizers import Optimizers
from torch.cuda.amp.grad_scaler import GradScaler
from torch.nn import Parameter

from f3rm_ext.engine.protocols import GathersGradients
from f3rm_ext.engine.ranks import Ranks


def named_parameters(optimizers: Optimizers) -> Iterator[tuple[str, Parameter]]:
    """Yields the parameters that optimisers train, with a name: that of the group and the place in it."""
    for name, optimizer in optimizers.optimizers.items():
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        yield from ((f"{name}[{place}]" if len(params) > 1 else name, item) for place, item in enumerate(params))


class SynchronizedOptimizers(Optimizers):
    """Nerfstudio's optimisers, with gradients summed over all ranks.

    torch's DDP would do it in the backward pass, but it needs a fixed set of parameters, which densification replaces,
    and dense gradients, which spherical harmonics do not have. Losses are weighted so that the sum is the gradient of
    the mean over the batch of all ranks, see :class:`f3rm_ext.query.pipeline.FeaturePipeline`.

    Args:
        message: a number ≥ 0 for all ranks, such as the signal that asks for an end.
        sharded: whether every rank has parameters of its own, whose gradients are complete already.
    """

    def __init__(
        self,
        config: dict[str, Any],
        param_groups: dict[str, list[Parameter]],
        ranks: Ranks,
        message: Callable[[], int],
        sharded: bool = False,
    ) -> None:
        super().__init__(config, param_groups)
        self._ranks, self._message, self._sharded = ranks, message, sharded
        self.heard = 0
        """The largest message of all ranks in the last step."""

    def optimizer_scaler_step_some(self, grad_scaler: GradScaler, param_groups: list[str]) -> None:
        """Adds up the gradients of some groups, then steps their optimisers; called once in every step."""
        if self._sharded:
            self.heard = max(number for (number,) in self._ranks.share([self._message()]))
        else:
            optimizers = [self.optimizers[name] for name in param_groups]
            self._synchronize(
                [(each, item) for each in optimizers for group in each.param_groups for item in group["params"]]
            )
        super().optimizer_scaler_step_some(grad_scaler, param_groups)

    def _synchronize(self, members: list[tuple[torch.optim.Optimizer, Parameter]]) -> None:
        shared = self._ranks.share([self._message(), *(int(parameter.grad is not None) for _, parameter in members)])
        self.heard, *present = (max(column) for column in zip(*shared, strict=True))
        dense = []
        for (optimizer, parameter), has_gradient in zip(members, present, strict=True):
            # Without a gradient on any rank, such as proposal networks between updates, a parameter keeps still.
            if not has_gradient:
                continue
            if isinstance(optimizer, GathersGradients) and optimizer.gather_gradients(parameter, self._ranks):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dense.append(parameter)
        self._ranks.sum_gradients(dense)
