"""The account of a step: kernels that a GPU would be asked to launch, and places where the host waits for the GPU."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PACKAGES = ("f3rm_ext", "method_configs", "nerfstudio", "gsplat")
"""A place is the innermost line of code of one of these, our own first."""

READS = {
    "_local_scalar_dense": "number",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "equal": "equal",
}
"""Operators that end when the GPU has come to them, since their result or its size is needed on the host."""
MASKED = ("index", "index_put", "index_put_", "_index_put_impl_")
"""Operators that look for the True ones if an index is a mask."""
FREE = {
    "_local_scalar_dense",
    "_unsafe_view",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "is_pinned",
    "is_same_size",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "_reshape_alias",
    "resize_",
    "set_",
    "split",
    "split_with_sizes",
    "unbind",
}
"""Operators beside views that launch no kernel."""


@dataclass(frozen=True, order=True)
class Place:
    """A line of code."""

    module: str
    """File from its package on, as ``f3rm_ext/splat/rendering.py``."""
    function: str
    line: int = field(compare=False)

    @property
    def name(self) -> str:
        """File and function, which stay when lines move."""
        return f"{self.module}:{self.function}"

    def __str__(self) -> str:
        return f"{self.module}:{self.line} in {self.function}"


@dataclass
class Ledger:
    """What happened while it was open."""

    launches: Counter[str] = field(default_factory=Counter)
    """Kernels by operator."""
    modules: Counter[str] = field(default_factory=Counter)
    """Kernels by file."""
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Waits of the host by (place, kind)."""
    lines: dict[tuple[str, str], Place] = field(default_factory=dict)
    """A line of each of these places."""

    @property
    def total(self) -> int:
        """Number of kernels."""
        return sum(self.launches.values())

    @property
    def waited(self) -> int:
        """Number of waits."""
        return sum(self.waits.values())

    def launch(self, name: str) -> None:
        """Enters a kernel."""
        if _counts():
            self.launches[name] += 1
            self.modules[where().module] += 1

    def wait(self, kind: str) -> None:
        """Enters a wait."""
        if _counts():
            place = where()
            self.waits[place.name, kind] += 1
            self.lines.setdefault((place.name, kind), place)


_open: list[Ledger] = []
_paused = 0


def _counts() -> bool:
    """Whether this is the thread of the step, outside of stand-ins."""
    return _paused == 0 and threading.current_thread() is threading.main_thread()


@contextmanager
def counted() -> Iterator[Ledger]:
    """Counts what happens inside, in every account that is open."""
    ledger = Ledger()
    _open.append(ledger)
    try:
        yield ledger
    finally:
        _open.remove(ledger)


@contextmanager
def uncounted() -> Iterator[None]:
    """Counts nothing inside: the work of stand-ins for kernels."""
    global _paused  # noqa: PLW0603
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


def note_launch(name: str) -> None:
    """Enters a kernel in the open accounts."""
    for ledger in _open:
        ledger.launch(name)


def note_wait(kind: str) -> None:
    """Enters a wait in the open accounts."""
    for ledger in _open:
        ledger.wait(kind)


def note_operator(function: Any, arguments: Any, masks: bool) -> None:
    """Enters an operator on the GPU.

    Args:
        masks: whether an index among them is a mask.
    """
    if not _open:
        return
    name = function.overloadpacket._qualified_op_name.partition("::")[2]
    if name in READS:
        note_wait(READS[name])
    elif name in MASKED and masks:
        # One number at the places of a mask is a fill.
        if name == "index" or getattr(arguments[2], "numel", lambda: 2)() > 1:
            note_wait("mask")
    if name not in FREE and not function.is_view:
        note_launch(name)


def where() -> Place:
    """The innermost line of our own code, else of the packages that it calls; ``autograd`` if there is none."""
    theirs: Place | None = None
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith("autograd/graph.py"):
            return theirs or Place("autograd", "backward", 0)
        if path.endswith("pretend/steps.py"):
            return theirs or Place("nerfstudio/engine/trainer.py", "train_iteration", 0)
        for package in PACKAGES:
            start = path.rfind(f"/{package}/")
            if start < 0:
                continue
            place = Place(path[start + 1 :], _function(frame), frame.f_lineno)
            if package == "f3rm_ext":
                return place
            if package != "method_configs":
                theirs = theirs or place
        frame = frame.f_back
    return theirs or Place("autograd", "backward", 0)


def _function(frame: Any) -> str:
    """Name of the function around a frame, whose own code may be a comprehension, in the words of every Python."""
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name
