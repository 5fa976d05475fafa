"""Runs a model on tensors that have a shape and no values, and take no memory.

Torch's fake tensors refuse what depends on values. Here they are answered as the largest case: masks select
everything, and a number read from a tensor is 1. Small tensors that were made outside, such as a camera, keep their
values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten
FEW = 4096
"""Tensors with at most this many numbers keep their values, unless they are fake."""
READS = (aten._local_scalar_dense, aten.is_nonzero, aten.equal)
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index)


@contextmanager
def shapes_only() -> Iterator[None]:
    """While this is entered, new tensors have no values."""
    with FakeTensorMode(allow_non_fake_inputs=True), _LargestCase():
        yield


class _LargestCase(TorchDispatchMode):
    """Answers what depends on values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors(args)
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if all(tensor.numel() <= FEW for tensor in tensors):
                with _disable_current_modes():
                    return function(*args, **kwargs)
        operator = function.overloadpacket
        if operator in READS:
            return _one(args[0].dtype) if operator is aten._local_scalar_dense else True
        first: Any = args[0] if args else None
        if operator is aten.nonzero:
            return first.new_empty((first.numel(), first.dim()), dtype=torch.int64)
        if operator is aten.masked_select:
            return first.new_empty(first.numel())
        if operator in (aten._unique2, aten._unique, aten.unique_consecutive):
            index = first.new_empty(first.numel(), dtype=torch.int64)
            return first.new_empty(first.numel()), index, index
        if operator is aten.bincount:
            return first.new_empty(kwargs.get("minlength", (*args, None, 0)[2]) or first.numel(), dtype=torch.int64)
        if operator in INDEXING and any(_is_mask(index) for index in args[1]):
            return function(args[0], _without_masks(args[1]), *args[2:], **kwargs)
        return function(*args, **kwargs)


def _one(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
    return found


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _without_masks(indices: Any) -> list[Tensor | None]:
    """Replaces masks by the rows that they select: all."""
    found: list[Tensor | None] = []
    for index in indices:
        if _is_mask(index):
            found += [torch.empty(index.numel(), dtype=torch.int64)] * index.dim()
        else:
            found.append(index)
    return found
