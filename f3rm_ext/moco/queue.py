"""The ring of keys of earlier steps."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

_NO_IMAGE = -1


class KeyQueue(nn.Module):
    """A ring buffer of the newest keys and the images that they belong to.

    Everything is in the state dict, so a resumed run has the same negatives. The ring starts empty: slots that were
    never written give no negatives. The size (1 or more) need not be a multiple of the batch.
    """

    keys: Float[Tensor, "size dim"]
    image_ids: Int[Tensor, "size"]
    pointer: Int[Tensor, ""]
    filled: Int[Tensor, ""]

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        if size < 1 or dim < 1:
            raise ValueError(f"a queue of {size} keys of dimension {dim}")
        self.register_buffer("keys", torch.zeros(size, dim))
        self.register_buffer("image_ids", torch.full((size,), _NO_IMAGE, dtype=torch.long))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.register_buffer("filled", torch.zeros((), dtype=torch.long))
        self._filled = self._pointer = 0  # the same on the host, so that a step does not wait for a GPU

    @property
    def size(self) -> int:
        """Maximum number of keys."""
        return len(self.keys)

    def __len__(self) -> int:
        return self._filled

    def negatives(self) -> tuple[Float[Tensor, "keys dim"], Int[Tensor, "keys"]]:
        """Returns the keys written so far and their images, as views that the next :meth:`enqueue` overwrites."""
        return self.keys[: self._filled], self.image_ids[: self._filled]

    @torch.no_grad()
    def enqueue(self, keys: Float[Tensor, "batch dim"], image_ids: Int[Tensor, "batch"]) -> None:
        """Overwrites the oldest keys. If there are more keys than slots, the last ones are kept."""
        skipped = max(0, len(keys) - self.size)
        start = (self._pointer + skipped) % self.size
        keys, image_ids = keys[skipped:], image_ids[skipped:]
        places = (start + torch.arange(len(keys), device=self.keys.device)) % self.size
        self.keys[places] = keys.detach().to(self.keys)
        self.image_ids[places] = image_ids.to(self.image_ids)
        self._pointer, self._filled = (start + len(keys)) % self.size, min(self.size, self._filled + len(keys))
        self.pointer.fill_(self._pointer)
        self.filled.fill_(self._filled)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._pointer, self._filled = int(self.pointer), int(self.filled)


def restore_queue(state: dict[str, Tensor], size: int) -> KeyQueue:
    """Returns the ring of a ``KeyQueue.state_dict()``; one of another size has the newest keys."""
    queue = KeyQueue(*state["keys"].shape)
    queue.load_state_dict(state)
    if queue.size == size:
        return queue
    other = KeyQueue(size, queue.keys.shape[1])
    # A full ring overwrites its oldest key next; one that has never been full begins at 0.
    oldest = queue._pointer if len(queue) == queue.size else 0
    order = (oldest + torch.arange(len(queue))) % queue.size
    other.enqueue(queue.keys[order], queue.image_ids[order])
    return other
