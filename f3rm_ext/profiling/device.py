"""Memory of a whole GPU, of all its processes, as the driver's library NVML counts it."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from f3rm_ext.errors import reason_of

PERIOD_S = 0.05
"""Seconds between two samples."""
_SLACK_BYTES = 64 << 20
_NEARLY_FULL = 0.97
_KERNEL = Path("/proc/sys/kernel/osrelease")


class DeviceMemory(NamedTuple):
    """Memory of a GPU, bytes."""

    used: int
    """Memory in use by all processes, CUDA's own included."""
    total: int
    """Memory of the GPU."""


class DeviceSampler:
    """Samples the memory in use in a thread of its own, so that peaks between two records are not missed.

    A peak shorter than :data:`PERIOD_S` may still be missed; the peak of torch's allocator has no such gaps.
    """

    def __init__(self, read: Callable[[], DeviceMemory], period_s: float = PERIOD_S) -> None:
        self._read, self._period_s = read, period_s
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._peak = 0
        self.now = read()
        """The last sample."""
        self.problem = ""
        """Why sampling has ended early; empty if it has not."""
        self._thread = threading.Thread(target=self._run, name="f3rm-ext-nvml", daemon=True)
        self._thread.start()

    def take_peak(self) -> int:
        """Returns the largest sample since the last call, one taken now included; bytes."""
        self._sample()
        with self._lock:
            peak, self._peak = self._peak, 0
        return peak

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self._sample()

    def _sample(self) -> None:
        if self.problem:
            return
        try:
            self.now = self._read()
        except Exception as error:  # the driver may go away; training must not
            self.problem = reason_of(error)
            return
        with self._lock:
            self._peak = max(self._peak, self.now.used)


def nvml_reader(device: torch.device) -> Callable[[], DeviceMemory]:
    """Returns a function that reads the memory of a CUDA device by NVML.

    Raises:
        Exception: NVML or its Python package is missing, or does not know the device.
    """
    import pynvml

    pynvml.nvmlInit()
    handle = _handle(pynvml, device)

    def read() -> DeviceMemory:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceMemory(int(memory.used), int(memory.total))

    return read


def start_sampler(device: torch.device) -> tuple[DeviceSampler | None, str]:
    """Starts sampling a device.

    Returns:
        The sampler, and an empty string; or None, and why there is none (empty on devices other than CUDA).
    """
    if device.type != "cuda":
        return None, ""
    try:
        return DeviceSampler(nvml_reader(device)), ""
    except Exception as error:  # a missing package, library, driver or permission
        return None, (
            f"The memory of the whole GPU is not recorded, because NVML cannot be used ({reason_of(error)}): "
            "install nvidia-ml-py. That of torch is recorded all the same."
        )


def _handle(pynvml: Any, device: torch.device) -> Any:
    """Returns NVML's handle of a device. CUDA numbers the visible devices only, NVML all of them."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is not None:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError:  # part of a GPU
            pass
    index = device.index or 0
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if index < len(visible):
        if not visible[index].isdigit():
            return pynvml.nvmlDeviceGetHandleByUUID(visible[index])
        index = int(visible[index])
    return pynvml.nvmlDeviceGetHandleByIndex(index)


Spill = Literal["none", "found", "unknown"]
"""Whether memory of the GPU has moved to main memory; "unknown" if that cannot be seen."""


def drivers_spill() -> bool:
    """Returns whether the driver of this system moves memory to main memory when the GPU is full: Windows and WSL."""
    if os.name == "nt":
        return True
    try:
        return "microsoft" in _KERNEL.read_text().lower()
    except OSError:
        return False


def judge_spill(memory: DeviceMemory | None, reserved: int, spills: bool) -> tuple[Spill, int]:
    """Judges whether memory has spilled from the GPU into main memory, where it is slower by far.

    NVML does not report it, so it shows only where torch holds more than there is.

    Args:
        reserved: by torch's allocator, bytes.

    Returns:
        The verdict, and the least number of bytes that must have spilled.
    """
    if not spills:
        return "none", 0
    if memory is None:
        return "unknown", 0
    least = max(reserved - memory.total, reserved - memory.used)
    if least > _SLACK_BYTES:
        return "found", least
    return ("unknown" if memory.used >= _NEARLY_FULL * memory.total else "none"), 0
