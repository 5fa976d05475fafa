"""A background thread for work that must not hold up the viewer."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable

PATIENCE_S = 10.0
"""How long the end of the process waits for jobs, seconds."""
_workers: "weakref.WeakSet[LatestJob]" = weakref.WeakSet()


class LatestJob:
    """Runs jobs one after the other in a thread of its own. Of the jobs that wait, only the newest is kept.

    The thread ends when there is no more work. When the process ends, the current job is given :data:`PATIENCE_S` to
    end, and no other begins: Python would stop the thread amid torch's C++ code, which aborts the process.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._waiting: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        _workers.add(self)

    def submit(self, job: Callable[[], None]) -> None:
        """Runs a job, which must not raise, after the current one, in place of any that waits; not after the end."""
        with self._lock:
            if self._closed:
                return
            self._waiting = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits until there is no more work; returns False if there still was after ``timeout_s``."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """Lets no more job begin. Does not wait for the current one."""
        with self._lock:
            self._closed, self._waiting = True, None

    def _work(self) -> None:
        while True:
            with self._lock:
                job, self._waiting = self._waiting, None
                if job is None:
                    self._thread = None
                    return
            try:
                job()
            except BaseException:
                with self._lock:
                    self._thread = None  # the next job gets a new one
                raise


@atexit.register
def _end_all() -> None:
    """Ends all threads. One that hangs, in a download say, is left to Python, which stops it where it is."""
    workers = list(_workers)
    for worker in workers:
        worker.close()
    until = time.monotonic() + PATIENCE_S
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
