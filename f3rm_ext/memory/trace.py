"""Traces the memory of tensors while torch runs: what is allocated, what is freed, and what is held at the peak."""

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from f3rm_ext.memory.estimate import Category
from f3rm_ext.memory.shapes import DispatchMode, list_tensors, shapes_only

Bytes = dict[Category, int]
BLOCK = 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8
"""Channels that oneDNN, which computes torch's convolutions on the CPU, keeps together (its layouts nChw16c and
nChw8c): as many as a vector register holds. A picture of three channels is copied to so many. For kernels of a single
row or column it keeps the plain layout. Found with torch's profiler on x86 CPUs with AVX-512 and with AVX2."""


class AllocationTracker(DispatchMode):
    """While this is entered, counts the bytes of every storage that an operator returns, until the storage is freed.

    Views share the storage of their base, so they count once. Storages made before are counted by :meth:`label`. What
    operators allocate and free within themselves is not seen. Works on real tensors and on torch's fake ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now: Counter[Category] = Counter()
        """Bytes that are held at present."""
        self.total = 0
        """Their sum."""
        self.peak: Bytes = {}
        """Bytes by category at the moment when most were held."""
        self._peak_bytes = 0
        self._default: Category = "workspace"
        self._known: dict[int, tuple[weakref.ref, int]] = {}
        self._category: dict[int, Category] = {}

    def reset_peak(self) -> None:
        """Starts looking for a new peak."""
        self.peak, self._peak_bytes = dict(self.now), self.total

    @contextmanager
    def allocating(self, category: Category) -> Iterator[None]:
        """While this is entered, new storages are of this category."""
        before, self._default = self._default, category
        try:
            yield
        finally:
            self._default = before

    def label(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Says what tensors are; those that are not known yet count from now on."""
        for tensor in tensors:
            key = self._note(tensor)
            size, before = self._known[key][1], self._category[key]
            self._category[key] = category
            self.now[before] -= size
            self.now[category] += size

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While this is entered, what autograd saves for the backward pass counts as activations."""

        def pack(tensor: Tensor) -> Tensor:
            key = tensor.untyped_storage()._cdata
            if self._category.get(key) == "workspace":
                self.label([tensor], "activations")
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and counts the storages of its results."""
        result = function(*args, **(kwargs or {}))
        for tensor in list_tensors([result]):
            self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> int:
        """Counts the storage of a tensor unless it is known; returns its key."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return key
        size = storage.nbytes()

        def free(_: object) -> None:
            del self._known[key]
            self.now[self._category.pop(key)] -= size
            self.total -= size

        self._known[key] = weakref.ref(storage, free), size
        self._category[key] = self._default
        self.now[self._default] += size
        self.total += size
        if self.total > self._peak_bytes:
            self.reset_peak()
        return key


class BlockedConvolutions(DispatchMode):
    """While this is entered, a convolution allocates and frees its input, weights and result in blocks of channels."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        if function.overloadpacket is torch.ops.aten.convolution and 1 not in args[1].shape[2:]:
            image, weight = args[0], args[1]
            sides = [
                (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
                for side, kernel, stride, padding, dilation in zip(
                    image.shape[2:], weight.shape[2:], args[3], args[4], args[5], strict=True
                )
            ]
            copies = [_to_blocks(image, image.shape[1], image.shape[2:]), _to_blocks(image, weight.shape[0], sides)]
            copies.append(torch.empty_like(weight))
            del copies
        return function(*args, **(kwargs or {}))


def _to_blocks(image: Tensor, channels: int, sides: Any) -> Tensor:
    return image.new_empty(image.shape[0] * -(-channels // BLOCK) * BLOCK * math.prod(sides))


@contextmanager
def tracing(device_type: str, *, arrays: bool = True) -> Iterator[AllocationTracker]:
    """While this is entered, new tensors have no values, and the bytes that they would take are counted.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``, where the real tensors would be.
    """
    with shapes_only(device_type, arrays=arrays), AllocationTracker() as tracker:
        with BlockedConvolutions() if device_type == "cpu" else nullcontext():
            yield tracker
