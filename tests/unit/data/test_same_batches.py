"""Batches are the same wherever images are and whenever batches are made; so are coverage and resume."""

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from nerfstudio.data.datasets.base_dataset import InputDataset

from f3rm_ext.data import image_stream, ray_stream
from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.image_stream import ImageStream
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.data.pixel_window import LoadedWindow
from f3rm_ext.data.placement import Placement
from f3rm_ext.data.ray_stream import PixelStream
from f3rm_ext.data.uploads import Uploader

CPU = torch.device("cpu")
TIMEOUT_S = 20
WINDOWS = [(None, None), (3, 4), (1, 1), (5, 3)]
PLACES = ["main memory", "device"]


@pytest.fixture(autouse=True)
def much_memory(set_gpu_memory) -> None:
    """A GPU that holds everything."""
    set_gpu_memory(1 << 40, 1 << 40)


def place(where: str | None) -> Placement | None:
    return None if where is None else Placement(CPU, wanted=where == "device", off="off", log=False)


def same(one: Any, other: Any) -> bool:
    """Whether nested dicts of tensors have the same bits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


@pytest.fixture(params=["plain", "masks", "background", "alpha"])
def capture(make_outputs, request) -> dict[str, Any]:
    """Images of two sizes; some with masks or alpha."""
    options: dict[str, Any] = {"sizes": ((12, 16), (16, 12))}
    if request.param in ("masks", "background"):
        options["masks"] = [4, 4, 0, 4, 4, 4, 4, 4]
    if request.param == "alpha":
        options["alpha"] = (1, 6)
    return {"outputs": make_outputs(**options), "masked": "background" if request.param == "background" else "ignore"}


@pytest.fixture
def make_rays(capture, fake_source, keep) -> Callable[..., PixelStream]:
    """Streams of rays with features, closed at the end."""
    dataset = InputDataset(capture["outputs"])

    def make(window: int | None, repeat: int | None, where: str | None = None, *, seed: int = 3) -> PixelStream:
        stream = PixelStream(
            dataset,
            ImageCycle(8, window, repeat, seed=seed),
            num_rays=50,
            split="train",
            source=fake_source(dataset),
            feature_ray_fraction=0.3,
            masked=capture["masked"],
            placement=place(where),
        )
        return keep(stream)

    return make


@pytest.fixture
def make_pictures(capture, keep) -> Callable[..., ImageStream]:
    """Streams of whole images, closed at the end."""
    dataset = PinholeDataset(capture["outputs"])

    def make(window: int | None, repeat: int | None, where: str | None = None, *, seed: int = 3) -> ImageStream:
        cycle = ImageCycle(8, window, repeat, seed=seed)
        return keep(ImageStream(dataset, cycle, masked=capture["masked"], placement=place(where)))

    return make


def picture(stream: ImageStream, halvings: int) -> dict[str, Any]:
    """The next batch, with what its camera says."""
    camera, batch = stream.next(halvings)
    return batch | {name: getattr(camera, name) for name in ("fx", "cy", "width", "camera_to_worlds", "metadata")}


def same_coverage(one: Any, other: Any) -> bool:
    return same(one.coverage.state(), other.coverage.state())


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(("window", "repeat"), WINDOWS)
def test_rays(make_rays, window, repeat, where):
    today, other = make_rays(window, repeat), make_rays(window, repeat, where)
    for step in range(14):
        expected, found = today.next(), other.next()
        assert same(expected, found) and "features" in found
        if step % 5 == 4:
            assert same_coverage(today, other)
    assert other.on_device is (where == "device") and same(today.state(), other.state())


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(("window", "repeat"), WINDOWS)
def test_pictures(make_pictures, window, repeat, where):
    today, other = make_pictures(window, repeat), make_pictures(window, repeat, where)
    for halvings in [2] * 10 + [1] * 3 + [0] * 12:
        assert same(picture(today, halvings), picture(other, halvings))
        assert today.pixels_per_batch == other.pixels_per_batch
        assert set(other._uploads._kept) <= set(other._window.images), "nothing of an old window is kept"
    assert other.on_device is (where == "device") and same_coverage(today, other)
    assert same(today.state(), other.state())


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations([None, *PLACES], 2), ("device", "device")])
@pytest.mark.parametrize("kind", ["rays", "pictures"])
def test_both_go_on_after_a_resume(make_rays, make_pictures, kind, before, after):
    """The place may be another one, as on a GPU whose memory is taken by others."""
    make, repeat, take = (
        (make_rays, 4, PixelStream.next) if kind == "rays" else (make_pictures, 7, partial(picture, halvings=1))
    )
    first, resumed = make(3, repeat, before), make(3, repeat, after, seed=0)
    for _ in range(6):
        take(first)
    state = first.state()
    expected = [take(first) for _ in range(12)]
    take(resumed)
    assert resumed.load_state(state)
    assert all(same(batch, take(resumed)) for batch in expected) and same_coverage(first, resumed)
    assert first.load_state(state)
    assert all(same(batch, take(first)) for batch in expected), "and one in use can be set back"


@pytest.mark.parametrize("where", PLACES)
def test_what_was_made_ahead_is_forgotten_at_a_resume(make_rays, where):
    """The state is of the same number of batches, but of other windows."""
    first, resumed = make_rays(3, 4, where), make_rays(3, 4, where, seed=0)
    for _ in range(5):
        first.next()
        resumed.next()
    assert resumed.load_state(first.state())
    assert all(same(first.next(), resumed.next()) for _ in range(5))


@pytest.mark.parametrize("capture", ["plain"], indirect=True)
class TestAhead:
    """What is made in advance, on which thread, and when it is not."""

    @pytest.mark.parametrize("where", PLACES)
    def test_the_next_batch_is_drafted_meanwhile(self, make_rays, monkeypatch, where):
        drafted: list[int] = []
        second = threading.Event()
        real = PixelStream._draft

        def draft(self, key, stopped):
            assert threading.current_thread() is not threading.main_thread()
            found = real(self, key, stopped)
            drafted.append(key[0])
            if key[0] == 1:
                second.set()
            return found

        monkeypatch.setattr(PixelStream, "_draft", draft)
        stream = make_rays(None, None, where)
        stream.next()
        assert second.wait(TIMEOUT_S) and drafted == [0, 1], "while the first is in use"
        stream.next()
        stream.close()
        assert drafted[:3] in ([0, 1], [0, 1, 2])

    def test_nothing_is_drafted_of_a_window_that_ends(self, make_rays, watch_calls):
        drafts = watch_calls(ray_stream, "draft_batch")
        stream = make_rays(3, 4, "main memory")
        expected = []
        for _ in range(12):
            stream.next()
            expected.append(stream._window.images)
        assert [call.args[0].images for call in drafts] == expected

    def test_another_number_of_rays(self, make_rays):
        today, other = make_rays(None, None), make_rays(None, None, "device")
        for count in (50, 50, 7, 7, 90):
            today.num_rays_per_batch = count
            other.set_num_rays_per_batch(count)
            batch = other.next()
            assert same(today.next(), batch) and len(batch["image"]) == count

    def test_the_threads_end(self, make_rays, make_pictures):
        threads = set(threading.enumerate())
        for stream in (make_rays(3, 4, "device"), make_pictures(3, 4, "main memory")):
            stream.next()
            stream.close()
            assert set(threading.enumerate()) <= threads
            stream.next()
            stream.close()

    def test_what_is_gathered_is_what_is_sent(self, make_rays, watch_calls):
        """Bytes and unconverted features; on the device, places only."""
        sends = watch_calls(Uploader, "send")
        sent = {}
        for where in PLACES:
            make_rays(None, None, where).next()
            sent[where] = {name: tensor.dtype for name, tensor in sends[-1].args[1].items()}
        small = {"indices": torch.int64, "weights/where": torch.float32}
        assert sent == {
            "main memory": small | {"pixels": torch.uint8, "values/where": torch.float16},
            "device": small | {"places": torch.int64, "patches/where": torch.int64},
        }

    @pytest.mark.parametrize("where", PLACES)
    def test_photos_beside_that_of_the_step_are_the_same(self, make_pictures, where):
        today, other = make_pictures(4, 6), make_pictures(4, 6, where)
        for step in range(20):
            halvings = int(step < 9)
            today.next(halvings), other.next(halvings)
            for image_idx in range(8):
                one, two = today.photo(image_idx), other.photo(image_idx)
                assert (one is None) == (two is None)
                if one is not None and two is not None:
                    assert one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)

    @pytest.mark.parametrize(("where", "times"), [("device", {8}), ("main memory", {24, 25})])
    def test_pictures_that_stay_are_sent_once(self, make_pictures, watch_calls, where, times):
        sent = watch_calls(image_stream.PictureUploads, "_send")
        stream = make_pictures(None, None, where)
        for _ in range(24):
            stream.next()
        stream.close()
        assert len(sent) in times, "the 25th is ahead"

    def test_memory_that_runs_out_for_a_window(self, make_rays, monkeypatch):
        """The second window no longer fits: the run goes on, and training sees the same."""
        real = LoadedWindow.to
        moved = []

        def to(self, device):
            moved.append(self.images)
            if len(moved) > 1:
                raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            return real(self, device)

        def upload(self, uploader):
            ahead.append(self.images)
            raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB.")

        ahead: list[tuple[int, ...]] = []
        today, other = make_rays(3, 4), make_rays(3, 4, "device")
        monkeypatch.setattr(LoadedWindow, "to", to)
        monkeypatch.setattr(LoadedWindow, "upload", upload)
        for step in range(14):
            assert same(today.next(), other.next())
            assert other.on_device is (step < 4)
        assert len(moved) == 2 and ahead[0] == moved[1], "it is tried again when the first window is gone"

    @pytest.mark.parametrize("room", [True, False])
    def test_the_next_window_is_sent_ahead_if_there_is_room(self, make_rays, monkeypatch, room):
        """While the present one is in use; otherwise once that is gone."""
        events: list[tuple[str, tuple[int, ...]]] = []
        for name in ("to", "upload", "receive"):
            real = getattr(LoadedWindow, name)

            def noted(self, *arguments, name=name, real=real):
                events.append((name, self.images))
                return real(self, *arguments)

            monkeypatch.setattr(LoadedWindow, name, noted)
        today, other = make_rays(3, 4), make_rays(3, 4, "device")
        monkeypatch.setattr(other.placement, "has_room", lambda needed: room and bool(other.on_device))
        windows: list[tuple[int, ...]] = []
        for step in range(12):
            assert same(today.next(), other.next())
            if step % 4 == 0:
                windows.append(other._window.images)
        other.close()
        first, second, third = windows
        if room:
            assert events[:5] == [("to", first), ("upload", second), ("receive", second), ("upload", third),
                                  ("receive", third)]  # fmt: skip
        else:
            assert events == [("to", first), ("to", second), ("to", third)]

    def test_memory_that_runs_out_for_a_picture(self, make_pictures, monkeypatch):
        real = Uploader.send
        count = 0

        def send(self, tensors):
            nonlocal count
            count += 1
            if count == 4:
                raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            return real(self, tensors)

        today, other = make_pictures(None, None), make_pictures(None, None, "device")
        monkeypatch.setattr(Uploader, "send", send)
        for _ in range(14):
            assert same(picture(today, 0), picture(other, 0))
        assert not other.on_device and not other._uploads._kept

    def test_other_errors_are_raised(self, make_rays, make_pictures, monkeypatch):
        def fail(*arguments):
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(LoadedWindow, "to", fail)
        monkeypatch.setattr(Uploader, "send", fail)
        for stream in (make_rays(3, 4, "device"), make_pictures(3, 4, "device"), make_rays(3, 4, "main memory")):
            with pytest.raises(RuntimeError, match="illegal"):
                stream.next()
