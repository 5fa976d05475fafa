"""Base class of densification strategies; by itself it prunes only on request."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from f3rm_ext.engine.ranks import own_share, rank
from f3rm_ext.splat.densify.ops import Change, Parameters, RunOptimizers, apply
from f3rm_ext.splat.densify.options import DensifyOptions
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.rasterize import Rasterization


class Densifier:
    """Adds and removes Gaussians while they are optimised; this base class keeps their number.

    A training step calls :meth:`step_pre_backward` after rendering and :meth:`step_post_backward` after the optimisers'
    step. Pixels outside a mask have no gradient, so they cause no growth. A Gaussian in view counts as seen whether
    its pixels lie inside or outside the mask.

    :meth:`state_dict` holds the complete state, including random numbers, so a resumed run gives the same result.

    With several processes, each renders another image. Their statistics are added up before each round, and random
    numbers are the same on all ranks, so that all hold the same Gaussians. Where the Gaussians are divided over the
    processes (`sharded`), each decides about its own: gradients of all images arrive there, random numbers differ, and
    the limit on the number of Gaussians is divided too.
    """

    absgrad = False
    """Whether the strategy needs ``rasterize(..., absgrad=True)``."""

    def __init__(self, options: DensifyOptions, last_step: int | None = None, sharded: bool = False) -> None:
        """Starts without statistics.

        Args:
            last_step: step from which no Gaussians are added, if earlier than the options say.
        """
        self.options = options
        if sharded and options.cap is not None:
            self.options = replace(options, max_gaussians=max(1, own_share(options.cap)))
        self.last_step = last_step
        self.sharded = sharded
        self.generator = torch.Generator().manual_seed(options.seed)
        self._mix_in_rank()

    def losses(self, gaussians: Gaussians) -> dict[str, Tensor]:
        """Returns losses by name that belong to the strategy."""
        return {}

    def step_pre_backward(self, step: int, rasterization: Rasterization) -> None:
        """Prepares for the backward pass."""

    def step_post_backward(
        self, step: int, rasterization: Rasterization, params: Parameters, optimizers: RunOptimizers
    ) -> Change | None:
        """Gathers statistics and, in the steps of a round, changes the set of Gaussians.

        Args:
            params: replaced where rows change.

        Returns:
            What changed the rows, if anything did.

        Raises:
            ConfigError: no Gaussian would be left.
        """

    def prune(self, remove: Bool[Tensor, " gaussians"], params: Parameters, optimizers: RunOptimizers) -> Change | None:
        """Removes Gaussians outside the schedule; see :func:`apply`. Returns the change; None if nothing is to go."""
        change = Change.removal(~remove)
        if change is not None:
            apply(change, params, optimizers)
            self.follow(change)
        return change

    def follow(self, change: Change) -> None:
        """Carries the statistics over to a changed set of Gaussians."""

    def gather_statistics(self) -> None:
        """Brings the statistics of all processes to rank 0, for a checkpoint. Every rank must call it."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as tensors."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; of divided Gaussians it holds the random numbers of rank 0."""
        self.generator.set_state(state["generator"].cpu())
        self._mix_in_rank()

    def _mix_in_rank(self) -> None:
        if self.sharded and rank():
            self.generator.manual_seed(int(torch.randint(2**40, (), generator=self.generator)) + rank())

    @contextmanager
    def random_numbers(self, device: torch.device) -> Iterator[None]:
        """Makes torch draw from this object's random numbers; restores the global generators afterwards."""
        seed = int(torch.randint(2**62, (1,), generator=self.generator))
        on_gpu = device.type == "cuda"
        with torch.random.fork_rng(devices=[device] if on_gpu else []):
            # torch.manual_seed would also seed the other GPUs, which fork_rng does not restore.
            torch.default_generator.manual_seed(seed)
            if on_gpu:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            yield

    def _stop(self, planned: int) -> int:
        return planned if self.last_step is None else min(planned, self.last_step)
