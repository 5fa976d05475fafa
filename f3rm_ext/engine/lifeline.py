"""Notices when another process of a run ends, however it ends, so that no process waits for it for ever."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from f3rm_ext import errors
from f3rm_ext.engine.ranks import small_group
from f3rm_ext.errors import RankError, UserError

_BEAT_S = 1.0
_SILENCE = timedelta(minutes=5)
"""How long a process may give no sign of life, for a machine that is cut off. An ended process is noticed at once."""
_VERDICT_S = 3.0
"""How long an error waits for the news that another process has ended, which would explain it."""
_GRACE_S = 5.0
"""How long the main thread has to leave by itself once another process has ended, before this one is ended."""


class Lifeline:
    """A thread that exchanges signs of life with all other ranks.

    The main thread may hang in a collective operation whose partner is gone, for as long as the time limit of the
    process group. This thread hears of the end at once, since the kernel closes the connections of an ended process.
    """

    def __init__(self, rank: int, size: int, how_to_resume: Callable[[], str]) -> None:
        """Starts the thread. Every rank must do so.

        Args:
            how_to_resume: a sentence for the user, without the full stop.

        Raises:
            RankError: the processes cannot reach each other.
        """
        self._rank, self._size, self._resume_sentence = rank, size, how_to_resume
        self._group = small_group(_SILENCE)
        self._leaves, self._lost, self._left = threading.Event(), threading.Event(), threading.Event()
        self.busy = threading.RLock()
        """Held while a checkpoint is written, which is finished first."""
        self._thread = threading.Thread(target=self._watch, name="f3rm-ext-lifeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits until all ranks are done, as long as it takes; their ends are no loss from now on.

        Raises:
            RankError: another process has ended before it was done.
        """
        self._leaves.set()
        self._thread.join()
        if self._lost.is_set():
            self._left.set()
            raise self._loss()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Ends this process with one sentence where its run has to end, whichever rank is the reason.

        Raises:
            SystemExit: of a mistake of the user, with code 2, after rank 0 has said what is wrong.
            Exception: any other exception that is not the end of another process.
        """
        try:
            yield
        except UserError as error:
            # The same mistake ends all ranks: one of them says so.
            if self._rank == 0 or not self._lost.wait(_VERDICT_S):
                errors.report(error)
            self._left.set()
            raise SystemExit(errors.EXIT_CODE) from error
        except Exception:
            if self._lost.wait(_VERDICT_S):
                self._end()
            self._left.set()
            raise
        except (SystemExit, KeyboardInterrupt):
            self._left.set()
            raise

    def _watch(self) -> None:
        all_leave = torch.zeros(1, dtype=torch.int32)
        # The minimum over ranks is 1 only once every rank leaves. A rank that dies leaves no answer, and gloo raises
        # in all others: this thread notices it even while the main thread hangs in an operation of NCCL.
        while not all_leave[0]:
            all_leave[0] = self._leaves.is_set()
            try:
                dist.all_reduce(all_leave, op=dist.ReduceOp.MIN, group=self._group)
            except RuntimeError:
                self._lost.set()
                # Closing says it by itself; an error of the main thread may be on its way there.
                if not self._leaves.is_set() and not self._left.wait(_GRACE_S):
                    self._end()
                return
            self._leaves.wait(_BEAT_S)

    def _loss(self) -> RankError:
        return RankError(
            f"Another of the {self._size} processes of this run has ended (see its message), so this one ends too: "
            f"{self._resume_sentence()}."
        )

    def _end(self) -> None:
        """Ends the process although threads may hang in operations that nobody will complete."""
        with self.busy:
            self._left.set()
            errors.report(self._loss())
            sys.stdout.flush()
            os._exit(errors.EXIT_CODE)
