"""What a plan says: bytes by category and phase."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
"""What memory is made of. Images and features are the windows that the datamanager holds; workspace is what a step
needs beside what autograd keeps; context is what CUDA itself takes, or on the CPU
the process without tensors; fragmentation is an allowance."""

Phase = Literal["train", "evaluation", "query"]
"""A training step, an evaluation picture, or a viewer query."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of a run, by phase and category."""

    device: Mapping[Phase, Mapping[Category, int]]
    """Bytes on the device at the peak of each phase. On the CPU this is the process's memory."""
    host: Mapping[Category, int] = field(default_factory=dict)
    """Bytes in host memory, such as windows of images that stay there. Empty on the CPU."""

    def peak(self, phase: Phase) -> int:
        """Returns the bytes on the device at the peak of a phase."""
        return sum(self.device[phase].values())
