"""Memory that no tensor takes, and what is assumed where options leave it open."""

import functools

from f3rm_ext.profiling.memory import mapped_bytes

CONTEXT_BYTES = 500 << 20
"""What CUDA itself takes on a device: context, modules and cuBLAS's workspace. 300 to 600 MiB are usual (PyTorch's
notes on CUDA semantics, "Memory management"); nothing here was measured on a GPU."""
CARD_SHARE = 0.95
"""Share of a card's memory that a plan may use: cards report 2 to 4 % less than their data sheets say, and what CUDA
takes is a guess."""
FRAGMENTATION = 0.05
"""Share of the peak that lies in gaps between blocks of torch's allocator, an allowance. Blocks above 1 MiB are rounded
up to 2 MiB (PyTorch's CUDACachingAllocator), so the share is small where tensors are large."""
CPU_FRAGMENTATION = 0.1
"""The same for a process on the CPU, whose C library keeps some of what was freed: benchmarks/plan_memory.py."""
PROCESS_BYTES = 32 << 20
"""By how much a process on the CPU grows beside tensors and arrays once training has begun, such as by oneDNN's
kernels: about this much in the smallest runs of benchmarks/plan_memory.py."""
LIBRARIES_BYTES = 870 << 20
"""What the process of a run on the CPU takes beside tensors and torch's libraries: Python, nerfstudio with all that it
imports, compiled kernels. Measured by benchmarks/plan_process.py."""
TILES_PER_GAUSSIAN = 4
"""Tiles of 16 × 16 pixels in which a visible Gaussian lies, on average; decides how long the lists of the tiles are. An
assumption."""
REFLECTIVE = 0.2
"""Share of Gaussians with a remainder, for selective storage; the share of benchmarks/splat_memory.py."""
QUERY_PX = (1920, 1080)
"""Width and height of the viewer's picture of a query."""
REFINEMENT_BYTES = 120 << 20
"""What a refinement adds to that: Open3D, and what the C library keeps after colours were taken from photos."""


@functools.cache
def process_bytes() -> int:
    """Returns what the process of a run on the CPU takes beside tensors.

    Most of what differs between machines are torch's libraries, which a build for CUDA has more of: they are looked at
    in this process.
    """
    return LIBRARIES_BYTES + mapped_bytes("torch", "nvidia")


def on_the_device(device_type: str, tensors_bytes: int) -> int:
    """Returns what tensors take on a device, with CUDA's own memory.

    Args:
        device_type: of the device.
        tensors_bytes: of all tensors there.
    """
    return tensors_bytes + (CONTEXT_BYTES if device_type == "cuda" else 0)
