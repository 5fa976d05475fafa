"""Options of the surface regularisation: its kind, schedule and constants."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.ranges import Count, Positive, Range, check_ranges

Mode = Literal["none", "density", "sdf", "dn-consistency", "planar"]
STEP_FIELDS = (
    "entropy_start",
    "entropy_end",
    "prune_step",
    "start",
    "neighbours_start",
    "neighbours_every",
    "planar_start",
)
"""Fields scaled by :meth:`RegularizationOptions.scaled`."""
Weight = Annotated[float, Range(0)]
"""Weight of a loss, 0 (off) or more."""
Opacity = Annotated[float, Range(0, 1, below=True)]
"""An opacity below which something is left out; 0 leaves nothing out."""


@dataclass
class RegularizationOptions:
    """Regularisation that pulls Gaussians to surfaces. Defaults are SuGaR's for a run of 15,000 steps."""

    mode: tyro.conf.Suppress[Mode] = "none"
    """density compares the density near Gaussians with that of flat, opaque ones (quick, for objects). sdf
    compares the distance implied by the density with the rendered depth (for unbounded scenes). dn-consistency
    is density plus a comparison of rendered normals with those of the rendered depth (slowest, smoothest). planar
    flattens Gaussians, compares rendered normals with those of the depth of their planes, and this depth and patches
    of photos between nearby views; it has no entropy loss. none turns off the regularisation, the entropy loss and
    its pruning."""
    schedule_steps: Count = 15_000
    """Length of the run for which the following steps are given, ≥ 1; they scale with the length of the actual
    run."""
    entropy_start: int = 7_000
    """Step after which the entropy loss of opacities is active."""
    entropy_end: int = 9_000
    """Step before which the entropy loss of opacities is active."""
    entropy_factor: Weight = 0.1
    """Weight of the entropy loss, ≥ 0. It drives opacities to 0 or 1 before transparent Gaussians are removed."""
    prune_step: int = 9_001
    """Step at which Gaussians with an opacity below prune-opacity are removed."""
    prune_opacity: Opacity = 0.5
    """Opacity below which Gaussians are removed at prune-step, 0 to below 1; 0 removes none."""
    start: int = 9_000
    """Step after which the surface losses are active."""
    neighbours_start: int = 7_001
    """Step of the first search for neighbours; later searches are counted from it."""
    neighbours_every: Count = 500
    """Steps between searches for neighbours, ≥ 1."""
    neighbours: Count = 16
    """Neighbours per Gaussian, including itself, ≥ 1; each takes 4 bytes. planar has none."""
    samples: Count = 1_000_000
    """Points per step, ≥ 1. The default suits GPUs; use 20,000 to 100,000 on a CPU (0.3 s per 100,000 on one
    core). planar has none."""
    spread: Positive = 1.5
    """Standard deviation of the points, in units of the standard deviation of their Gaussian, > 0."""
    chunk_points: Annotated[int, Range(0)] = 0
    """Points per chunk of the torch implementation, ≥ 1; limits peak memory, 280 MiB at 32,768. 0 fits chunks to the
    free memory of a GPU and takes 32,768 elsewhere."""
    density_factor: Weight = 0.2
    """Weight of the density loss (density and dn-consistency), ≥ 0."""
    sdf_factor: Weight = 0.2
    """Weight of the sdf loss, ≥ 0."""
    normal_factor: Weight = 0.2
    """Weight of the difference between the normal of a Gaussian and that of its neighbourhood, ≥ 0; planar has none."""
    dn_factor: Weight = 0.05
    """Weight of 1 − N_rendered · N_depth (dn-consistency), ≥ 0."""
    sdf_sigmas: Positive = 2.0
    """sdf: only Gaussians within this many standard deviations of the depth map, along the view, are used, > 0."""
    sdf_unit: Positive = 0.1
    """sdf: error that counts as 1, as a share of the scene's extent, > 0."""
    sdf_most: Positive = 10.0
    """sdf: upper limit of the loss of a point, in units of the scene's extent, > 0."""
    dn_divide: bool = True
    """dn-consistency: divide composited depth by accumulation, which is right wherever opacity varies between
    pixels (objects, soft borders). SuGaR does not divide, which also closes holes in closed scenes."""
    dn_rebuild_z: bool = False
    """dn-consistency: composite x and y of the normals and compute z from them, as SuGaR does, instead of
    normalising all three."""
    dn_min_alpha: Opacity = 0.5
    """dn-consistency and planar: pixels count only if their accumulation exceeds this, 0 to below 1."""

    planar_start: int = 2_500
    """planar: step after which its losses are active. Means move little later, as their learning rate falls."""
    planar_prune_opacity: Opacity = 0.02
    """planar: opacity below which Gaussians are removed at prune-step, 0 to below 1; 0 removes none."""
    flat_factor: Weight = 100.0
    """planar: weight of the mean thickness of Gaussians beyond that of the 3D filter, in units of the scene's extent,
    ≥ 0."""
    plane_factor: Weight = 0.05
    """planar: weight of 1 − N_rendered · N_depth, with the depth of planes, less at edges of the photo, ≥ 0."""
    multiview_factor: Weight = 0.03
    """planar: weight of the distance, in pixels, by which a pixel misses itself after a round trip through the depth
    of a nearby training view, ≥ 0."""
    patch_factor: Weight = 0.25
    """planar: weight of 1 − NCC, the disagreement between patches of the photo and of a nearby one, ≥ 0. 0.5
    makes better meshes of plain walls, and pictures that are up to 0.7 dB worse."""
    patches: Count = 2048
    """planar: patches per step, ≥ 1."""

    def __post_init__(self) -> None:
        check_ranges(self, "pipeline.model.surface.")
        if self.entropy_end < self.entropy_start:
            raise ConfigError(
                f"--pipeline.model.surface.entropy-start is {self.entropy_start}, after entropy-end, "
                f"{self.entropy_end}: exchange the two, or turn the loss off by entropy-factor 0."
            )

    @property
    def first_loss(self) -> int:
        """Step after which the first loss is active."""
        return self.planar_start if self.mode == "planar" else self.entropy_start

    @property
    def first_surface_loss(self) -> int:
        """Step after which the losses of surfaces are active."""
        return self.planar_start if self.mode == "planar" else self.start

    @property
    def prune_below(self) -> float:
        """Opacity below which Gaussians are removed at prune-step."""
        return self.planar_prune_opacity if self.mode == "planar" else self.prune_opacity

    def scaled(self, total_steps: int) -> "RegularizationOptions":
        """Scales the schedule to another length: multiplies every step by ``total_steps`` / ``schedule_steps``."""
        ratio = total_steps / self.schedule_steps
        steps = {name: round(getattr(self, name) * ratio) for name in STEP_FIELDS}
        steps["neighbours_every"] = max(1, steps["neighbours_every"])
        return replace(self, schedule_steps=total_steps, **steps)
