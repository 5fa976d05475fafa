"""Schedule of a run: SuGaR's stages, scaled to the length of the run and shifted to its first stage."""

from dataclasses import dataclass, replace
from typing import Literal

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.densify import DensifyOptions
from f3rm_ext.splat.regularization.options import Mode, RegularizationOptions

Stage = Literal["vanilla", "entropy", "regularized"]
FULL_STEPS = 15_000
"""Length of the run for which SuGaR and the options give their steps."""
LAST_GROWTH = 7_000
"""Step of that run from which no Gaussians are added."""
MIN_ROUND = 25
"""Least number of steps between rounds of densification, so that each sees enough images."""
MIN_RESET = 300
"""Least number of steps between resets of opacities, which need this long to recover in runs of any length."""


@dataclass(frozen=True)
class Schedule:
    """Maps the steps of a run to the stages of the schedule.

    The stages of a run of any length are proportional to those of 15,000 steps. A run that starts at a later stage
    spends all its steps on the remaining stages.

    >>> schedule = Schedule.from_options(30_000, RegularizationOptions())
    >>> schedule.surface(RegularizationOptions()).start
    18000
    """

    total: int
    """Steps of the run: --schedule-steps if given, else --max-num-iterations."""
    offset: int
    """Steps of the skipped stages, added to a step of the run to get its position in the schedule."""
    ratio: float
    """Length of the schedule, including skipped stages, in units of SuGaR's 15,000 steps."""

    @classmethod
    def from_options(cls, total: int, surface: RegularizationOptions, begin: Stage = "vanilla") -> "Schedule":
        """Creates the schedule of a run.

        Args:
            surface: first steps of the stages, for a run of ``surface.schedule_steps``.
        """
        # Splats that are given have grown already, also where planar begins while others still grow.
        grown = surface.entropy_start
        later = {"entropy": surface.first_loss, "regularized": surface.first_surface_loss}
        first = 0 if begin == "vanilla" else max(grown, later[begin])
        # A stage may be set to begin at the end of the schedule or after it, whose length would be infinite.
        share = min(first / surface.schedule_steps, 0.99)
        whole = total / (1 - share)
        return cls(total, round(share * whole), whole / FULL_STEPS)

    @property
    def whole(self) -> int:
        """Steps of the schedule, including skipped stages."""
        return self.total + self.offset

    def position(self, step: int) -> int:
        """Returns the position of a step of the run in the schedule."""
        return step + self.offset

    def surface(self, options: RegularizationOptions) -> RegularizationOptions:
        """Scales the steps in the options of the regularisation to this schedule."""
        return options.scaled(self.whole)

    def require_stage(self, step: int, trained_as: Mode, surface: RegularizationOptions) -> None:
        """Checks that a run can continue from a checkpoint.

        Args:
            trained_as: regularisation of the run that wrote the checkpoint.

        Raises:
            ConfigError: it was trained without regularisation past the point where this run's would have started.
        """
        if trained_as == "none" and surface.mode != "none" and self.position(step) > surface.first_loss:
            raise ConfigError(
                f"The checkpoint of step {step} is of a run without regularisation, but this run would have started "
                f"the stages of {surface.mode} at step {max(0, surface.first_loss - self.offset)}: continue with "
                "--pipeline.model.regularization none, or start a run with --pipeline.model.start-from CHECKPOINT "
                "--pipeline.model.start-stage entropy."
            )

    def densify(self, options: DensifyOptions) -> DensifyOptions:
        """Scales the steps in the options of densification to this schedule."""
        steps = {
            name: round(getattr(options, name) * self.ratio)
            for name in ("start", "stop", "reset_every", "stop_scale2d", "mcmc_stop")
        }
        every = max(round(options.every * self.ratio), min(options.every, MIN_ROUND))
        resets = max(steps["reset_every"], min(options.reset_every, MIN_RESET))
        # Resets coincide with rounds, since gsplat checks for both in the same step.
        resets = -(-resets // every) * every
        return replace(options, **{**steps, "every": every, "reset_every": resets})

    def last_growth(self) -> int:
        """Returns the step of the schedule from which no Gaussians are added."""
        return round(LAST_GROWTH * self.ratio)

    def sh_degree(self, step: int, highest: int, steps_per_degree: int) -> int:
        """Returns the SH degree in use at a step of the run: it rises by one at a time up to ``highest``."""
        every = max(1, round(steps_per_degree * self.ratio))
        return min(highest, self.position(step) // every)
