"""Copies tensors to the training device ahead of their use, without anyone waiting for the copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device | str) -> Tensor:
    """Copies a few numbers to a device; the host does not wait for a GPU to have them."""
    if torch.device(device).type == "cuda" and values.device.type == "cpu" and torch.cuda.is_available():
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


@dataclass(frozen=True)
class Upload:
    """Tensors on their way to a device."""

    tensors: dict[str, Tensor]
    """The copies; not to be used before :meth:`receive`."""
    arrived: Any = None
    """CUDA event after the copies; None if they are there already."""

    def receive(self) -> dict[str, Tensor]:
        """Returns the copies, for use on the current stream. The stream waits for them, the host does not."""
        if self.arrived is not None and self.tensors:
            stream = torch.cuda.current_stream(next(iter(self.tensors.values())).device)
            stream.wait_event(self.arrived)
            for tensor in self.tensors.values():
                # Otherwise the memory could be given to the next upload while this stream still reads it.
                tensor.record_stream(stream)
        return self.tensors


class Uploader:
    """Copies to a GPU from page-locked memory, on a stream of its own. On other devices it copies as usual.

    Torch's allocator of page-locked memory reuses a buffer once its copy is complete, so no buffer is managed here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns uninitialised memory to fill and send: page-locked if the device is a GPU."""
        if self.device.type != "cuda":
            return torch.empty(shape, dtype=dtype)
        with torch.cuda.device(self.device):
            return torch.empty(shape, dtype=dtype, pin_memory=True)

    def send(self, tensors: Mapping[str, Tensor], *, page_locked: bool = True) -> Upload:
        """Starts copying tensors; on a GPU it returns at once. Callable on any thread.

        Args:
            tensors: on the CPU; they must not be changed afterwards.
            page_locked: copy from page-locked memory, which torch keeps for later copies. Without, the calling thread
                waits for the copy; for what is too large to be held twice.
        """
        if self.device.type != "cuda":
            return Upload({name: tensor.to(self.device) for name, tensor in tensors.items()})
        with torch.cuda.device(self.device):  # a new thread begins with the first device
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)
            with torch.cuda.stream(self._stream):
                copies = {
                    name: (tensor.pin_memory() if page_locked else tensor).to(self.device, non_blocking=True)
                    for name, tensor in tensors.items()
                }
                return Upload(copies, self._stream.record_event())
