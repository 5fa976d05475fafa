"""Ranks that are threads of one process: what is asked of ``torch.distributed`` with NCCL."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pretend.tensors import PretendCuda

_PATIENCE_S = 60.0


class ThreadRanks:
    """As many ranks as threads, which meet for each operation."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent = [0] * size
        """Bytes that each rank gave to operations."""
        self._here = threading.local()
        self._barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self._table: list[Any] = [None] * size

    @property
    def rank(self) -> int:
        """Number of this thread."""
        return self._here.rank

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Runs work on every rank, given its number; returns the results by rank."""

        def on_rank(rank: int) -> Any:
            self._here.rank = rank
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with self._patched(), ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(on_rank, rank) for rank in range(self.size)]
            errors = [error for future in futures if (error := future.exception()) is not None]
            if errors:
                raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
            return [future.result() for future in futures]

    def exchange(self, value: Any) -> list[Any]:
        """What all ranks give, by rank."""
        tensors = value if isinstance(value, Sequence) else [value]
        assert all(isinstance(tensor, PretendCuda) and tensor.is_contiguous() for tensor in tensors)
        self.sent[self.rank] += sum(tensor.nbytes for tensor in tensors)
        self._table[self.rank] = value
        self._barrier.wait()
        everyone = list(self._table)
        self._barrier.wait()
        return everyone

    @contextmanager
    def _patched(self) -> Iterator[None]:
        def one_to_each(found: Tensor, own: Tensor) -> None:
            assert found.shape == own.shape == (self.size,) and found.dtype == own.dtype
            found.copy_(torch.stack([theirs[self.rank] for theirs in self.exchange(own)]))

        def gather(found: list[Tensor], own: Tensor) -> None:
            for one, value in zip(found, self.exchange(own), strict=True):
                assert one.shape == value.shape and one.dtype == value.dtype
                one.copy_(value)

        def to_all(found: list[Tensor], own: list[Tensor]) -> None:
            self._to_all(found, own)

        def to_all_with_gradient(found: list[Tensor], own: Sequence[Tensor]) -> Any:
            return _ToAll.apply(self, found, *own)

        import torch.distributed.nn.functional as collectives

        with (
            mock.patch.object(torch.distributed, "get_rank", lambda *_: self.rank),
            mock.patch.object(torch.distributed, "get_world_size", lambda *_: self.size),
            mock.patch.object(torch.distributed, "all_to_all_single", one_to_each),
            mock.patch.object(torch.distributed, "all_gather", gather),
            mock.patch.object(torch.distributed, "all_to_all", to_all),
            mock.patch.object(collectives, "all_to_all", to_all_with_gradient),
        ):
            yield

    def _to_all(self, found: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        assert len(found) == len(own) == self.size
        for one, theirs in zip(found, self.exchange(list(own)), strict=True):
            assert one.shape == theirs[self.rank].shape and one.dtype == theirs[self.rank].dtype
            one.copy_(theirs[self.rank])


class _ToAll(torch.autograd.Function):
    """As that of ``torch.distributed.nn``, which fills the list it is given."""

    @staticmethod
    def forward(ctx: Any, ranks: ThreadRanks, found: list[Tensor], *own: Tensor) -> Any:
        ctx.ranks, ctx.shapes = ranks, [tensor.shape for tensor in own]
        ranks._to_all(found, own)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = [grads[0].new_empty(shape) for shape in ctx.shapes]
        ctx.ranks._to_all(back, [grad.contiguous() for grad in grads])
        return None, None, *back
