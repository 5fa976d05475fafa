"""Settings of a measurement, as ``f3rm-ext bench run`` shows them."""

from dataclasses import dataclass
from typing import Annotated

from f3rm_ext.utils.ranges import Count, Range, check_ranges


@dataclass(frozen=True)
class Protocol:
    """Number of runs, the steps that are timed, and the views that are evaluated."""

    repeats: Count = 3
    """Number of runs, at least 1. Speed is judged from 3 on."""
    steps: Annotated[int, Range(0)] = 0
    """Number of steps to train, at least 2 more than the warm-up. 0 trains to the end of the run."""
    warm_up: Annotated[int, Range(0)] = 20
    """Number of steps at the beginning that are not timed."""
    train_views: Count = 8
    """Number of training views to evaluate beside the held-out ones, spread evenly."""
    evaluate: bool = True
    """Evaluate after training. Without it, only speed, loss and the peak of training are recorded."""
    eval_step: Annotated[int, Range(0)] = 0
    """Step of the whole run after which to evaluate, within the window; 0 evaluates at its end. The checkpoint is saved
    while the clock stands still."""

    def __post_init__(self) -> None:
        check_ranges(self)
