"""What can be done about gaps in CUDA's memory: settings before it starts, clearing its cache while it runs."""

import os
import sys
from typing import Literal

import torch

from f3rm_ext import compat

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
_ALSO = ("PYTORCH_ALLOC_CONF",)
"""Newer name of the same."""
SETTING = "expandable_segments:True"


def ask_for_expandable_segments() -> Literal["set", "kept", "late", "unsupported"]:
    """Has CUDA's allocator grow its segments: by the environment before CUDA starts, by torch's own way afterwards.

    What torch's allocator has handed out by then stays as it is.

    Returns:
        Whether it was set; "kept" where the user said something about segments or chose another allocator already,
        "late" where CUDA is running and torch knows no way, "unsupported" on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return "unsupported"
    given = {name: os.environ[name] for name in (VARIABLE, *_ALSO) if os.environ.get(name)}
    if any("expandable_segments" in value or "cudaMallocAsync" in value for value in given.values()):
        return "kept"
    # Torch reads one of them, depending on its version.
    settings = {name: f"{value},{SETTING}" for name, value in given.items()} or {VARIABLE: SETTING}
    if torch.cuda.is_initialized() and not compat.set_cuda_allocator(next(iter(settings.values()))):
        return "late"
    os.environ.update(settings)
    return "set"


class CacheClearing:
    """Gives memory that CUDA's allocator holds but nobody uses back, every so many steps; nothing on other devices."""

    def __init__(self, every: int) -> None:
        """Starts counting.

        Args:
            every: steps.
        """
        self.every = every

    def after_step(self, step: int, device: torch.device) -> bool:
        """Clears the cache when it is time.

        Args:
            step: that is over, from 0.
            device: of the Gaussians.

        Returns:
            Whether it did.
        """
        if device.type != "cuda" or (step + 1) % self.every:
            return False
        torch.cuda.empty_cache()
        return True


def gaps_mib(device: torch.device) -> float:
    """Memory of a CUDA device lost in gaps that are too small to be used again, MiB; 0 on other devices.

    (reserved − allocated), which is often called fragmentation, counts the cache, which is no loss.
    """
    if device.type != "cuda":
        return 0.0
    return torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0) / 2**20
