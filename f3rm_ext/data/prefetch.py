"""Makes the next window or batch in a background thread, and hands out the window of every step."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, Protocol, TypeVar, runtime_checkable

from f3rm_ext.data.image_cycle import ImageCycle

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
    has handed it out.
    """

    def __init__(
        self, load: Callable[[tuple[int, ...], Callable[[], bool]], LoadedT], thread: str = "f3rm-ext-window"
    ) -> None:
        """The first request starts the thread.

        Args:
            load: makes the window of the given images, or whatever the numbers stand for. Its second argument is a
                function; once that returns True, it should raise :class:`LoadCancelled` soon.
        """
        self._load = load
        self._thread = thread
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
        """Returns what these numbers stand for: waits for it, or loads it if it was not requested.

        Args:
            slow: called if this takes more than some seconds.

        Raises:
            Exception: raised by the load function.
        """
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


@runtime_checkable
class Window(Protocol):
    """The data of a window."""

    @property
    def images(self) -> tuple[int, ...]:
        """The images' indices in the data set."""
        ...


WindowT = TypeVar("WindowT", bound=Window)


def read_each(images: Sequence[int], read: Callable[[int], PartT], stopped: Callable[[], bool]) -> Iterator[PartT]:
    """Reads images on a few threads, and yields the results in order as they come.

    Raises:
        LoadCancelled: ``stopped`` returned True.
        Exception: raised by ``read``.
    """

    def read_one(image: int) -> PartT:
        if stopped():
            raise LoadCancelled
        return read(image)

    if len(images) == 1:
        yield read_one(images[0])
        return
    with ThreadPoolExecutor(max_workers=min(DECODE_THREADS, len(images))) as pool:
        yield from pool.map(read_one, images)


class WindowFeed(Generic[WindowT]):
    """Hands out the window of every step, as an image cycle says. Loads nothing before the first step."""

    def __init__(
        self,
        cycle: ImageCycle,
        load: Callable[[tuple[int, ...], Callable[[], bool]], WindowT],
        *,
        leave: Callable[[], None],
        place: Callable[[WindowT], WindowT] = lambda window: window,
        slow: Callable[[int], None] = lambda images: None,
    ) -> None:
        """Loads nothing yet.

        Args:
            load: makes a window of images in the background, see :class:`Prefetcher`.
            leave: called before a new window begins, while :attr:`window` is still the old one.
            place: moves a loaded window to the device where it is used. Called on the thread that steps, after the
                old window was released.
            slow: called with the number of images of a window for which steps wait for some seconds.
        """
        self.cycle = cycle
        self.prefetcher: Prefetcher[WindowT] = Prefetcher(load)
        self.window: WindowT | None = None
        self.begins = False
        """Whether the last step was the first of its window, even if the window before had the same images."""
        self._leave = leave
        self._place = place
        self._slow = slow
        self._upcoming_requested = False

    def step(self) -> WindowT:
        """Returns the window of the next step. The first step of a window starts loading the one after it.

        Raises:
            Exception: raised by ``load``.
        """
        images = self.cycle.step()
        self.begins = self.cycle.uses == 1
        if self.begins:
            self._leave()
        if self.window is None or self.window.images != images:
            self.window = None  # before the new one is moved to the device
            self.window = self._place(self.prefetcher.take(images, lambda: self._slow(len(images))))
        # After a resume the first step is in the middle of a window, whose successor nobody has requested.
        if self.begins or not self._upcoming_requested:
            upcoming = self.cycle.upcoming()
            if upcoming is not None and upcoming != images:
                self.prefetcher.request(upcoming)
            self._upcoming_requested = True
        return self.window

    def forget(self) -> None:
        """Releases the window; call it after the cycle was moved to another position."""
        self.window = None
        self._upcoming_requested = False

    def close(self) -> None:
        """Stops background loading and releases the window. Another step would start it again."""
        self.prefetcher.close()
        self.window = None
