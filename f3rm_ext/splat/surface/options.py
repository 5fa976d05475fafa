"""Which surface regularisation, when, and with which constants."""

from dataclasses import dataclass, replace
from typing import Literal

import tyro

from f3rm_ext.errors import ConfigError

Mode = Literal["none", "density", "sdf", "dn-consistency"]
STEP_FIELDS = ("entropy_start", "entropy_end", "prune_step", "start", "neighbours_start", "neighbours_every")
"""Fields that :meth:`RegularizationOptions.scaled` scales."""


@dataclass
class RegularizationOptions:
    """Regularisation that draws Gaussians to the surface; defaults are SuGaR's for a run of 15 000 steps."""

    mode: tyro.conf.Suppress[Mode] = "none"
    """What to compare. density: density near the Gaussians with that of flat, opaque ones (quick, objects);
    sdf: the distance the density stands for with the rendered depth (unbounded scenes); dn-consistency: density, and
    rendered normals with those of the rendered depth (slowest, smoothest); none: no regularisation, no entropy and no
    pruning by it."""
    schedule_steps: int = 15_000
    """Length of the run for which the steps below are stated; a run of another length scales them by the ratio."""
    entropy_start: int = 7_000
    """Entropy of the opacities is reduced after this step."""
    entropy_end: int = 9_000
    """... and before this one."""
    entropy_factor: float = 0.1
    """Weight of the entropy, ≥ 0; makes opacities 0 or 1 before the transparent Gaussians are removed."""
    prune_step: int = 9_001
    """At this step Gaussians below `prune_opacity` are removed."""
    prune_opacity: float = 0.5
    """Opacity below which Gaussians are removed at `prune_step`, 0 to 1; 0 removes none."""
    start: int = 9_000
    """The regularisers work after this step."""
    neighbours_start: int = 7_001
    """Step from which on the searches for neighbours are counted."""
    neighbours_every: int = 500
    """Steps between searches for neighbours, ≥ 1."""
    neighbours: int = 16
    """Neighbours per Gaussian, itself included, ≥ 1; memory is 4 bytes each."""
    samples: int = 1_000_000
    """Points per step, ≥ 1. 1 000 000 is for GPUs; on a CPU 20 000 to 100 000 (0.3 s per 100 000 on one core)."""
    spread: float = 1.5
    """Standard deviation of the points in units of their Gaussian's own, > 0."""
    chunk_points: int = 1 << 15
    """Points at once where the torch implementation works, ≥ 1; bounds the peak, 280 MiB at 32 768."""
    density_factor: float = 0.2
    """Weight of the density loss (density and dn-consistency), ≥ 0."""
    sdf_factor: float = 0.2
    """Weight of the sdf loss, ≥ 0."""
    normal_factor: float = 0.2
    """Weight of the difference between a Gaussian's normal and that of its neighbourhood (all modes), ≥ 0."""
    dn_factor: float = 0.05
    """Weight of 1 − N_rendered · N_depth (dn-consistency), ≥ 0."""
    sdf_sigmas: float = 2.0
    """sdf: Gaussians are used that lie within this many deviations along the view of the depth map, > 0."""
    sdf_unit: float = 0.1
    """sdf: an error of this share of the cameras' extent counts 1, > 0."""
    sdf_most: float = 10.0
    """sdf: no point counts more than this times the cameras' extent, > 0."""
    dn_divide: bool = True
    """dn-consistency: divide composited depth by accumulation, which is right wherever opacity varies between pixels
    (objects, soft borders); False is SuGaR's way, which also pushes holes shut in closed scenes."""
    dn_rebuild_z: bool = False
    """dn-consistency: composite x and y of the normals and rebuild z (True is SuGaR's way) instead of compositing all
    three and dividing by the length."""
    dn_min_alpha: float = 0.5
    """dn-consistency: pixels whose accumulation is not above this do not count, 0 to 1."""

    def __post_init__(self) -> None:
        for name in ("neighbours", "neighbours_every", "samples", "chunk_points", "schedule_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"The regularisation's {name} is {getattr(self, name)}: use a number of at least 1.")
        for name in ("spread", "sdf_sigmas", "sdf_unit", "sdf_most"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"The regularisation's {name} is {getattr(self, name)}: use a number above 0.")
        for name in ("entropy_factor", "density_factor", "sdf_factor", "normal_factor", "dn_factor"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"The regularisation's {name} is {getattr(self, name)}: use 0 (off) or more.")
        for name in ("prune_opacity", "dn_min_alpha"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"The regularisation's {name} is {getattr(self, name)}, "
                    "but opacities lie between 0 and 1: use a number from 0 to below 1."
                )
        if self.entropy_end < self.entropy_start:
            raise ConfigError(
                f"The entropy of opacities ends at step {self.entropy_end}, before it starts at step "
                f"{self.entropy_start}: exchange entropy_start and entropy_end, or set entropy_factor 0."
            )

    def scaled(self, total_steps: int) -> "RegularizationOptions":
        """The same schedule for a run of another length: every step times ``total_steps`` / ``schedule_steps``."""
        ratio = total_steps / self.schedule_steps
        steps = {name: round(getattr(self, name) * ratio) for name in STEP_FIELDS}
        steps["neighbours_every"] = max(1, steps["neighbours_every"])
        return replace(self, schedule_steps=total_steps, **steps)
