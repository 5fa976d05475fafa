"""Adam in one fused kernel, on CUDA and on the CPU; and a decay that fits the length of the run."""

from dataclasses import dataclass
from typing import Any

import torch
from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import ExponentialDecaySchedulerConfig


@dataclass
class FusedAdamOptimizerConfig(AdamOptimizerConfig):
    """Adam whose step reads and writes every table once; see benchmarks/ for what that saves."""

    lr: float = 1e-2
    """Learning rate, > 0."""
    eps: float = 1e-15
    """Added to the root of the second moment; tiny, since most hash entries have tiny gradients."""

    def setup(self, params: Any) -> torch.optim.Optimizer:
        """The optimiser; the plain one where torch has no fused kernel for these parameters' device."""
        params = list(params)
        options: dict[str, Any] = {"lr": self.lr, "eps": self.eps, "weight_decay": self.weight_decay}
        try:
            return torch.optim.Adam(params, fused=True, **options)
        except RuntimeError:  # torch < 2.4 on the CPU
            return torch.optim.Adam(params, **options)


@dataclass
class RunDecaySchedulerConfig(ExponentialDecaySchedulerConfig):
    """Exponential decay over the run, however many steps it has."""

    max_steps: int = 0
    """Steps after which the rate is `lr_final`; 0 means --schedule-steps, or --max-num-iterations where that is 0, so
    that short runs end sharp too."""

    def fit(self, num_steps: int) -> None:
        """Fills in the length of the run where none was given.

        Args:
            num_steps: steps of the whole run, :func:`schedule_length`.
        """
        self.max_steps = self.max_steps or num_steps


def schedule_length(config: Any) -> int:
    """Steps of the whole schedule of a run, of which it may do only a part.

    Args:
        config: the trainer's; ``schedule_steps`` 0, or none, means ``max_num_iterations``.
    """
    return getattr(config, "schedule_steps", 0) or config.max_num_iterations
