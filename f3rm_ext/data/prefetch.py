"""Makes the next window or batch in a background thread, and reads images on several."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

DECODE_THREADS = min(8, max(4, os.cpu_count() or 1))
"""Threads that read images."""
SLOW_S = 5.0
"""Seconds of waiting for a window that are worth a word."""

PartT = TypeVar("PartT")
LoadedT = TypeVar("LoadedT")


class LoadCancelled(Exception):
    """Raised by a load function that was told to stop."""


class Prefetcher(Generic[LoadedT]):
    """Loads one thing at a time, a window or a batch, in one thread.

    :meth:`take` raises the errors of the load function. At most one loaded thing is held, and none once :meth:`take`
    has handed it out. The first request starts the thread.

    Args:
        load: makes the window of the given images, or whatever the numbers stand for. Its second argument is a
            function; once that returns True, it should raise :class:`LoadCancelled` soon.
    """

    def __init__(
        self, load: Callable[[tuple[int, ...], Callable[[], bool]], LoadedT], thread: str = "f3rm-ext-window"
    ) -> None:
        self._load, self._thread = load, thread
        self._executor: ThreadPoolExecutor | None = None
        self._key: tuple[int, ...] | None = None
        self._future: Future[LoadedT] | None = None
        self._stop = threading.Event()

    def request(self, key: tuple[int, ...]) -> None:
        """Starts loading these images, or whatever the numbers stand for. A repeated request does nothing."""
        if self._future is not None and self._key == key:
            return
        self._drop()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._thread)
        self._stop = stop = threading.Event()
        self._key = key
        self._future = self._executor.submit(self._load, key, stop.is_set)

    def take(self, key: tuple[int, ...], slow: Callable[[], None] = lambda: None) -> LoadedT:
        """Returns what these numbers stand for: waits for it, or loads it if it was not requested. ``slow`` is called
        if that takes more than some seconds."""
        self.request(key)
        future, self._future, self._key = self._future, None, None
        assert future is not None
        if not wait([future], SLOW_S).done:
            slow()
        return future.result()

    def close(self) -> None:
        """Stops the thread and drops what it has loaded. Another request would start it again."""
        self._drop()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def _drop(self) -> None:
        if self._future is not None:
            self._stop.set()
            self._future.cancel()
        self._future = self._key = None


def read_each(images: Sequence[int], read: Callable[[int], PartT], stopped: Callable[[], bool]) -> Iterator[PartT]:
    """Reads images on a few threads, and yields the results in order as they come. Raises what ``read`` raises, and
    LoadCancelled once ``stopped`` returns True."""

    def read_one(image: int) -> PartT:
        if stopped():
            raise LoadCancelled
        return read(image)

    if len(images) == 1:
        yield read_one(images[0])
        return
    with ThreadPoolExecutor(max_workers=min(DECODE_THREADS, len(images))) as pool:
        yield from pool.map(read_one, images)
