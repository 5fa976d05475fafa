"""Batches from a cycling window: what is in them, resume, memory, background loading."""

import gc
import itertools
import threading
import weakref

import pytest
import torch
from nerfstudio.data.datasets.base_dataset import InputDataset

from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.ray_stream import PixelStream
from f3rm_ext.errors import CaptureError

TIMEOUT_S = 20


@pytest.fixture
def dataset(make_outputs):
    return InputDataset(make_outputs(sizes=((12, 16), (16, 12))))


@pytest.fixture
def make_stream(dataset, keep):
    """Streams over the 8 images, closed at the end."""

    def make(window: int | None = 3, repeat: int | None = 4, *, seed: int = 0, source=None, **options) -> PixelStream:
        cycle = ImageCycle(8, window, repeat, seed=seed)
        return keep(PixelStream(dataset, cycle, **{"num_rays": 64, "split": "train", "source": source, **options}))

    return make


def images_in(batch: dict) -> set[int]:
    return set(batch["indices"][:, 0].tolist())


def test_colors_are_those_of_the_indexed_pixels(make_stream):
    stream = make_stream()
    for _ in range(20):
        batch = stream.next()
        expected = batch["indices"] * torch.tensor([10, 1, 1])
        torch.testing.assert_close((batch["image"] * 255).round().long(), expected)
        assert batch["indices"].shape == (64, 3) and "features" not in batch


def test_features_are_those_of_the_first_rays(make_stream, dataset, fake_source):
    stream = make_stream(source=fake_source(dataset), feature_ray_fraction=0.3)
    for _ in range(10):
        batch = stream.next()
        features = batch["features"]["where"]
        assert features.shape == (20, 3)  # ceil(0.3 * 64)
        index = batch["indices"][:20]
        torch.testing.assert_close(features[:, 0].long(), index[:, 0])
        size = torch.stack([dataset.cameras.height[index[:, 0], 0], dataset.cameras.width[index[:, 0], 0]], dim=-1)
        expected = torch.minimum((index[:, 1:] + 0.5).clamp(min=2.0), size - 2.0)  # outermost patch centres
        torch.testing.assert_close(features[:, 1:], expected.float())


def test_coverage_is_exact_at_every_step(make_stream):
    stream = make_stream(window=3, repeat=2)
    for step in range(1, 30):
        stream.next()
        coverage = stream.coverage
        assert coverage.appearances.max() - coverage.appearances.min() <= 1
        assert coverage.appearances.tolist() == stream.cycle.appearances()
        assert coverage.appearances.sum() == 3 * -(-step // 2)
        assert coverage.steps.sum() == 3 * step
        assert coverage.rays.sum() == 64 * step


@pytest.mark.usefixtures("quick_collection")
def test_an_old_window_is_let_go_of(make_stream):
    stream = make_stream(window=3, repeat=2)
    pixels = []
    for _ in range(12):
        stream.next()
        if not pixels or pixels[-1]() is not stream._window.pixels:
            pixels.append(weakref.ref(stream._window.pixels))
        gc.collect()
        assert sum(reference() is not None for reference in pixels) == 1
    assert len(pixels) == 6
    stream.close()
    gc.collect()
    assert all(reference() is None for reference in pixels)


def test_the_next_window_is_loaded_while_the_present_one_is_in_use(make_stream, monkeypatch):
    """The second load is held back; steps of the first window go on, and its end waits for the load."""
    real = PixelStream._read
    loads: list[tuple[int, ...]] = []
    second_started, let_second_go = threading.Event(), threading.Event()

    def read(self, images, stopped):
        loads.append(images)
        if len(loads) == 2:
            second_started.set()
            assert let_second_go.wait(TIMEOUT_S)
        return real(self, images, stopped)

    monkeypatch.setattr(PixelStream, "_read", read)
    stream = make_stream(window=3, repeat=4)
    for _ in range(4):
        stream.next()
    assert second_started.wait(TIMEOUT_S)
    let_second_go.set()
    upcoming = stream.cycle.upcoming()
    assert upcoming is not None and images_in(stream.next()) <= set(upcoming)
    assert loads[:2] == [loads[0], upcoming]


def test_a_damaged_image_of_the_next_window_is_named(make_stream, dataset):
    stream = make_stream(window=1, repeat=1)
    stream.next()
    second = stream.cycle.upcoming()
    assert second is not None
    stream.close()
    bad = dataset.image_filenames[second[0]]
    bad.write_bytes(bad.read_bytes()[:60])
    with pytest.raises(CaptureError, match=bad.name):
        stream.next()


def test_a_window_that_comes_again_is_counted_again(make_stream, monkeypatch):
    """An epoch may begin with the very window the last one ended with."""
    stream = make_stream(window=4, repeat=1)
    orders = [0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3]
    monkeypatch.setattr(stream.cycle, "_shuffle", lambda epoch, *args: orders[epoch % 2])
    seen = []
    for step in range(1, 8):
        seen.append(frozenset(images_in(stream.next())))
        appearances = stream.coverage.appearances
        assert appearances.sum() == 4 * step and appearances.max() - appearances.min() <= 1
    assert any(first == second for first, second in itertools.pairwise(seen))
