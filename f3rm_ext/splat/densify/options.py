"""How Gaussians multiply and die: the options."""

from dataclasses import dataclass
from typing import Literal

from f3rm_ext.errors import ConfigError

MCMC_CAP = 1_000_000


@dataclass
class DensifyOptions:
    """How Gaussians are added and removed. Defaults are those of gsplat, which are those of the original method."""

    strategy: Literal["default", "mcmc", "none"] = "default"
    """`default` copies and splits where the picture pulls at Gaussians and prunes transparent ones; `mcmc` moves dead
    Gaussians to live ones and adds noise (3DGS as Markov chain Monte Carlo); `none` leaves their number alone."""
    max_gaussians: int = 0
    """Most Gaussians there may be, >= 1; 0 means no limit for `default` and 1 000 000 for `mcmc`. At the limit,
    `default` grows where gradients are largest."""
    start: int = 500
    """Step after which Gaussians are added and removed, >= 0."""
    stop: int = 15_000
    """Step from which their number stays; the end of the first stage, if that comes earlier."""
    every: int = 100
    """Steps from one round to the next, >= 1."""
    seed: int = 0
    """Seed of the random numbers of splits, samples and noise."""

    grow_grad2d: float = 2e-4
    """Mean gradient of a loss by a Gaussian's place in the picture (in half widths and heights) from which it grows,
    > 0; 8e-4 suits `absgrad`."""
    absgrad: bool = False
    """Sum absolute gradients over pixels, so that opposite pulls do not cancel (AbsGS)."""
    grow_scale3d: float = 0.01
    """Largest standard deviation, as a fraction of the scene's extent, up to which a Gaussian is copied and above
    which it is split, > 0."""
    grow_scale2d: float = 0.05
    """Radius, as a fraction of the picture's longer side, above which a Gaussian is split, before `stop_scale2d`."""
    prune_opacity: float = 0.005
    """Opacity below which a Gaussian is removed, [0, 1)."""
    prune_scale3d: float = 0.1
    """Largest standard deviation, as a fraction of the scene's extent, above which a Gaussian is removed, once
    opacities have been reset."""
    prune_scale2d: float = 0.15
    """Radius, as a fraction of the picture's longer side, above which a Gaussian is removed, before `stop_scale2d`."""
    stop_scale2d: int = 0
    """Step up to which size in the picture counts; 0 leaves it out, as the original method does in effect."""
    reset_every: int = 3000
    """Steps from one lowering of all opacities to the next; 0 never does it (nor removes large Gaussians)."""
    pause_after_reset: int = 0
    """Steps after a reset without a round; the number of images is a good choice."""
    revised_opacity: bool = False
    """Lower the opacity of the halves of a split, so that the picture keeps its brightness (arXiv 2404.06109)."""

    mcmc_stop: int = 25_000
    """Step from which `mcmc` adds and moves none; noise goes on."""
    mcmc_min_opacity: float = 0.005
    """Opacity up to which a Gaussian is dead for `mcmc`, (0, 1)."""
    mcmc_noise: float = 5e5
    """Noise of `mcmc` on centres, times their learning rate, >= 0."""
    mcmc_growth: float = 0.05
    """Fraction of Gaussians that `mcmc` adds per round, >= 0."""

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("start", 0), ("max_gaussians", 0), ("reset_every", 0), ("mcmc_noise", 0)):
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise ConfigError(
                    f"The option {option} of densification is {getattr(self, name)}, but has to be {least} or more."
                )
        for name in ("prune_opacity", "mcmc_min_opacity"):
            if not 0 <= getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ConfigError(
                    f"The option {option} of densification is {getattr(self, name)}, but opacities lie from 0 to below "
                    "1: use the default of 0.005."
                )

    @property
    def cap(self) -> int | None:
        """Most Gaussians there may be; None without a limit."""
        return self.max_gaussians or (MCMC_CAP if self.strategy == "mcmc" else None)
