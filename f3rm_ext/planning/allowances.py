"""Memory that no tensor takes, and what is assumed where options leave it open."""

CONTEXT_BYTES = 500 << 20
"""What CUDA itself takes on a device: context, modules and cuBLAS's workspace. 300 to 600 MiB are usual (PyTorch's
notes on CUDA semantics, "Memory management"); nothing here was measured on a GPU."""
FRAGMENTATION = 0.05
"""Share of the peak that lies in gaps between blocks of torch's allocator, an allowance. Blocks above 1 MiB are rounded
up to 2 MiB (PyTorch's CUDACachingAllocator), so the share is small where tensors are large."""
CPU_FRAGMENTATION = 0.1
"""The same for a process on the CPU, whose C library keeps some of what was freed: benchmarks/plan_memory.py."""
PROCESS_BYTES = 32 << 20
"""What a process on the CPU takes beside tensors and arrays once training has begun, such as oneDNN's kernels: about
this much in the smallest runs of benchmarks/plan_memory.py."""
TILES_PER_GAUSSIAN = 4
"""Tiles of 16 × 16 pixels in which a visible Gaussian lies, on average; decides how long the lists of the tiles are. An
assumption."""
REFLECTIVE = 0.2
"""Share of Gaussians with a remainder, for selective storage; the share of benchmarks/splat_memory.py."""
QUERY_PX = (1920, 1080)
"""Width and height of the viewer's picture of a query."""


def on_the_device(device_type: str, tensors_bytes: int) -> int:
    """Returns what tensors take on a device, with CUDA's own memory.

    Args:
        device_type: of the device.
        tensors_bytes: of all tensors there.
    """
    return tensors_bytes + (CONTEXT_BYTES if device_type == "cuda" else 0)
