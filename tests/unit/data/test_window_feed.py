"""Reading on several threads, and the window that is handed out at every step."""

import threading
from dataclasses import dataclass

import pytest

from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.prefetch import DECODE_THREADS, LoadCancelled, WindowFeed, read_each

TIMEOUT_S = 20


@dataclass(frozen=True)
class Loaded:
    images: tuple[int, ...]
    placed: bool = False


@pytest.fixture
def make_feed(keep):
    """Feeds with a record of what happened in which order; closed at the end."""

    def make(num_images: int, window: int | None, repeat: int | None):
        events: list[tuple] = []

        def load(images, stopped):
            events.append(("load", images))
            return Loaded(images)

        def leave():
            held = feed.window
            events.append(("leave", None if held is None else held.images))

        def place(window):
            events.append(("place", window.images, feed.window))
            return Loaded(window.images, placed=True)

        feed = keep(WindowFeed(ImageCycle(num_images, window, repeat), load, leave=leave, place=place))
        return feed, events

    return make


def test_images_are_read_in_order_on_several_threads():
    together = threading.Barrier(DECODE_THREADS)

    def read(image: int) -> int:
        together.wait(TIMEOUT_S)  # passes only if so many read at a time
        return 10 * image

    assert list(read_each(range(2 * DECODE_THREADS), read, lambda: False)) == [
        10 * i for i in range(2 * DECODE_THREADS)
    ]


@pytest.mark.parametrize("count", [1, 6])
def test_reading_stops_when_told(count):
    read = []
    with pytest.raises(LoadCancelled):
        list(read_each(range(count), read.append, lambda: True))
    assert not read


def test_a_window_is_left_while_it_is_there_and_placed_when_none_is(make_feed):
    feed, events = make_feed(6, 2, 3)
    first = feed.step()
    assert first.placed and feed.begins
    feed.step()
    assert not feed.begins
    feed.step()
    second = feed.step()
    assert feed.begins and second.images != first.images
    kinds = [event for event in events if event[0] != "load"]
    assert kinds == [
        ("leave", None),
        ("place", first.images, None),
        ("leave", first.images),
        ("place", second.images, None),
    ]


def test_each_window_is_loaded_once(make_feed):
    feed, events = make_feed(6, 2, 3)
    windows = [feed.step().images for _ in range(12)]
    feed.close()
    loads = [event[1] for event in events if event[0] == "load"]
    assert loads[:4] == windows[::3] and len(loads) <= 5


def test_all_images_are_loaded_once_and_for_ever(make_feed):
    feed, events = make_feed(3, None, 1)
    windows = {feed.step() for _ in range(5)}
    assert len(windows) == 1 and [event[0] for event in events] == ["leave", "load", "place"]


def test_a_forgotten_window_is_loaded_again(make_feed):
    feed, events = make_feed(3, None, None)
    feed.step()
    feed.forget()
    assert feed.window is None
    feed.step()
    assert not feed.begins and [event[0] for event in events].count("load") == 2
