"""Kernels written for Triton, pretended: its interpreter runs them on what the tensors hold, and each counts as one.

Kernels must be imported while ``TRITON_INTERPRET`` is 1 in the environment.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from pretend.ledger import note_launch, uncounted
from pretend.tensors import PretendCuda, on_the_cpu


class _Launcher:
    def __init__(self, kernel: Any, start: Any) -> None:
        self.kernel, self.start = kernel, start

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        note_launch(f"triton.{self.kernel.fn.__name__}")
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        assert all(isinstance(tensor, PretendCuda) for tensor in tensors), "a kernel got a tensor that is not on CUDA"
        if any(tensor.held.is_meta for tensor in tensors):  # type: ignore[attr-defined]
            return  # there are no values to compute
        held = [value.held if isinstance(value, PretendCuda) else value for value in args]
        named = {name: value.held if isinstance(value, PretendCuda) else value for name, value in kwargs.items()}
        with uncounted(), on_the_cpu():
            self.start(*held, **named)


@contextmanager
def triton_kernels() -> Iterator[None]:
    """Has Triton's kernels take pretended tensors, if Triton is installed."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        yield
        return
    start = InterpretedFunction.__getitem__
    with ExitStack() as stack:
        for owner, name, value in (
            (InterpretedFunction, "__getitem__", lambda kernel, grid: _Launcher(kernel, start(kernel, grid))),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_of", lambda *_: nullcontext()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
