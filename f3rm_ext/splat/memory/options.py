"""How much memory Gaussians may take: the options, and what they come to."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.memory.adam import PackedAdamOptimizerConfig
from f3rm_ext.splat.memory.moments import MomentStorage

Storage = Literal["float32", "float16", "selective"]
Fragmentation = Literal["minimal", "normal", "aggressive"]
CLEAR_EVERY: dict[str, int] = {"minimal": 100, "normal": 50, "aggressive": 10}
"""Steps from one clearing of the allocator's cache to the next."""


@dataclass
class MemoryOptions:
    """What is stored in how many bytes. None of it changes what is optimised, only how it is rounded."""

    optimize_memory: Annotated[bool, tyro.conf.arg(aliases=["--optimize-memory"])] = False
    """Turn on the sensible set: what is `auto` below becomes float16 storage with bfloat16 moments and expandable
    segments. By the account a step of 6 million Gaussians takes 24 % less of SH degree 3 and 16 % less of degree 2."""
    sh_storage: Literal["auto", "float32", "float16", "selective"] = "auto"
    """How spherical harmonics beyond the first are kept: float16 is computed with in float32 and rounded at random;
    `selective` keeps more bits for reflective Gaussians. auto is float32, with optimize-memory float16."""
    sh_moments: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """How Adam's moments of these are kept: 8, 4 or about 2 bytes per coefficient. auto is float32, with
    optimize-memory bfloat16."""
    reflective_above: float = 0.05
    """With `selective`: root mean square, over directions, of the view-dependent part of a colour (0 to 1) above which
    a Gaussian counts as reflective, > 0."""
    fragmentation: Annotated[
        Literal["auto", "minimal", "normal", "aggressive"], tyro.conf.arg(aliases=["--fragmentation"])
    ] = "auto"
    """On CUDA, clear the allocator's cache every 100 (minimal), 50 (normal) or 10 (aggressive) steps. Each clearing
    waits for the GPU. auto is minimal."""
    expandable_segments: bool | None = None
    """On CUDA, have the allocator grow its segments instead of adding new ones, which leaves fewer gaps than any
    clearing of the cache; an allocator setting of your own is left alone. By default as optimize-memory."""

    def __post_init__(self) -> None:
        if not self.reflective_above > 0:
            raise ConfigError(
                f"Gaussians are to count as reflective above {self.reflective_above}, but a colour's deviation is "
                "positive: use the default of 0.05."
            )

    @property
    def storage(self) -> Storage:
        """How harmonics are stored."""
        if self.sh_storage != "auto":
            return self.sh_storage
        return "float16" if self.optimize_memory else "float32"

    @property
    def sh_dtype(self) -> torch.dtype:
        """Of the parameter features_rest."""
        return torch.float32 if self.storage == "float32" else torch.float16

    @property
    def moments(self) -> MomentStorage:
        """How moments of harmonics are stored."""
        if self.sh_moments != "auto":
            return self.sh_moments
        return "bfloat16" if self.optimize_memory else "float32"

    @property
    def clear_every(self) -> int:
        """Steps from one clearing of CUDA's cache to the next."""
        return CLEAR_EVERY["minimal" if self.fragmentation == "auto" else self.fragmentation]

    @property
    def grow_segments(self) -> bool:
        """Whether to ask for expandable segments."""
        return self.optimize_memory if self.expandable_segments is None else self.expandable_segments

    def fit(self, optimizer: PackedAdamOptimizerConfig) -> None:
        """Has the optimiser of features_rest keep its state as these options say.

        Args:
            optimizer: its configuration, changed in place.
        """
        optimizer.moments = self.moments
        optimizer.reflective_above = self.reflective_above if self.storage == "selective" else 0.0
