"""Adding, removing and copying Gaussians: the only module that changes the length of parameters and optimiser state."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from nerfstudio.engine.optimizers import Optimizers
from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.errors import ConfigError

RunOptimizers = Optimizers | Mapping[str, torch.optim.Optimizer]
"""Nerfstudio's optimisers, or torch's by name of the parameter."""
Parameters = MutableMapping[str, Parameter] | torch.nn.ParameterDict
"""Tensors of :class:`f3rm_ext.splat.gaussians.Gaussians` by name, with one row per Gaussian."""


@dataclass(frozen=True)
class Change:
    """Change of the set of Gaussians in one step, to apply to everything with one row per Gaussian."""

    old_count: int
    """Number of Gaussians before the change."""
    source: Int[Tensor, " gaussians"]
    """Row of the old set from which each row of the new set comes."""
    fresh: Bool[Tensor, " gaussians"]
    """Rows of the new set that were copied, moved or resized; their moments start at zero."""

    @property
    def new_count(self) -> int:
        """Number of Gaussians after the change."""
        return len(self.source)

    def carry(self, rows: Shaped[Tensor, "old *rest"], fresh: int | float | None = None) -> Shaped[Tensor, "new *rest"]:
        """Returns the rows of the new set.

        Args:
            fresh: value for rows that were copied, moved or resized; None copies that of their source.
        """
        carried = rows[self.source]
        if fresh is not None:
            carried[self.fresh] = fresh
        return carried

    @classmethod
    def removal(cls, keep: Bool[Tensor, " gaussians"]) -> "Change | None":
        """Creates the removal of all other Gaussians; None if there are no others."""
        source = keep.nonzero().squeeze(-1)
        if len(source) == len(keep):
            return None
        return cls(len(keep), source, torch.zeros_like(source, dtype=torch.bool))


def apply(
    change: Change, params: Parameters, optimizers: RunOptimizers, values: Mapping[str, Tensor] | None = None
) -> None:
    """Applies a change to parameters and optimiser state.

    Any state tensor with one row per Gaussian follows: dense moments, quantised moments and their scales. Dtypes are
    kept. Parameters are replaced, not resized, since live graphs may refer to the old ones.

    Args:
        params: replaced by name.
        values: new values by name, for parameters whose rows are not copies of their source.

    Raises:
        ConfigError: no Gaussian would be left; nothing is changed then.
    """
    if change.new_count == 0:
        raise ConfigError(
            f"All {change.old_count} Gaussians would be removed, since every one is too transparent or too large: "
            "lower the opacity below which Gaussians are pruned, or check that poses and images fit together."
        )
    for name in list(params):
        old = params[name]
        with torch.no_grad():
            value = values[name] if values and name in values else change.carry(old.detach())
        params[name] = replacement = Parameter(value, requires_grad=old.requires_grad)
        _rebind(name, old, replacement, optimizers, change)


def optimizers_by_name(optimizers: RunOptimizers) -> Mapping[str, torch.optim.Optimizer]:
    """Returns torch's optimisers by name of the parameter."""
    return optimizers.optimizers if isinstance(optimizers, Optimizers) else optimizers


def _rebind(name: str, old: Parameter, new: Parameter, optimizers: RunOptimizers, change: Change) -> None:
    """Replaces a parameter in its optimiser, and applies a change to its state. Nerfstudio's optimisers drop the old
    one too, which frees its memory."""
    if isinstance(optimizers, Optimizers) and name in optimizers.parameters:
        optimizers.parameters[name] = [new if item is old else item for item in optimizers.parameters[name]]
    optimizer = optimizers_by_name(optimizers).get(name)
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [new if item is old else item for item in group["params"]]
    state = optimizer.state.pop(old, None)
    if state:
        for key, value in _row_tensors(state, change.old_count).items():
            state[key] = change.carry(value, fresh=0)
        optimizer.state[new] = state


def zero_moments(parameter: Parameter, optimizer: torch.optim.Optimizer | None) -> None:
    """Sets the moments of a parameter to zero, if it has an optimiser; keeps the count of steps."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    for value in _row_tensors(state, len(parameter)).values():
        value.zero_()


def _row_tensors(state: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == count and key != "step"
    }
