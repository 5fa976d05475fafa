"""CUDA's memory: how much is free, and remedies for its fragmentation, allocator settings and clearing the cache."""

import os
import sys
from typing import Literal

import torch

from f3rm_ext import compat
from f3rm_ext.data.placement import free_memory

VARIABLE, NEWER_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
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
    given = {name: os.environ[name] for name in (VARIABLE, NEWER_VARIABLE) if os.environ.get(name)}
    if any("expandable_segments" in value or "cudaMallocAsync" in value for value in given.values()):
        return "kept"
    # Torch reads one of the variables, depending on its version.
    settings = {name: f"{value},{SETTING}" for name, value in given.items()} or {VARIABLE: SETTING}
    if torch.cuda.is_initialized() and not compat.set_cuda_allocator(next(iter(settings.values()))):
        return "late"
    os.environ.update(settings)
    return "set"


def clear_cache(step: int, every: int, device: torch.device) -> None:
    """Releases unused memory of CUDA's allocator if the step ends an interval; does nothing on other devices.

    Args:
        every: steps of an interval; 0 for never.
    """
    if device.type == "cuda" and every and (step + 1) % every == 0:
        torch.cuda.empty_cache()


def count_fitting_rows(device: torch.device, row_bytes: int, least: int, most: int) -> int:
    """Returns how many rows to compute at a time on a device: as many as fit in a quarter of its free memory.

    Args:
        row_bytes: temporary memory of a row, bytes.
        least: fewest rows, and the answer for devices other than CUDA.
    """
    free_bytes = free_memory(device) if device.type == "cuda" and torch.cuda.is_available() else 0
    return min(max(least, free_bytes // 4 // max(1, row_bytes)), most)
