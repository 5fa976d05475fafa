"""Loading the next window in the background while the present one trains."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

LoadedT = TypeVar("LoadedT")


class LoadCancelled(Exception):
    """Raised by a load function that was asked to stop."""


class Prefetcher(Generic[LoadedT]):
    """Loads one window at a time in one thread.

    Errors of the load function are raised by :meth:`take`. At most one loaded window is held, and none after
    :meth:`take` has handed it out.
    """

    def __init__(self, load: Callable[[tuple[int, ...], Callable[[], bool]], LoadedT]) -> None:
        """Nothing is started before the first request.

        Args:
            load: makes a window of these images; it should raise :class:`LoadCancelled` soon after its second
                argument, a function, begins to return True.
        """
        self._load = load
        self._executor: ThreadPoolExecutor | None = None
        self._images: tuple[int, ...] | None = None
        self._future: Future[LoadedT] | None = None
        self._stop = threading.Event()

    @property
    def ready(self) -> bool:
        """Whether the requested window is loaded, so that :meth:`take` will not wait."""
        return self._future is not None and self._future.done()

    def request(self, images: tuple[int, ...]) -> None:
        """Starts loading these images; a request for the same images again does nothing."""
        if self._future is not None and self._images == images:
            return
        self._drop()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="f3rm-ext-window")
        self._stop = stop = threading.Event()
        self._images = images
        self._future = self._executor.submit(self._load, images, stop.is_set)

    def take(self, images: tuple[int, ...]) -> LoadedT:
        """The loaded window of these images; waits for it, or starts loading it where it was not requested.

        Raises:
            Exception: whatever the load function raised.
        """
        self.request(images)
        future, self._future, self._images = self._future, None, None
        assert future is not None
        return future.result()

    def close(self) -> None:
        """Stops the thread and forgets what it has loaded. Another request would start it again."""
        self._drop()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def _drop(self) -> None:
        if self._future is not None:
            self._stop.set()
            self._future.cancel()
        self._future = self._images = None
