"""Work that must not hold up the viewer."""

import threading
from collections.abc import Callable


class LatestJob:
    """Runs jobs one after the other in a thread of its own; of those that wait, only the newest.

    The thread lives while there is work.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._waiting: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Runs the job as soon as the one at work has ended; a job that was waiting is forgotten.

        Args:
            job: must not raise.
        """
        with self._lock:
            self._waiting = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits until nothing is left to do.

        Returns:
            Whether that was so in time.
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
