"""What every strategy of growth and pruning does; by itself it only prunes when told to."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor

from f3rm_ext.splat.densify.ops import Change, OptimizersOfRun, Parameters, apply
from f3rm_ext.splat.densify.options import DensifyOptions


@runtime_checkable
class Screen(Protocol):
    """What strategies look at: part of :class:`f3rm_ext.splat.rasterize.Rendered`."""

    colors: Tensor
    """(h, w, channels); its size only."""
    means2d: Tensor
    """(gaussians, 2), pixels."""
    radii: Tensor
    """(gaussians,), pixels; 0 where not visible."""


class Densifier:
    """Adds and removes Gaussians while they are optimised; this base leaves their number alone.

    A training step calls :meth:`before_backward` after rendering and :meth:`after_backward` after the optimisers'
    step. Pixels that a mask leaves out of the loss have no gradient, so they make nothing grow; a Gaussian seen both
    inside and outside of masks counts as seen in either case.

    Everything it has in memory is in :meth:`state_dict`, its random numbers included: a resumed run goes the same way.
    """

    absgrad = False
    """Whether it needs ``rasterize(..., absgrad=True)``."""

    def __init__(self, options: DensifyOptions, last_step: int | None = None) -> None:
        """Starts without statistics.

        Args:
            options: of densification.
            last_step: step from which the number of Gaussians stays, if earlier than the options say.
        """
        self.options = options
        self.last_step = last_step
        self.generator = torch.Generator().manual_seed(options.seed)

    def before_backward(self, step: int, rendered: Screen) -> None:
        """Prepares what has to be known after the backward pass.

        Args:
            step: of the training, from 0.
            rendered: what this step rendered.
        """

    def after_backward(self, step: int, rendered: Screen, params: Parameters, optimizers: OptimizersOfRun) -> Change:
        """Gathers statistics and, when it is time, changes the set of Gaussians.

        Args:
            step: of the training, from 0.
            rendered: what this step rendered, after the backward pass.
            params: of the Gaussians; replaced where rows change.
            optimizers: of these.

        Returns:
            What was done.

        Raises:
            ConfigError: No Gaussian would be left.
        """
        return Change(len(params["means"]))

    def prune(self, mask: Bool[Tensor, " gaussians"], params: Parameters, optimizers: OptimizersOfRun) -> Change:
        """Removes Gaussians outside of the schedule.

        Args:
            mask: those to remove.
            params: of the Gaussians; replaced.
            optimizers: of these.

        Returns:
            What was done.

        Raises:
            ConfigError: No Gaussian would be left; nothing is changed then.
        """
        change = Change.keeping(~mask)
        apply(change, params, optimizers)
        self.follow(change)
        return change

    def follow(self, change: Change) -> None:
        """Carries the statistics over to another set of Gaussians.

        Args:
            change: that somebody else made.
        """

    def state_dict(self) -> dict[str, Any]:
        """All it remembers, as tensors."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another one was."""
        self.generator.set_state(state["generator"].cpu())

    @contextmanager
    def random_numbers(self, device: torch.device) -> Iterator[None]:
        """Has torch draw from this object's random numbers, leaving those of everybody else as they were."""
        seed = int(torch.randint(2**62, (1,), generator=self.generator))
        on_gpu = device.type == "cuda"
        with torch.random.fork_rng(devices=[device] if on_gpu else []):
            torch.default_generator.manual_seed(seed)
            if on_gpu:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            yield

    def _stop(self, planned: int) -> int:
        return planned if self.last_step is None else min(planned, self.last_step)
