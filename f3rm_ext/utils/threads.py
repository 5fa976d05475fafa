"""How a process computes on the CPU: how many threads, what they do while they wait, and the memory they free.

PyTorch and numba start a thread for each core of the machine, and on Linux the threads of GNU OpenMP, which both use,
spin for milliseconds after every parallel loop in case another one follows. Where cores are shared (a container with
a quota, a second program, low priority), spinning threads take the cores from those that have work to do.

So there are as many threads as cores that this process may use, and waiting threads sleep. ``OMP_WAIT_POLICY`` says so
too, but is read when PyTorch is imported, and that is before any plugin of nerfstudio. While it has more threads than
the machine has cores, however, GNU OpenMP spins for microseconds only: a team that does nothing but sleep sees to that.

A step of training allocates and frees the same megabytes again and again. The C library returns them to the system,
which then hands out every page anew: a fifth of the time of a field's step. So freed memory is kept.

Nothing heavier than the standard library is imported when this module is.
"""

import contextlib
import ctypes
import importlib
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path

from f3rm_ext.memory.control_groups import own_groups

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables by which users say themselves how threads wait."""
_asleep: dict[int, bool] = {}
"""OpenMP libraries seen so far, by the address of a function of theirs: whether their waiting threads sleep."""


# --- how many --------------------------------------------------------------------------------------------------------


def _read_quota(folder: Path) -> float | None:
    """Cores that a control group allows, of version 2 or 1; None where it sets no limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cores = float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max", or nothing there
        return None
    return cores if cores > 0 else None


def cpu_quota(folders: Iterable[Path]) -> float | None:
    """Returns the cores, not always whole, that control groups allow; None without a limit."""
    return min((quota for quota in map(_read_quota, folders) if quota is not None), default=None)


def usable_cores() -> int:
    """Cores that this process may use: those it is bound to, and no more than its quota, rounded up."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(own_groups("cpu"))
    return bound if quota is None else min(bound, math.ceil(quota))


# --- how they wait ---------------------------------------------------------------------------------------------------


def _openmp_libraries() -> Iterator[ctypes.CDLL]:
    """Modules through which the OpenMP of PyTorch and that of numba can be called; they may be two libraries."""
    for module in ("torch._C", "numba.np.ufunc.omppool"):
        if module.partition(".")[0] in sys.modules:
            with contextlib.suppress(ImportError, OSError, TypeError):  # numba's is not there without an OpenMP here
                yield ctypes.CDLL(importlib.import_module(module).__file__)


def _start_sleeping_team(library: ctypes.CDLL) -> None:
    """Has GNU OpenMP start more threads than there are cores, and leaves them asleep."""
    size = library.omp_get_num_procs() + 1
    nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)  # some function that does no harm in any thread
    started = threading.Event()

    def own() -> None:
        library.GOMP_parallel(nothing, None, ctypes.c_uint(size), ctypes.c_uint(0))
        started.set()
        threading.Event().wait()  # a team goes when its first thread does

    threading.Thread(target=own, name="f3rm_ext-sleeping-team", daemon=True).start()
    started.wait()


def let_waiting_threads_sleep() -> bool:
    """Keeps the waiting threads of PyTorch, and of numba where it is imported, from spinning; safe to call twice.

    Nothing is done where the environment says how threads wait, and where OpenMP is not GNU's.

    Returns:
        Whether they sleep for all this module knows.
    """
    if any(name in os.environ for name in _WAITING):
        return os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    for library in _openmp_libraries():
        try:
            address = ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
        except AttributeError:
            address = -1
        if address not in _asleep:
            if address > 0:
                _start_sleeping_team(library)
            _asleep[address] = address > 0
    return all(_asleep.values())


# --- what they free --------------------------------------------------------------------------------------------------

_HEAP = {-1: 128 << 20, -3: 32 << 20}
"""Settings of ``mallopt``: bytes that are kept at the end of the heap (M_TRIM_THRESHOLD), and bytes from which an
allocation is returned to the system at once (M_MMAP_THRESHOLD, here its largest value)."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Has glibc keep freed memory for the next allocations; safe to call twice.

    Returns:
        Whether it does. Nothing is changed where the environment says how memory is allocated, or without glibc.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if any(name.startswith("MALLOC_") for name in environment) or "glibc.malloc" in tunables:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return all(mallopt(key, value) for key, value in _HEAP.items())


# --- all -------------------------------------------------------------------------------------------------------------


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what PyTorch and numba read when they are imported, for this process and those it starts.

    What is set already is kept. Does nothing once PyTorch is imported: :func:`settle` is for that.
    """
    if "torch" in sys.modules:
        return
    if not any(name in environment for name in _WAITING):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    _limit(environment, "OMP_NUM_THREADS", "NUMBA_NUM_THREADS")


def _limit(environment: MutableMapping[str, str], *names: str) -> None:
    """Sets variables that are not set to the cores of the quota, where there is one."""
    if cpu_quota(own_groups("cpu")) is not None:
        for name in names:
            environment.setdefault(name, str(usable_cores()))


def settle(*, numba: bool) -> None:
    """Fits the threads of this process to its cores, and has waiting ones sleep; safe to call twice.

    Where numba computes, on the CPU, it is imported, and freed memory is kept. ``OMP_NUM_THREADS`` and
    ``NUMBA_NUM_THREADS`` have precedence.
    """
    import torch

    cores = usable_cores()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cores:
        torch.set_num_threads(cores)
    if numba:
        if "numba" not in sys.modules:
            _limit(os.environ, "NUMBA_NUM_THREADS")  # later it can be changed for single threads only
        with contextlib.suppress(ImportError):  # whoever needs it will say so
            importlib.import_module("numba")
        keep_freed_memory()
    let_waiting_threads_sleep()


def describe() -> str:
    """Cores, quota and threads in one line, for people."""
    import numba
    import torch

    quota = cpu_quota(own_groups("cpu"))
    limit = "no quota" if quota is None else f"a quota of {quota:g}"
    waiting = "sleep" if let_waiting_threads_sleep() else "spin"
    return (
        f"{usable_cores()} of {os.cpu_count()} cores usable ({limit}); {torch.get_num_threads()} threads of PyTorch, "
        f"{numba.config.NUMBA_NUM_THREADS} of numba ({numba_layer()}); waiting threads {waiting}"  # type: ignore[attr-defined]
    )


def numba_layer() -> str:
    """The threading layer that numba takes: the first of tbb, omp and workqueue that is there, unless one is chosen."""
    import numba

    chosen = numba.config.THREADING_LAYER  # type: ignore[attr-defined]
    if chosen in ("tbb", "omp", "workqueue"):
        return chosen
    for layer in ("tbb", "omp"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"numba.np.ufunc.{layer}pool")
            return layer
    return "workqueue"
