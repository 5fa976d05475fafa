"""Adam in one fused kernel, on CUDA and on the CPU, and a decay that fits the length of the run."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import ExponentialDecaySchedulerConfig

from f3rm_ext.engine.protocols import FitsOptimizers


@dataclass
class FusedAdamOptimizerConfig(AdamOptimizerConfig):
    """Adam in one fused kernel, whose step reads and writes every parameter once."""

    lr: float = 1e-2
    """Learning rate, > 0."""
    eps: float = 1e-15
    """Term added to the root of the second moment; tiny, because most hash entries have tiny gradients."""
    weight_decay: float = 0.0
    """Decay of the parameters towards zero, ≥ 0."""

    def setup(self, params: Any) -> torch.optim.Optimizer:
        """Returns the optimiser; torch's default Adam if it has no fused kernel for the parameters' device."""
        params = list(params)  # a generator would be used up by the first attempt
        options: dict[str, Any] = {"lr": self.lr, "eps": self.eps, "weight_decay": self.weight_decay}
        try:
            return torch.optim.Adam(params, fused=True, **options)
        except RuntimeError:  # torch < 2.4 on the CPU
            return torch.optim.Adam(params, **options)


@dataclass
class RunDecaySchedulerConfig(ExponentialDecaySchedulerConfig):
    """Exponential decay over the whole run, however many steps it has."""

    max_steps: int = 0
    """Steps after which the rate is `lr_final`; 0 takes the length of the schedule, so that short runs decay fully too.
    That length is --schedule-steps, or --max-num-iterations if --schedule-steps is 0."""

    def fit(self, num_steps: int) -> None:
        """Fills in the length of the schedule if none was given."""
        self.max_steps = self.max_steps or num_steps


def fit_optimizers(groups: dict[str, Any], config: Any) -> None:
    """Completes the configurations of optimisers and schedulers, in place, by the options of the run.

    Args:
        groups: of each parameter group, ``optimizer`` and ``scheduler``.
    """
    for group in groups.values():
        if isinstance(group["scheduler"], RunDecaySchedulerConfig):
            group["scheduler"].fit(schedule_length(config))
    model = getattr(config.pipeline, "model", None)
    if isinstance(model, FitsOptimizers):
        model.fit_optimizers(groups)


def scale_rates(groups: Mapping[str, Any], factors: Mapping[str, float]) -> dict[str, Any]:
    """Returns configurations of optimisers and schedulers with other learning rates.

    Args:
        groups: of each parameter group, ``optimizer`` and ``scheduler``.
        factors: of the learning rates, by parameter group; 1 where missing.
    """
    groups = deepcopy(dict(groups))
    for name in groups.keys() & factors.keys():
        groups[name]["optimizer"].lr *= factors[name]
        if isinstance(groups[name]["scheduler"], ExponentialDecaySchedulerConfig):
            scheduler = groups[name]["scheduler"]
            scheduler.lr_final = scheduler.lr_final and scheduler.lr_final * factors[name]
    return groups


def schedule_length(config: Any) -> int:
    """Returns the number of steps of the whole schedule; a run may stop before its end.

    Args:
        config: of the trainer; ``max_num_iterations`` counts if ``schedule_steps`` is 0 or missing.
    """
    return getattr(config, "schedule_steps", 0) or config.max_num_iterations
