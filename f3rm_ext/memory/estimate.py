"""An estimate of memory: bytes by category and phase, with what a device or a process holds beside tensors."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Category = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "buffers",
    "images",
    "features",
    "activations",
    "workspace",
    "context",
    "fragmentation",
]
"""What memory holds. Images and features are those that the datamanager caches; workspace is what a step needs besides
the tensors that autograd keeps; context is what CUDA itself takes, or on the CPU the process without tensors;
fragmentation is an allowance."""

Phase = Literal["train", "evaluation", "lifting", "query"]
"""A training step, an evaluation picture, the lifting of features after the last step, or a viewer query."""

CONTEXT_BYTES = 500 << 20
"""What CUDA itself takes on a device: context, modules and cuBLAS's workspace. 300 to 600 MiB are usual (PyTorch's
notes on CUDA semantics, "Memory management"). An assumption."""
FRAGMENTATION = 0.05
"""Share of the peak that lies in gaps between blocks of torch's allocator, an assumption. Blocks above 1 MiB are
rounded up to 2 MiB (PyTorch's CUDACachingAllocator), so the share is small where tensors are large."""
CPU_FRAGMENTATION = 0.1
"""The same share for a process on the CPU, whose C library keeps some freed memory: benchmarks/plan_memory.py."""
PROCESS_BYTES = 32 << 20
"""How much a process on the CPU grows besides tensors and arrays once training has begun, for example for oneDNN's
kernels: about this much in the smallest runs of benchmarks/plan_memory.py."""
LIBRARIES_BYTES = 870 << 20
"""What the process of a run on the CPU takes besides tensors and torch's libraries: Python, nerfstudio with all its
imports, and compiled kernels. Measured by benchmarks/plan_process.py."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of a run, by phase and category."""

    device: Mapping[Phase, Mapping[Category, int]]
    """Bytes on the device at the peak of each phase. On the CPU this is the process's memory."""
    host: Mapping[Category, int] = field(default_factory=dict)
    """Bytes in host memory, such as cached images that stay there. Empty on the CPU."""

    def peak(self, phase: Phase) -> int:
        """Returns the bytes on the device at the peak of a phase."""
        return sum(self.device[phase].values())


def add_overhead(tensors: Mapping[Category, int], device_type: str) -> dict[Category, int]:
    """Adds what CUDA or the process takes, and an allowance for fragmentation, to the tensors on a device."""
    cuda, total = device_type == "cuda", sum(tensors.values())
    gaps = round((FRAGMENTATION if cuda else CPU_FRAGMENTATION) * total)
    return {**tensors, "context": CONTEXT_BYTES if cuda else PROCESS_BYTES, "fragmentation": gaps}


def tensor_budget(memory_bytes: int, device_type: str) -> float:
    """Returns the bytes of tensors that fit into a memory; the inverse of :func:`add_overhead`."""
    cuda = device_type == "cuda"
    free = memory_bytes - (CONTEXT_BYTES if cuda else PROCESS_BYTES)
    return free / (1 + (FRAGMENTATION if cuda else CPU_FRAGMENTATION))


@functools.cache
def process_bytes() -> int:
    """Returns what the process of a run on the CPU takes besides tensors.

    Torch's libraries account for most of the difference between machines, since a build for CUDA has more of them:
    their size is read from this process.
    """
    return LIBRARIES_BYTES + mapped_bytes("torch", "nvidia")


def mapped_bytes(*packages: str) -> int:
    """Returns the resident memory of the libraries of Python packages in this process; 0 where the system hides it.

    Args:
        packages: names of the folders that contain the libraries' files.
    """
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 0
    total_kib, is_counted = 0, False
    for line in lines:
        name, *values = line.split()
        if name == "Rss:":
            total_kib += is_counted * int(values[0])
        elif not name.endswith(":"):  # a new mapping: its addresses, and its file at the end
            is_counted = len(values) > 4 and not set(packages).isdisjoint(Path(" ".join(values[4:])).parts)
    return total_kib << 10
