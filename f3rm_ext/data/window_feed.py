"""The window of images in memory, and the next one, which a background thread loads meanwhile."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar, runtime_checkable

from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.prefetch import LoadCancelled, Prefetcher

DECODE_THREADS = 4

PartT = TypeVar("PartT")


@runtime_checkable
class Window(Protocol):
    """What is in memory of a window."""

    @property
    def images(self) -> tuple[int, ...]:
        """The images' indices in the data set."""
        ...


WindowT = TypeVar("WindowT", bound=Window)


def read_each(images: Sequence[int], read: Callable[[int], PartT], stopped: Callable[[], bool]) -> list[PartT]:
    """Reads images on a few threads, in order.

    Raises:
        LoadCancelled: ``stopped`` began to return True.
        Exception: whatever ``read`` raised.
    """

    def read_one(image: int) -> PartT:
        if stopped():
            raise LoadCancelled
        return read(image)

    if len(images) == 1:
        return [read_one(images[0])]
    with ThreadPoolExecutor(max_workers=min(DECODE_THREADS, len(images))) as pool:
        return list(pool.map(read_one, images))


class WindowFeed(Generic[WindowT]):
    """Hands out the loaded window of every step, as a cycle says; nothing is loaded before the first step."""

    def __init__(
        self,
        cycle: ImageCycle,
        load: Callable[[tuple[int, ...], Callable[[], bool]], WindowT],
        *,
        leave: Callable[[], None],
        place: Callable[[WindowT], WindowT] = lambda window: window,
    ) -> None:
        """Sets up.

        Args:
            cycle: which images are in memory when.
            load: makes a window of images in the background, see :class:`Prefetcher`.
            leave: called while the old window is still :attr:`window`, before a new one begins.
            place: moves a loaded window to where it is used; called on the thread that steps, when no other is held.
        """
        self.cycle = cycle
        self.prefetcher: Prefetcher[WindowT] = Prefetcher(load)
        self.window: WindowT | None = None
        self.begins = False
        """Whether the last step was the first of its window, even if the next window has the same images."""
        self._leave = leave
        self._place = place
        self._upcoming_requested = False

    def step(self) -> WindowT:
        """The window for the coming step; the next one is being loaded from its first step on.

        Raises:
            Exception: whatever ``load`` raised.
        """
        images = self.cycle.step()
        self.begins = self.cycle.uses == 1
        if self.begins:
            self._leave()
        if self.window is None or self.window.images != images:
            if not self.begins:
                self._leave()
            self.window = None  # before the new one is moved to the device
            self.window = self._place(self.prefetcher.take(images))
        if self.begins or not self._upcoming_requested:
            upcoming = self.cycle.upcoming()
            if upcoming is not None and upcoming != images:
                self.prefetcher.request(upcoming)
            self._upcoming_requested = True
        return self.window

    def forget(self) -> None:
        """Lets go of the window, as after the cycle was set to another place."""
        self.window = None
        self._upcoming_requested = False

    def close(self) -> None:
        """Stops loading in the background and lets go of the window. Another step would start again."""
        self.prefetcher.close()
        self.window = None
