"""Peak memory of a stretch of work, on whichever device does it."""

from pathlib import Path

import torch

MIB = 1024**2


def reset_peak(device: torch.device) -> None:
    """Starts a new stretch. On the CPU this needs Linux; elsewhere the peak since the start of the process stays."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak_mib(device: torch.device) -> float:
    """Peak since the last reset, MiB: memory allocated by torch on CUDA, resident memory of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError, ValueError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
