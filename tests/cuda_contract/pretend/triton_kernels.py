"""Kernels written for Triton, pretended: its interpreter runs them on what the tensors hold, and each counts as one.

Launches are checked where a GPU would not: tensors are on it and contiguous, and its device is the current one. Kernels
must be imported while ``TRITON_INTERPRET`` is 1 in the environment.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from pretend.ledger import note_launch, uncounted
from pretend.tensors import PretendCuda, on_the_cpu


@dataclass(frozen=True)
class Launch:
    """A kernel that was started."""

    kernel: str
    """Its function."""
    options: dict[str, Any]
    """What was given by name, such as its constants."""


class _Guards:
    """How many guards of the device are entered."""

    entered = 0


@contextmanager
def _guard(*_: Any) -> Iterator[None]:
    _Guards.entered += 1
    try:
        yield
    finally:
        _Guards.entered -= 1


class _Launcher:
    def __init__(self, kernel: Any, start: Any, launches: list[Launch]) -> None:
        self.kernel, self.start, self.launches = kernel, start, launches

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        name = self.kernel.fn.__name__
        note_launch(f"triton.{name}")
        self.launches.append(Launch(name, kwargs))
        # Triton launches on the current device, whichever the tensors are on.
        assert _Guards.entered, f"{name} is launched without torch.cuda.device_of"
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        assert all(isinstance(tensor, PretendCuda) for tensor in tensors), "a kernel got a tensor that is not on CUDA"
        assert all(tensor.is_contiguous() for tensor in tensors), f"{name} got a tensor that is not contiguous"
        if any(tensor.held.is_meta for tensor in tensors):  # type: ignore[attr-defined]
            return  # there are no values to compute
        held = [value.held if isinstance(value, PretendCuda) else value for value in args]
        named = {name: value.held if isinstance(value, PretendCuda) else value for name, value in kwargs.items()}
        with uncounted(), on_the_cpu():
            self.start(*held, **named)


@contextmanager
def triton_kernels() -> Iterator[list[Launch]]:
    """Has Triton's kernels take pretended tensors, if Triton is installed; gives what is launched, as it comes."""
    launches: list[Launch] = []
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        yield launches
        return
    start = InterpretedFunction.__getitem__
    with ExitStack() as stack:
        for owner, name, value in (
            (InterpretedFunction, "__getitem__", lambda kernel, grid: _Launcher(kernel, start(kernel, grid), launches)),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_of", _guard),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield launches
