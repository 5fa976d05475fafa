"""A background thread for work that must not hold up the viewer."""

import threading
from collections.abc import Callable


class LatestJob:
    """Runs jobs one after the other in a thread of its own. Of the jobs that wait, only the newest is kept.

    The thread ends when there is no more work.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._waiting: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Runs a job as soon as the current one has ended, in place of any job that is waiting.

        Args:
            job: must not raise.
        """
        with self._lock:
            self._waiting = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits until there is no more work.

        Returns:
            False if there still was after ``timeout_s``.
        """
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

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
