"""Memory of a device and of this process, as torch's allocator and the kernel count it."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from f3rm_ext.memory.devices import total_bytes

MIB = 1024**2

_observers: list[Callable[[torch.device], None]] = []


def reset_peak(device: torch.device) -> None:
    """Resets the peak. On the CPU this needs Linux; on other systems the peak since the process started remains."""
    for observe in _observers:
        observe(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak_bytes(device: torch.device) -> int:
    """Returns the peak since the last reset: torch's allocations on CUDA, the process's resident memory on CPU.

    Without Linux's /proc it is the peak since the process started, and 0 on Windows, where Python cannot tell it.
    """
    if device.type == "cuda":
        return torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {}).get("peak", 0)
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


@contextmanager
def observed_resets(observe: Callable[[torch.device], None]) -> Iterator[None]:
    """Calls a function before every reset, so that its owner misses no peak."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


@dataclass(frozen=True)
class AllocatorState:
    """Memory that torch's allocator holds on a CUDA device, bytes."""

    allocated: int
    """Memory that tensors hold."""
    reserved: int
    """Taken from the device: tensors, gaps and cache."""
    gaps: int
    """Unused parts of segments that are partly in use (``inactive_split``): the real fragmentation."""


def allocator_state(device: torch.device) -> AllocatorState | None:
    """Returns what torch's allocator holds now; None on devices other than CUDA, which have no such allocator."""
    if device.type != "cuda":
        return None
    statistics = torch.cuda.memory_stats_as_nested_dict(device)

    def now(name: str) -> int:
        return statistics.get(name, {}).get("all", {}).get("current", 0)

    return AllocatorState(now("allocated_bytes"), now("reserved_bytes"), now("inactive_split_bytes"))


def resident_bytes() -> int:
    """Returns the resident memory of this process; its peak where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return peak_bytes(torch.device("cpu"))


def describe_use(device: torch.device) -> str:
    """Says in a line how much memory is in use now and at the recent peak, and how much there is."""
    state, total = allocator_state(device), total_bytes(device)
    now = resident_bytes() if state is None else state.allocated
    text = f"{readable(now)} in use, {readable(peak_bytes(device))} at the last peak"
    if state is not None:
        text += f", {readable(state.reserved)} reserved"
    return f"{text}, of {readable(total)}" if total else text


def readable(count_bytes: float | int) -> str:
    """Formats a number of bytes.

    >>> readable(3 << 30), readable(5 << 20), readable(2000)
    ('3.0 GiB', '5.0 MiB', '2.0 KiB')
    """
    size, units = float(count_bytes), ("KiB", "MiB", "GiB")
    size /= 1024
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f} {units[0]}"
