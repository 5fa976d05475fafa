"""Adding, removing and copying Gaussians: the one place where parameters and optimiser state change their length."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from nerfstudio.engine.optimizers import Optimizers
from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.errors import ConfigError

OptimizersOfRun = Optimizers | Mapping[str, torch.optim.Optimizer]
"""Nerfstudio's optimisers, or torch's by the name of the parameter."""
Parameters = MutableMapping[str, Parameter] | torch.nn.ParameterDict
"""One tensor by name, each with a row for every Gaussian: those of :class:`f3rm_ext.splat.gaussians.Gaussians`."""


@dataclass(frozen=True)
class Change:
    """What one step did to the set of Gaussians, so that whatever is kept by row can follow."""

    before: int
    """Number of Gaussians before."""
    source: Int[Tensor, " gaussians"] | None = None
    """Row of the old set that every row of the new set comes from; None where the rows are what they were."""
    fresh: Bool[Tensor, " gaussians"] | None = None
    """Rows of the new set that were copied, moved or resized: their moments start at zero. None with `source`."""
    duplicated: int = 0
    """Gaussians that were given a copy."""
    split: int = 0
    """Gaussians that were replaced by two smaller ones."""
    pruned: int = 0
    """Gaussians that were removed."""
    relocated: int = 0
    """Dead Gaussians that were moved to a live one."""
    added: int = 0
    """Gaussians that were added by sampling."""
    opacities_reset: bool = False
    """Whether all opacities were lowered."""

    @property
    def rows_changed(self) -> bool:
        """Whether anything kept by row has to be carried over: neighbours, 3D filters, statistics."""
        return self.source is not None

    @property
    def after(self) -> int:
        """Number of Gaussians after."""
        return self.before if self.source is None else len(self.source)

    def carry(self, rows: Shaped[Tensor, "old *rest"], fresh: int | float | None = None) -> Shaped[Tensor, "new *rest"]:
        """Rows of the new set.

        Args:
            rows: something kept for every Gaussian of the old set.
            fresh: value for rows that were copied, moved or resized; None copies from their source.
        """
        if self.source is None or self.fresh is None:
            return rows
        carried = rows[self.source]
        if fresh is not None:
            carried[self.fresh] = fresh
        return carried

    @classmethod
    def keeping(cls, keep: Bool[Tensor, " gaussians"]) -> "Change":
        """The removal of all Gaussians but some.

        Args:
            keep: the ones that stay.
        """
        source = keep.nonzero().squeeze(-1)
        if len(source) == len(keep):
            return cls(len(keep))
        return cls(len(keep), source, torch.zeros_like(source, dtype=torch.bool), pruned=len(keep) - len(source))


def apply(
    change: Change, params: Parameters, optimizers: OptimizersOfRun, values: Mapping[str, Tensor] | None = None
) -> None:
    """Gives parameters and optimiser state the rows of the new set.

    State of any kind follows, as long as what it keeps by Gaussian has a row for each: dense moments, quantised ones
    and their scales. Its dtype stays what it is. Parameters are replaced, not resized, as graphs still alive may
    refer to the old ones.

    Args:
        change: which rows.
        params: replaced by name.
        optimizers: of these parameters; a parameter without one is fine.
        values: parameters whose values are not just those of their source.

    Raises:
        ConfigError: no Gaussian would be left; nothing is changed then.
    """
    if change.after == 0:
        raise ConfigError(
            f"All {change.before} Gaussians would be removed, since every one is too transparent or too large: lower "
            "the opacity below which Gaussians are pruned, or check that poses and images fit together."
        )
    if not change.rows_changed:
        return
    for name in list(params.keys()):
        old = params[name]
        with torch.no_grad():
            value = values[name] if values and name in values else change.carry(old.detach())
        params[name] = replacement = Parameter(value, requires_grad=old.requires_grad)
        rebind(name, old, replacement, optimizers, change)


def named(optimizers: OptimizersOfRun) -> Mapping[str, torch.optim.Optimizer]:
    """Torch's optimisers by the name of the parameter."""
    return optimizers.optimizers if isinstance(optimizers, Optimizers) else optimizers


def rebind(
    name: str, old: Parameter, new: Parameter, optimizers: OptimizersOfRun, change: Change | None = None
) -> None:
    """Has an optimiser update another parameter.

    Args:
        name: of the parameter.
        old: the one it updated so far; forgotten by nerfstudio's optimisers too, which would keep its memory.
        new: the one it updates from now on.
        optimizers: of the run.
        change: which rows of the state the new one has; all by default.
    """
    by_name = named(optimizers)
    if isinstance(optimizers, Optimizers) and name in optimizers.parameters:
        optimizers.parameters[name] = [new if item is old else item for item in optimizers.parameters[name]]
    if name not in by_name:
        return
    optimizer = by_name[name]
    for group in optimizer.param_groups:
        group["params"] = [new if item is old else item for item in group["params"]]
    state = optimizer.state.pop(old, None)
    if state:
        if change is not None:
            _carry_state(state, change)
        optimizer.state[new] = state


def zero_moments(parameter: Parameter, optimizer: torch.optim.Optimizer | None) -> None:
    """Forgets the moments of a parameter, if it is optimised; the count of steps stays."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    for value in _by_row(state, len(parameter)).values():
        value.zero_()


def _by_row(state: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == count and key != "step"
    }


def _carry_state(state: dict[str, Any], change: Change) -> None:
    for key, value in _by_row(state, change.before).items():
        state[key] = change.carry(value, fresh=0)
