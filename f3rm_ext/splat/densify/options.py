"""Options of densification."""

from dataclasses import dataclass
from typing import Annotated, Literal

from f3rm_ext.utils.ranges import Count, Range, check_ranges

MCMC_CAP = 1_000_000


@dataclass
class DensifyOptions:
    """How Gaussians are added and removed. Defaults are those of gsplat and 3DGS."""

    strategy: Literal["default", "mcmc", "none"] = "default"
    """default copies and splits Gaussians with large image-space gradients and prunes transparent ones. mcmc moves
    dead Gaussians to live ones and adds noise (3DGS-MCMC). none keeps their number."""
    max_gaussians: Annotated[int, Range(0)] = 0
    """Upper limit of the number of Gaussians, ≥ 1; 0 means no limit for default and 1,000,000 for mcmc. Near the
    limit, default grows where gradients are largest."""
    start: Annotated[int, Range(0)] = 500
    """Step after which Gaussians are added and removed, ≥ 0."""
    stop: int = 15_000
    """Step at which adding and removing ends, ≥ 0; the end of the first stage if that is earlier."""
    every: Count = 100
    """Steps between rounds of densification, ≥ 1."""
    seed: int = 0
    """Seed of the random numbers for splits, samples and noise."""

    grow_grad2d: float = 2e-4
    """Mean gradient of the loss with respect to a Gaussian's image position (in half widths and heights) above
    which it grows, > 0; 8e-4 suits absgrad."""
    absgrad: bool = False
    """Sum absolute gradients over pixels, so that opposite gradients do not cancel (AbsGS)."""
    grow_scale3d: float = 0.01
    """Size threshold: a growing Gaussian is copied up to this largest standard deviation and split above it, as a
    fraction of the scene's extent, > 0."""
    grow_scale2d: float = 0.05
    """Image radius above which a Gaussian is split before stop-scale2d, > 0, as a fraction of the image's longer
    side."""
    prune_opacity: Annotated[float, Range(0, 1, below=True)] = 0.005
    """Opacity below which a Gaussian is removed, 0 to below 1."""
    prune_scale3d: float = 0.1
    """Largest standard deviation above which a Gaussian is removed after the first reset of opacities, as a
    fraction of the scene's extent."""
    prune_scale2d: float = 0.15
    """Image radius above which a Gaussian is removed before stop-scale2d, as a fraction of the image's longer
    side."""
    prune_near: Annotated[float, Range(0, 1)] = 0.5
    """Distance to a training camera below which a Gaussian is removed, as a share of the distance from the camera to
    the nearest points that training starts with, 0 to 1; 0 removes none. Such a Gaussian is fog in views between the
    cameras."""
    stop_scale2d: int = 0
    """Step up to which image radii are checked, ≥ 0; 0 never checks them, as 3DGS does in effect."""
    reset_every: Annotated[int, Range(0)] = 3000
    """Steps between resets, which lower all opacities to twice prune-opacity, within 0.01 to 0.99; 0 never resets them
    and never removes large Gaussians."""
    pause_after_reset: int = 0
    """Steps without densification after a reset; the number of training images is a good choice."""
    revised_opacity: bool = False
    """Lower opacities after a split, so that the image keeps its brightness (arXiv 2404.06109)."""

    mcmc_stop: int = 25_000
    """mcmc: step at which adding and moving Gaussians ends, ≥ 0; noise continues."""
    mcmc_min_opacity: Annotated[float, Range(0, 1, below=True)] = 0.005
    """mcmc: opacity up to which a Gaussian counts as dead, 0 to below 1."""
    mcmc_noise: Annotated[float, Range(0)] = 5e5
    """mcmc: strength of the noise on centres, in units of their learning rate, ≥ 0."""
    mcmc_growth: float = 0.05
    """mcmc: fraction of Gaussians added per round, ≥ 0."""
    mcmc_opacity_reg: Annotated[float, Range(0)] = 0.01
    """mcmc: weight of the mean opacity in the loss, ≥ 0, so that Gaussians that show nothing die."""
    mcmc_scale_reg: Annotated[float, Range(0)] = 0.01
    """mcmc: weight of the mean standard deviation, scene units, in the loss, ≥ 0."""

    def __post_init__(self) -> None:
        check_ranges(self, "pipeline.model.densify.")

    @property
    def free_share(self) -> float:
        """`prune_near`, but 0 where the number of Gaussians stays."""
        return 0.0 if self.strategy == "none" else self.prune_near

    @property
    def cap(self) -> int | None:
        """Upper limit of the number of Gaussians; None for no limit."""
        return self.max_gaussians or (MCMC_CAP if self.strategy == "mcmc" else None)
