"""What autograd keeps of a step between its forward and its backward pass: the activations."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from f3rm_ext.profiling.census import storage_key


class SavedTensors:
    """Bytes of the tensors that autograd has saved, each storage once.

    Tensors that functions keep by other means than ``save_for_backward`` are not seen.

    Args:
        known: tensors that do not count, since they exist anyway, such as parameters.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._sizes = {storage_key(tensor): 0 for tensor in known}
        self._sizes[None] = 0

    @property
    def bytes(self) -> int:
        """Bytes saved so far."""
        return sum(self._sizes.values())

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what is saved inside the ``with`` block. Values are not changed."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        self._sizes.setdefault(storage_key(tensor), tensor.untyped_storage().nbytes())
        return tensor
