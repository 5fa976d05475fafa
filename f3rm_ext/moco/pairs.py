"""Pairs of batch and queue for a data set: their negatives, false negatives and optimiser steps.

The ring buffer takes any pair. Only the original code requires the queue to be a multiple of the gathered batch; the
multiple is reported because published configurations are compared by it.
"""

from dataclasses import asdict, dataclass
from typing import Annotated

from f3rm_ext.utils.ranges import Count, Range, check_ranges

MOMENTUM = 0.999
POWERS_OF_TWO = (4096, 16384, 65536)


@dataclass(frozen=True)
class Preset:
    """A named combination of batch, queue and epochs."""

    batch_size: int
    """Images per process and forward pass."""
    queue_size: int
    epochs: int
    gradient_accumulation_steps: int = 4
    use_amp: bool = True
    """Whether the forward pass uses bfloat16."""


PRESETS = {
    "low-vram": Preset(64, 65_536, 300),
    "optimized-16gb": Preset(96, 76_800, 600),
    "batch-80": Preset(80, 64_000, 300),
    "batch-128": Preset(128, 65_536, 300),
}
"""The four configurations of the VRAM guide, for two cards of 8 GB each (16 GB together)."""


@dataclass(frozen=True)
class Pair:
    """A batch and a queue, on a number of images and processes."""

    batch_size: Count
    """Images per process and forward pass."""
    queue_size: Count
    images: Count = 2000
    processes: Count = 1
    """Processes, each with its own batch, whose keys are gathered."""
    gradient_accumulation_steps: Count = 1
    epochs: Count = 300
    momentum: Annotated[float, Range(0, 1, below=True)] = MOMENTUM

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def gathered_batch(self) -> int:
        """Keys that one forward pass of all processes adds."""
        return self.batch_size * self.processes

    @property
    def effective_batch(self) -> int:
        """Images per optimiser step."""
        return self.gathered_batch * self.gradient_accumulation_steps

    @property
    def batches_in_queue(self) -> float:
        """Number of gathered batches that the queue holds.

        >>> round(Pair(96, 65_536).batches_in_queue, 2)
        682.67
        """
        return self.queue_size / self.gathered_batch

    @property
    def is_multiple(self) -> bool:
        """Whether the queue is a multiple of the gathered batch, which only the original code requires."""
        return self.queue_size % self.gathered_batch == 0

    @property
    def same_image_keys(self) -> float:
        """Keys in a full queue that belong to the image of a query, on average: false negatives unless masked.

        Every pass meets each image once, in a new order. The keys of this pass are of other images, those of earlier
        passes are of the query's image with probability 1/N. For long queues this is about K/N − 1/2.

        >>> round(Pair(96, 76_800, images=2000, processes=2).same_image_keys, 1)
        38.0
        """
        batch, batches = self.gathered_batch, max(1, self.images // self.gathered_batch)
        # The queue minus 0, 1, 2 … batches, while that is positive.
        terms = min(batches, -(-self.queue_size // batch))
        total = terms * self.queue_size - batch * (terms * (terms - 1) // 2)
        return total / (batches * self.images)

    @property
    def same_image_share(self) -> float:
        """Share of the queue that belongs to the image of a query, 0 to 1."""
        return self.same_image_keys / self.queue_size

    @property
    def accuracy_ceiling(self) -> float:
        """Approximate best pretext accuracy without masking: 1 / (1 + same-image keys)."""
        return 1 / (1 + self.same_image_keys)

    @property
    def is_advised(self) -> bool:
        """Whether the queue is at most N − B, so that only the end of the previous pass can repeat an image."""
        return self.queue_size <= self.images - self.effective_batch

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the training; incomplete batches are dropped."""
        return self.epochs * (self.images // self.gathered_batch) // self.gradient_accumulation_steps

    @property
    def views(self) -> int:
        """Pictures that the training sees, two views each: images × epochs."""
        return self.images * self.epochs

    @property
    def time_constants(self) -> float:
        """Optimiser steps over the 1 / (1 − m) steps that the key encoder averages."""
        return self.optimizer_steps * (1 - self.momentum)

    def record(self) -> dict[str, int | float | bool]:
        derived = (
            *("gathered_batch", "effective_batch", "batches_in_queue", "is_multiple", "same_image_keys"),
            *("same_image_share", "accuracy_ceiling", "is_advised", "views", "optimizer_steps", "time_constants"),
        )
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def advised_queue(images: int, effective_batch: int) -> int:
    """Returns the longest queue, up to 65,536, that is shorter than a pass: N images − B images per step.

    >>> advised_queue(2800, 64), advised_queue(1_000_000, 256), advised_queue(64, 64)
    (2736, 65536, 1)
    """
    return max(1, min(65_536, images - effective_batch))


def listed_queues(batch_size: int, effective_batch: int, images: int) -> list[int]:
    """Returns the queues to list for a batch: batch × 800, powers of two, and the advised one."""
    return sorted({batch_size * 800, *POWERS_OF_TWO, advised_queue(images, effective_batch)})


def nearest_multiples(queue_size: int, gathered_batch: int) -> list[int]:
    """Returns the multiples of the batch next to a queue size, for code that requires multiples.

    >>> nearest_multiples(76_800, 88), nearest_multiples(65_536, 64)
    ([76736, 76824], [65536])
    """
    below = queue_size // gathered_batch * gathered_batch
    return [queue_size] if below == queue_size else [size for size in (below, below + gathered_batch) if size]
