"""The processes (ranks) of a data-parallel run: what they tell each other, and that they hold the same parameters."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.nn import Parameter

from f3rm_ext.errors import RankError, reason_of

CHECK_EVERY = 100
"""Steps between two comparisons of the parameters of all ranks."""
PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others, as in nerfstudio. Rank 0 evaluates and saves meanwhile."""
_BUCKET_BYTES = 1 << 20
"""Gradients below this size are reduced together."""


def world_size() -> int:
    """Returns the number of processes of this run; 1 outside of a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Returns the number of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def own_share(total: int) -> int:
    """Returns how many of so many things fall to this process, where things are dealt out one by one.

    >>> own_share(7)  # the only process
    7
    """
    return len(range(total)[rank() :: world_size()])


def is_first() -> bool:
    """Returns whether this process evaluates, writes and speaks for the run: rank 0, or the only process."""
    return rank() == 0


def sum_over_ranks(*tensors: Tensor) -> None:
    """Adds up tensors over all ranks, in place. Every rank must call it with tensors of the same shapes."""
    if world_size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def largest_over_ranks(*tensors: Tensor) -> None:
    """Takes the largest values of all ranks, in place; see :func:`sum_over_ranks`."""
    if world_size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)


def send_from_first(tensors: Iterable[Tensor]) -> None:
    for tensor in (tensor for tensor in tensors if tensor.numel()):
        dist.broadcast(tensor.detach(), src=0)


def small_group(timeout: timedelta = PATIENCE) -> Any:
    """Creates a group of all ranks for small messages between CPUs. Every rank must call it.

    Raises:
        RankError: the processes cannot reach each other.
    """
    try:
        return dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        reason = reason_of(error)
        raise RankError(
            f"The processes of this run cannot reach each other through gloo ({reason}): name the network interface "
            "that connects the machines in $GLOO_SOCKET_IFNAME, such as eth0."
        ) from error


class Ranks:
    """This process among those of its run.

    Numbers that decide what the host does next travel between the CPUs, so that no GPU is waited for. Gradients travel
    on the default group, between the GPUs.
    """

    def __init__(self) -> None:
        """Joins the other ranks, which must do the same. Raises RankError if the processes cannot reach each other."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = small_group()

    def share(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of all ranks, by rank. Every rank must give as many."""
        own = torch.tensor(list(numbers), dtype=torch.int64)
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(everyone, own, group=self._group)
        return [item.tolist() for item in everyone]

    def gather(self, value: Any) -> list[Any] | None:
        """Returns the values of all ranks, by rank, on rank 0; None on the others."""
        everyone: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, everyone, dst=0, group=self._group)
        return everyone

    def gather_rows(self, rows: Shaped[Tensor, "rows *rest"], counts: Sequence[int]) -> list[Tensor]:
        """Returns the rows of all ranks, by rank, on the device of these rows.

        Args:
            counts: number of rows of each rank, see :meth:`share`.
        """
        most = max(counts)
        own = rows.new_zeros(most, *rows.shape[1:])
        own[: len(rows)] = rows
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        if most:
            dist.all_gather(everyone, own)
        return [item[:count] for item, count in zip(everyone, counts, strict=True)]

    def collect_rows(self, rows: Shaped[Tensor, "rows *rest"], counts: Sequence[int]) -> Tensor | None:
        """Returns the rows of all ranks, by rank, in the CPU's memory on rank 0; None on the others.

        Args:
            counts: number of rows of each rank, see :meth:`share`.
        """
        own = rows.detach().cpu().contiguous()
        if self.rank:
            if own.numel():
                dist.send(own.view(torch.uint8), dst=0, group=self._group)
            return None
        whole = own.new_empty(sum(counts), *own.shape[1:])
        first, *others = whole.split(list(counts))
        first.copy_(own)
        for source, part in enumerate(others, start=1):
            if part.numel():
                dist.recv(part.view(torch.uint8), src=source, group=self._group)
        return whole

    def sum_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Adds up dense gradients over all ranks: large ones in place, small ones as one tensor.

        Args:
            parameters: with a gradient, the same on every rank.
        """
        gradients = []
        for parameter in parameters:
            if parameter.grad is not None and parameter.numel():
                parameter.grad = parameter.grad.contiguous()
                gradients.append(parameter.grad)
        small = [gradient for gradient in gradients if gradient.nbytes < _BUCKET_BYTES]
        works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients if gradient.nbytes >= _BUCKET_BYTES]
        # Sorted, since a set has another order on every rank, and reductions are matched by their order.
        for dtype in sorted({gradient.dtype for gradient in small}, key=str):
            same = [gradient for gradient in small if gradient.dtype == dtype]
            bucket = torch.cat([gradient.reshape(-1) for gradient in same])
            dist.all_reduce(bucket)
            parts = bucket.split([gradient.numel() for gradient in same])
            for gradient, part in zip(same, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        for work in works:
            if work is not None:
                work.wait()

    def require_same(self, named: Iterable[tuple[str, Tensor]], when: str) -> None:
        """Compares tensors of all ranks bit by bit, by a checksum each.

        Args:
            named: name and tensor, in the same order on every rank.
            when: for the message, such as "after step 100".

        Raises:
            RankError: they differ.
        """
        names, sums = [], []
        for name, tensor in named:
            names.append(name)
            sums += [torch.tensor(len(tensor) if tensor.dim() else 1), checksum(tensor).cpu()]
        counts = {tuple(row) for row in self.share([len(names)])}
        everyone = self.share([int(value) for value in sums]) if len(counts) == 1 else []
        for index, name in enumerate(names):
            if len({tuple(row[2 * index : 2 * index + 2]) for row in everyone}) != 1:
                raise RankError(
                    f"The processes of this run no longer hold the same parameters ({name} differs {when}), so what "
                    "they would go on to train is undefined: resume from the last checkpoint, and report this if it "
                    "happens again on GPUs of one type."
                )


def checksum(tensor: Tensor) -> Tensor:
    """Returns an integer that depends on every bit of a tensor and on the order of its rows, on the tensor's device.

    >>> same = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> int(checksum(same)) == int(checksum(same.clone())), int(checksum(same)) == int(checksum(same.flip(0)))
    (True, False)
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(integers[tensor.element_size()])
    if not bits.numel():
        return torch.zeros((), dtype=torch.int64, device=bits.device)
    by_row = bits.reshape(len(bits) if bits.dim() else 1, -1).sum(dim=1, dtype=torch.int64)
    return (by_row * torch.arange(1, len(by_row) + 1, device=by_row.device)).sum()  # overflow wraps around
