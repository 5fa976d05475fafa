"""When what happens in a run: SuGaR's stages, fitted to the length of the run and to where it begins."""

from dataclasses import dataclass, replace
from typing import Literal

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.densify import DensifyOptions
from f3rm_ext.splat.surface.options import Mode, RegularizationOptions

Stage = Literal["vanilla", "entropy", "regularized"]
FULL_STEPS = 15_000
"""Length of the run for which SuGaR (and these options) state their steps."""
LAST_GROWTH = 7_000
"""Step of that run from which the number of Gaussians only falls."""
MIN_ROUND = 25
"""Rounds of densification are no shorter than this, so that they see enough images."""

MIN_RESET = 300
"""Opacities are lowered no more often than this: they need so many steps to come back at any length of run."""


@dataclass(frozen=True)
class Schedule:
    """Steps of one run.

    A run of another length than 15 000 steps goes through the same stages in proportion. A run that begins at a later
    stage gives all its steps to what is left.
    """

    total: int
    """Steps of a run of the whole schedule: --schedule-steps, else --max-num-iterations."""
    offset: int
    """What is added to a step of the run to get its place in the schedule."""
    ratio: float
    """Length of the whole schedule, skipped stages included, in units of SuGaR's 15 000 steps."""

    @classmethod
    def of(cls, total: int, surface: RegularizationOptions, begin: Stage = "vanilla") -> "Schedule":
        """The schedule of a run.

        Args:
            total: steps of the run, if it does all of the schedule.
            surface: says when the stages begin in a run of ``surface.schedule_steps``.
            begin: the stage of the first step.
        """
        first = {"vanilla": 0, "entropy": surface.entropy_start, "regularized": surface.start}[begin]
        share = min(first / surface.schedule_steps, 0.99)
        whole = total / (1 - share)
        return cls(total, round(share * whole), whole / FULL_STEPS)

    @property
    def whole(self) -> int:
        """Steps of the schedule, skipped ones included."""
        return self.total + self.offset

    def at(self, step: int) -> int:
        """Place of a step in the schedule."""
        return step + self.offset

    def surface(self, options: RegularizationOptions) -> RegularizationOptions:
        """The regularisation's options in steps of this schedule."""
        return options.scaled(self.whole)

    def require_stage(self, step: int, trained_as: Mode, surface: RegularizationOptions) -> None:
        """Checks that a run can go on from a checkpoint.

        Args:
            step: of the run, the last one of the checkpoint.
            trained_as: regularisation of the run it is of.
            surface: :meth:`surface` of this run.

        Raises:
            ConfigError: this run has a regularisation and that one had none, and the stage before it is past.
        """
        if trained_as == "none" != surface.mode and self.at(step) > surface.entropy_start:
            raise ConfigError(
                f"The checkpoint of step {step} is of a run without regularisation, and this one should have begun "
                f"with the stages of {surface.mode} at step {max(0, surface.entropy_start - self.offset)}: go on with "
                "--pipeline.model.regularization none, or begin a run with --pipeline.model.start-from CHECKPOINT "
                "--pipeline.model.start-stage entropy."
            )

    def densify(self, options: DensifyOptions) -> DensifyOptions:
        """The densification's options in steps of this schedule."""
        steps = {
            name: round(getattr(options, name) * self.ratio)
            for name in ("start", "stop", "reset_every", "stop_scale2d", "mcmc_stop")
        }
        every = max(round(options.every * self.ratio), min(options.every, MIN_ROUND))
        resets = max(steps["reset_every"], min(options.reset_every, MIN_RESET))
        # A reset between two rounds would never be noticed, since gsplat looks at both in the same step.
        resets = -(-resets // every) * every
        return replace(options, **{**steps, "every": every, "reset_every": resets})

    def last_growth(self) -> int:
        """Step of the schedule from which no Gaussian is added."""
        return round(LAST_GROWTH * self.ratio)

    def sh_degree(self, step: int, highest: int, steps_per_degree: int) -> int:
        """SH degree of the colours at a step of the run: one more at a time, the highest ones in the end."""
        every = max(1, round(steps_per_degree * self.ratio))
        return min(highest, self.at(step) // every)
