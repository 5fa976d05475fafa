"""Options for the memory that Gaussians take."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from f3rm_ext.splat.memory.adam import PackedAdamOptimizerConfig
from f3rm_ext.splat.memory.moments import MomentStorage
from f3rm_ext.utils.ranges import Positive, check_ranges

Storage = Literal["float32", "float16", "selective"]
CLEAR_EVERY: dict[str, int] = {"minimal": 100, "normal": 50, "aggressive": 10}
"""Steps between clearings of the allocator's cache, where it is cleared at all."""


@dataclass
class MemoryOptions:
    """Precision of what is stored. These options change rounding, not what is optimised."""

    optimize_memory: Annotated[bool, tyro.conf.arg(aliases=["--optimize-memory"])] = False
    """Turn on the recommended set: options left at auto become float16 storage, bfloat16 moments and expandable
    segments. By calculation, a step with 6 million Gaussians takes 24 % less at SH degree 3 and 16 % less at
    degree 2."""
    sh_storage: Literal["auto", "float32", "float16", "selective"] = "auto"
    """Storage of spherical harmonics beyond the first. float16 is computed in float32 and rounded stochastically.
    selective adds precision for reflective Gaussians. auto is float32, or float16 with optimize-memory."""
    sh_moments: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Storage of Adam's moments of these harmonics: 8, 4 or about 2 bytes per coefficient. auto is float32, or
    bfloat16 with optimize-memory."""
    reflective_above: Positive = 0.05
    """selective: a Gaussian is reflective if the view-dependent part of its colour (0 to 1), root mean square over
    directions, exceeds this, > 0."""
    fragmentation: Annotated[
        Literal["auto", "minimal", "normal", "aggressive"], tyro.conf.arg(aliases=["--fragmentation"])
    ] = "auto"
    """How often to clear the allocator's cache on CUDA: every 100 (minimal), 50 (normal) or 10 (aggressive) steps.
    Each clearing waits for the GPU. auto never clears it."""
    expandable_segments: bool | None = None
    """Let CUDA's allocator grow its segments instead of adding new ones, which leaves fewer gaps than clearing the
    cache. Your own allocator settings take precedence. Follows optimize-memory by default."""

    def __post_init__(self) -> None:
        check_ranges(self, "pipeline.model.")

    @property
    def storage(self) -> Storage:
        """Storage of harmonics."""
        if self.sh_storage != "auto":
            return self.sh_storage
        return "float16" if self.optimize_memory else "float32"

    @property
    def sh_dtype(self) -> torch.dtype:
        """Dtype of the parameter features_rest."""
        return torch.float32 if self.storage == "float32" else torch.float16

    @property
    def moments(self) -> MomentStorage:
        """Storage of moments of harmonics."""
        if self.sh_moments != "auto":
            return self.sh_moments
        return "bfloat16" if self.optimize_memory else "float32"

    @property
    def clear_every(self) -> int:
        """Steps between clearings of CUDA's cache; 0 for none."""
        return 0 if self.fragmentation == "auto" else CLEAR_EVERY[self.fragmentation]

    @property
    def grow_segments(self) -> bool:
        """Whether to request expandable segments."""
        return self.optimize_memory if self.expandable_segments is None else self.expandable_segments

    def fit(self, optimizer: PackedAdamOptimizerConfig) -> None:
        """Applies the options to the optimiser of features_rest."""
        optimizer.moments = self.moments
        optimizer.reflective_above = self.reflective_above if self.storage == "selective" else 0.0
