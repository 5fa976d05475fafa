"""Background loading, step by step with events."""

import gc
import threading
import weakref

import pytest

from f3rm_ext.data.prefetch import LoadCancelled, Prefetcher
from f3rm_ext.errors import CaptureError

TIMEOUT_S = 20


class Loaded:
    """A window that can be weakly referenced."""

    def __init__(self, images: tuple[int, ...]) -> None:
        self.images = images


@pytest.fixture
def gate():
    """A load function that waits for ``release`` (as training waits for a disk)."""

    class Gate:
        def __init__(self) -> None:
            self.started, self.release, self.finished = threading.Event(), threading.Event(), threading.Event()
            self.threads: list[int] = []
            self.calls: list[tuple[int, ...]] = []

        def load(self, images, stopped) -> Loaded:
            self.threads.append(threading.get_ident())
            self.calls.append(images)
            self.started.set()
            assert self.release.wait(TIMEOUT_S)
            self.finished.set()
            return Loaded(images)

    gate = Gate()
    yield gate
    gate.release.set()


def test_loads_once_while_the_caller_goes_on(gate, keep):
    prefetcher = keep(Prefetcher(gate.load))
    for _ in range(3):
        prefetcher.request((1, 2))
    assert gate.started.wait(TIMEOUT_S)  # the caller gets here although loading cannot end yet
    gate.release.set()
    assert gate.finished.wait(TIMEOUT_S)
    assert prefetcher.take((1, 2)).images == (1, 2)
    assert gate.calls == [(1, 2)], "taking what was requested must not load again"
    assert gate.threads[0] != threading.get_ident()


def test_takes_what_was_not_requested(gate, keep):
    gate.release.set()
    prefetcher = keep(Prefetcher(gate.load))
    assert prefetcher.take((3,)).images == (3,)
    prefetcher.request((4,))
    assert prefetcher.take((5,)).images == (5,)


def test_errors_surface_where_the_window_is_taken(keep):
    def load(images, stopped):
        raise CaptureError(f"image {images[0]} is damaged")

    prefetcher = keep(Prefetcher(load))
    prefetcher.request((7,))
    with pytest.raises(CaptureError, match="image 7"):
        prefetcher.take((7,))
    with pytest.raises(CaptureError):
        prefetcher.take((7,))  # asked again, it tries again


def test_close_stops_a_load_and_its_thread():
    started = threading.Event()
    outcome: list[str] = []

    def load(images, stopped):
        started.set()
        poll = threading.Event()
        while not stopped():
            poll.wait(0.001)
        outcome.append("stopped")
        raise LoadCancelled

    threads = set(threading.enumerate())
    prefetcher = Prefetcher(load)
    prefetcher.request((1,))
    assert started.wait(TIMEOUT_S)
    prefetcher.close()
    assert outcome == ["stopped"]
    assert set(threading.enumerate()) <= threads


def test_holds_nothing_after_handing_out(gate, keep):
    gate.release.set()
    prefetcher = keep(Prefetcher(gate.load))
    window = prefetcher.take((1,))
    gone = weakref.ref(window)
    prefetcher.request((2,))
    prefetcher._future.result(TIMEOUT_S)
    del window
    gc.collect()
    assert gone() is None
