"""What snapshots show that a person should know: leaks, gaps, spilled memory, figures that cannot be right."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from f3rm_ext.profiling.memory import MIB, readable
from f3rm_ext.profiling.snapshot import Snapshot

FRAGMENTED_PERCENT = 40.0
"""Share of gaps in reserved memory above which to warn."""
_WORTH_BYTES = 256 * MIB
"""Reserved memory below which gaps do not matter."""
_LEAST_LEAK, _LEAST_LEAK_SHARE = MIB, 0.01
"""A leak has to reach so many bytes, and this share of all tensors."""
_LEAST_GROWTH = 16 * 1024
"""Bytes between two snapshots that count as growth."""
_LEAST_SNAPSHOTS, _GROWING = 4, 0.8
"""Snapshots that it takes to see a leak, and the share of intervals in which memory has to grow."""


@dataclass(frozen=True)
class Finding:
    """Something to warn of."""

    kind: Literal["leak", "fragmentation", "spill", "large", "suspect"]
    text: str
    """One or two sentences."""


def findings(snapshots: Sequence[Snapshot]) -> list[Finding]:
    """Returns what the snapshots of one process show, the gravest first."""
    results = [_leak(snapshots), _spill(snapshots), _fragmentation(snapshots), _large(snapshots), _suspect(snapshots)]
    return [finding for finding in results if finding is not None]


def unexplained_growth(before: Snapshot, after: Snapshot) -> int:
    """Returns the bytes that were added between two snapshots and that neither Gaussians nor data explain.

    Buffers may grow as much as the parameters. On CUDA, memory that torch has allocated beyond all tensors found counts
    too: functions keep tensors that Python does not see.
    """
    ratio = after.categories["parameters"] / max(1, before.categories["parameters"])
    grown = after.categories["other"] - before.categories["other"]
    grown += after.categories["buffers"] - int(before.categories["buffers"] * max(1.0, ratio))
    if before.allocated is not None and after.allocated is not None:
        grown += (after.allocated - after.total) - int((before.allocated - before.total) * max(1.0, ratio))
    return grown


def _leak(snapshots: Sequence[Snapshot]) -> Finding | None:
    settled = snapshots[1:]  # what the first steps create stays
    if len(settled) < _LEAST_SNAPSHOTS:
        return None
    growth = [unexplained_growth(*pair) for pair in pairwise(settled)]
    first, last, total = settled[0], settled[-1], sum(growth)
    growing = sum(one > _LEAST_GROWTH for one in growth) / len(growth)
    if growing < _GROWING or total < max(_LEAST_LEAK, _LEAST_LEAK_SHARE * last.total):
        return None
    steps = max(1, last.step - first.step)
    text = (
        f"Memory leaks: {readable(total)} more between steps {first.step} and {last.step}, about "
        f"{readable(100 * total / steps)} in 100 steps, that neither parameters nor images explain."
    )
    groups = {name: (entry[1] - first.groups.get(name, [0, 0])[1], entry) for name, entry in last.groups.items()}
    culprit = max(groups.items(), key=lambda item: item[1][0], default=None)
    if culprit is not None and culprit[1][0] > total / 4:
        name, (_, (count, size)) = culprit
        text += f" Most of it is in {count} × {name} ({readable(size)}; {first.groups.get(name, [0, 0])[0]} before)."
    elif last.allocated is not None:
        text += " Python holds no tensor for it: a function or a hook of autograd does."
    return Finding("leak", text)


def _fragmentation(snapshots: Sequence[Snapshot]) -> Finding | None:
    worst = max(snapshots, key=lambda one: one.fragmentation_percent, default=None)
    if worst is None or worst.fragmentation_percent <= FRAGMENTED_PERCENT or (worst.reserved or 0) < _WORTH_BYTES:
        return None
    return Finding(
        "fragmentation",
        f"Gaps take {worst.fragmentation_percent:.0f} % of the memory that torch has reserved "
        f"({readable(worst.gaps or 0)} of {readable(worst.reserved or 0)}, step {worst.step}): start with "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    )


def _spill(snapshots: Sequence[Snapshot]) -> Finding | None:
    worst = max(snapshots, key=lambda one: one.spilled, default=None)
    if worst is not None and worst.spill == "found":
        return Finding(
            "spill",
            f"At least {readable(worst.spilled)} have spilled from the GPU into main memory (step {worst.step}), where "
            "they are slower by far: lower the memory until it fits.",
        )
    unknown = [one.step for one in snapshots if one.spill == "unknown"]
    if unknown:
        return Finding(
            "spill",
            f"Whether memory has spilled into main memory cannot be seen here (step {unknown[0]}): this driver moves "
            "it there when the GPU is full, without telling.",
        )
    return None


def _large(snapshots: Sequence[Snapshot]) -> Finding | None:
    strays = [one for one in snapshots[-1].largest if one["category"] == "other"] if snapshots else []
    strays = [one for one in strays if one["bytes"] >= max(16 * MIB, 0.05 * snapshots[-1].total)]
    if not strays:
        return None
    examples = ", ".join(f"{one['name']} ({readable(one['bytes'])})" for one in strays[:3])
    return Finding("large", f"Large tensors that no part of the run owns: {examples}.")


def _suspect(snapshots: Sequence[Snapshot]) -> Finding | None:
    doubts = {text: one.step for one in reversed(snapshots) for text in one.suspect}
    if not doubts:
        return None
    examples = "; ".join(f"{text} (step {step})" for text, step in doubts.items())
    return Finding("suspect", f"Some figures cannot be right: {examples}.")


def doubts(snapshot: Snapshot, on_cuda: bool) -> list[str]:
    """Returns which figures of a snapshot contradict each other.

    Args:
        on_cuda: whether the training device is a GPU; elsewhere, untouched or swapped pages count as tensors but not as
            resident memory.
    """
    results = []
    peak = max((values.get("tensors", 0) for values in snapshot.phases.values()), default=0)
    if on_cuda and peak < snapshot.total:
        results.append(f"the peak ({readable(peak)}) is below the tensors that are there ({readable(snapshot.total)})")
    if on_cuda and (snapshot.allocated or 0) < 0.99 * snapshot.total:
        results.append(f"torch has allocated {readable(snapshot.allocated or 0)}, less than the tensors there")
    if (
        snapshot.spill == "none"
        and snapshot.device_used is not None
        and snapshot.device_used < (snapshot.reserved or 0)
    ):
        results.append(f"the GPU has {readable(snapshot.device_used)} in use, less than torch has reserved")
    if not on_cuda and snapshot.resident < 0.5 * snapshot.total:
        results.append("less than half of the tensors are in physical memory: swapped, or never written")
    return results
