"""Adam in one fused kernel, on CUDA and on the CPU."""

from dataclasses import dataclass
from typing import Any

import torch
from nerfstudio.engine.optimizers import AdamOptimizerConfig


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
        options = {"lr": self.lr, "eps": self.eps, "weight_decay": self.weight_decay}
        try:
            return torch.optim.Adam(params, fused=True, **options)
        except RuntimeError:  # torch < 2.4 on the CPU
            return torch.optim.Adam(params, **options)
