"""Reading on several threads, and the window that a stream uses at every step."""

import threading
from types import SimpleNamespace

import pytest
import torch

from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.prefetch import DECODE_THREADS, LoadCancelled, read_each
from f3rm_ext.data.window_stream import WindowStream

TIMEOUT_S = 20


class Recorder(WindowStream[SimpleNamespace]):
    """Notes in which order windows are left, loaded and placed."""

    def __init__(self, num_images: int, window: int | None, repeat: int | None) -> None:
        sides = torch.ones(num_images, 1)
        cameras, cycle = SimpleNamespace(height=sides, width=sides), ImageCycle(num_images, window, repeat)
        super().__init__(cameras, cycle, split="train", device="cpu", masked="ignore", placement=None)  # type: ignore
        self.events: list[tuple] = []

    def _load(self, images, stopped):
        self.events.append(("load", images))
        return SimpleNamespace(images=images, placed=False)

    def _flush(self):
        self.events.append(("leave", None if self._window is None else self._window.images))
        super()._flush()

    def _place(self, window):
        self.events.append(("place", window.images, self._window))
        return SimpleNamespace(images=window.images, placed=True)

    def _forget(self):
        pass


@pytest.fixture
def make_stream(keep):
    """Streams that are closed at the end."""
    return lambda *cycle: keep(Recorder(*cycle))


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


def test_a_window_is_left_while_it_is_there_and_placed_when_none_is(make_stream):
    stream = make_stream(6, 2, 3)
    windows = []
    for step in range(4):
        windows.append(stream._step())
        assert windows[-1].placed and stream._begins is (step % 3 == 0)
    first, second = windows[0].images, windows[3].images
    assert first != second
    events = [event for event in stream.events if event[0] != "load"]
    assert events == [("leave", None), ("place", first, None), ("leave", first), ("place", second, None)]


def test_each_window_is_loaded_once(make_stream):
    stream = make_stream(6, 2, 3)
    windows = [stream._step().images for _ in range(12)]
    stream.close()
    loads = [event[1] for event in stream.events if event[0] == "load"]
    assert loads[:4] == windows[::3] and len(loads) <= 5


def test_all_images_are_loaded_once_and_for_ever(make_stream):
    stream = make_stream(3, None, 1)
    windows = {stream._step().images for _ in range(5)}
    assert len(windows) == 1 and [event[0] for event in stream.events] == ["leave", "load", "place"]


def test_the_window_is_loaded_again_after_a_resume(make_stream):
    stream = make_stream(3, None, None)
    stream._step()
    assert stream.load_state(stream.state()) and stream._window is None
    stream._step()
    assert not stream._begins and [event[0] for event in stream.events].count("load") == 2
