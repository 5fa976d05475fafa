"""Remedies for fragmentation of CUDA memory: allocator settings, and clearing the cache."""

import os
import sys
from typing import Literal

import torch

from f3rm_ext import compat

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
_ALSO = ("PYTORCH_ALLOC_CONF",)
"""Newer names of the same variable."""
SETTING = "expandable_segments:True"


def request_expandable_segments() -> Literal["set", "kept", "late", "unsupported"]:
    """Makes CUDA's allocator grow its segments: by the environment before CUDA starts, by torch's API afterwards.

    Memory that is already allocated is not affected.

    Returns:
        "set" on success; "kept" if the user already configured segments or another allocator; "late" if CUDA is
        running and torch cannot change the setting; "unsupported" on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return "unsupported"
    given = {name: os.environ[name] for name in (VARIABLE, *_ALSO) if os.environ.get(name)}
    if any("expandable_segments" in value or "cudaMallocAsync" in value for value in given.values()):
        return "kept"
    # Torch reads one of the variables, depending on its version.
    settings = {name: f"{value},{SETTING}" for name, value in given.items()} or {VARIABLE: SETTING}
    if torch.cuda.is_initialized() and not compat.set_cuda_allocator(next(iter(settings.values()))):
        return "late"
    os.environ.update(settings)
    return "set"


class CacheClearing:
    """Releases unused memory of CUDA's allocator at regular steps; does nothing on other devices."""

    def __init__(self, every: int) -> None:
        """Sets the interval.

        Args:
            every: steps between clearings.
        """
        self.every = every

    def after_step(self, step: int, device: torch.device) -> bool:
        """Clears the cache if the step ends an interval.

        Args:
            step: the completed step, from 0.
            device: of the Gaussians.

        Returns:
            Whether it cleared the cache.
        """
        if device.type != "cuda" or (step + 1) % self.every:
            return False
        torch.cuda.empty_cache()
        return True


def gaps_mib(device: torch.device) -> float:
    """Returns the memory of a CUDA device lost to gaps that are too small for reuse, MiB; 0 on other devices.

    The difference reserved − allocated, often called fragmentation, also counts the cache, which is not lost.
    """
    if device.type != "cuda":
        return 0.0
    return torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0) / 2**20
