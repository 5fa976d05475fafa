"""A snapshot: what is known of the memory of a run after a training step."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from f3rm_ext.profiling.census import CATEGORIES, TensorStorage
from f3rm_ext.profiling.memory import MIB

LARGE_BYTES = 10 * MIB
"""Tensors from this size on are counted as large."""
MOST_LISTED = 20
"""Largest tensors, and groups of other ones, that a snapshot lists."""


@dataclass(frozen=True)
class Snapshot:
    """Memory after a training step, when its gradients are still there and its graph is gone. All sizes in bytes."""

    step: int
    seconds: float
    """Since the profile began."""
    categories: dict[str, int]
    """Tensors on the training device by category."""
    host: dict[str, int]
    """Tensors in main memory by category; empty on the CPU, where ``categories`` has them."""
    named: dict[str, dict[str, int]]
    """Parameters with their gradients and moments: by group, such as "harmonics", then by category."""
    dtypes: dict[str, int]
    """Tensors on the training device by dtype."""
    largest: list[dict[str, Any]]
    """Name, category, dtype, shape and bytes of the largest tensors."""
    groups: dict[str, list[int]]
    """Count and bytes of tensors without a fixed owner (buffers, other) that are alike, the largest groups."""
    tensors: int
    large: int
    """Number of tensors of at least :data:`LARGE_BYTES`."""
    activations: int
    """What autograd kept between the forward and backward pass of this step."""
    resident: int
    allocated: int | None = None
    """By torch on a CUDA device, like the next two; see :class:`~f3rm_ext.profiling.memory.AllocatorState`."""
    reserved: int | None = None
    gaps: int | None = None
    device_used: int | None = None
    """Memory in use on the whole GPU, by NVML."""
    device_total: int | None = None
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    """Peaks since the last snapshot by phase: ``tensors`` (on the CPU: the process), and ``device`` by NVML."""
    spill: str = "none"
    spilled: int = 0
    suspect: list[str] = field(default_factory=list)
    """Figures that contradict each other, in words."""
    memory_options: list[dict[str, str]] = field(default_factory=list)
    """Options that would lower the memory, those that lose least first: ``option``, ``now``, ``lower``,
    ``quality_impact``."""
    cost_ms: float = 0.0
    """Time that the snapshot took."""

    @property
    def total(self) -> int:
        """All tensors on the training device."""
        return sum(self.categories.values())

    @property
    def fragmentation_percent(self) -> float:
        """Share of gaps in what torch has reserved; 0 on the CPU."""
        return 100 * (self.gaps or 0) / self.reserved if self.reserved else 0.0

    @property
    def cache(self) -> int:
        """Reserved memory that is neither in tensors nor in gaps: it is used again, so it is no loss."""
        return max(0, (self.reserved or 0) - (self.allocated or 0) - (self.gaps or 0))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Snapshot":
        """Restores a snapshot; ignores entries of later versions.

        Raises:
            TypeError: an entry is missing.
        """
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def tensor_totals(storages: Iterable[TensorStorage], device: str) -> dict[str, Any]:
    """Sums up tensors, as the entries of a :class:`Snapshot`."""
    everything = list(storages)
    here = [one for one in everything if one.device == device]
    by_name: dict[str, dict[str, int]] = {}
    dtypes: dict[str, int] = {}
    groups: dict[str, list[int]] = {}
    for one in here:
        dtypes[one.dtype] = dtypes.get(one.dtype, 0) + one.bytes
        if one.category in ("parameters", "gradients", "optimizer"):
            group = by_name.setdefault(one.kind, {})
            group[one.category] = group.get(one.category, 0) + one.bytes
        elif one.category in ("buffers", "other"):
            entry = groups.setdefault(_group_name(one.name), [0, 0])
            entry[0] += 1
            entry[1] += one.bytes
    largest = sorted(everything, key=lambda one: -one.bytes)[:MOST_LISTED]
    kept = sorted(groups.items(), key=lambda item: -item[1][1])[:MOST_LISTED]
    return {
        "categories": _sum_categories(here),
        "host": {} if device == "cpu" else _sum_categories(one for one in everything if one.device == "cpu"),
        "named": by_name,
        "dtypes": dtypes,
        "largest": [
            {"name": one.name, "category": one.category, "dtype": one.dtype, "shape": list(one.shape)}
            | {"bytes": one.bytes, "device": one.device}
            for one in largest
        ],
        "groups": dict(kept),
        "tensors": len(everything),
        "large": sum(one.bytes >= LARGE_BYTES for one in everything),
    }


def _sum_categories(storages: Iterable[TensorStorage]) -> dict[str, int]:
    sums: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for one in storages:
        sums[one.category] += one.bytes
    return sums


def _group_name(name: str) -> str:
    """Returns the path of a tensor without positions in lists.

    >>> _group_name("history.12"), _group_name("unnamed float32 [3, 4]")
    ('history.*', 'unnamed float32 [3, 4]')
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
