"""Batches from a cycling window: what is in them, resume, memory, background loading."""

import gc
import itertools
import threading
import weakref

import pytest
import torch

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.data import ray_stream as stream_module
from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.ray_stream import PixelStream
from f3rm_ext.errors import CaptureError
from f3rm_ext.features.source import FeatureSource

TIMEOUT_S = 20


@pytest.fixture
def dataset(make_capture):
    from nerfstudio.data.datasets.base_dataset import InputDataset

    folder = make_capture(8, sizes=((12, 16), (16, 12)), val=None)
    config = CaptureDataParserConfig(data=folder, train_split_fraction=1.0)
    return InputDataset(config.setup().get_dataparser_outputs("train"))


@pytest.fixture
def make_stream(dataset, request):
    """Streams over the 8 images, closed at the end."""
    streams = []

    def make(window: int | None = 3, repeat: int | None = 4, *, seed: int = 0, source=None, **options) -> PixelStream:
        cycle = ImageCycle(8, window, repeat, seed=seed)
        streams.append(PixelStream(dataset, cycle, **{"num_rays": 64, "split": "train", "source": source, **options}))
        return streams[-1]

    yield make
    for stream in streams:
        stream.close()


def images_in(batch: dict) -> set[int]:
    return set(batch["indices"][:, 0].tolist())


def fake_source(dataset):
    from f3rm_ext.features.base import FeatureMap, PatchGrid

    class Source(FeatureSource):
        def load(self, image_idx: int) -> dict[str, FeatureMap]:
            height, width = int(dataset.cameras.height[image_idx]), int(dataset.cameras.width[image_idx])
            grid = PatchGrid.covering(height // 4, width // 4, height, width)
            values = torch.full((grid.rows, grid.cols, 3), float(image_idx))
            values[..., 1:] = torch.from_numpy(grid.centres_px())
            return {"where": FeatureMap(values=values.half().numpy(), grid=grid)}

    return Source((), (), [])


def test_colors_are_those_of_the_indexed_pixels(make_stream):
    stream = make_stream()
    for _ in range(20):
        batch = stream.next()
        expected = batch["indices"] * torch.tensor([10, 1, 1])
        torch.testing.assert_close((batch["image"] * 255).round().long(), expected)
        assert batch["indices"].shape == (64, 3) and "features" not in batch


def test_features_are_those_of_the_first_rays(make_stream, dataset):
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


def test_windows_are_used_for_exactly_the_stated_steps(make_stream):
    stream = make_stream(window=3, repeat=4, num_rays=256)
    seen = [images_in(stream.next()) for _ in range(16)]
    for start in range(0, 16, 4):
        assert all(images == seen[start] for images in seen[start : start + 4])
        assert len(seen[start]) == 3
    assert seen[3] != seen[4]


@pytest.mark.parametrize("steps", [0, 1, 4, 6, 21])
def test_resume_gives_the_same_windows_and_the_same_pixels(make_stream, dataset, steps):
    stream = make_stream(seed=7, source=fake_source(dataset))
    for _ in range(steps):
        stream.next()
    state = stream.state()
    torch.manual_seed(1)
    expected = [stream.next() for _ in range(14)]
    torch.manual_seed(2)
    resumed = make_stream(seed=1, source=fake_source(dataset))
    assert resumed.load_state(state)
    for batch in expected:
        again = resumed.next()
        assert torch.equal(again["indices"], batch["indices"])
        assert torch.equal(again["image"], batch["image"])
        assert torch.equal(again["features"]["where"], batch["features"]["where"])
    assert resumed.coverage.summary() == stream.coverage.summary()
    assert (resumed.coverage.steps == stream.coverage.steps).all()


def test_a_stream_in_use_can_be_set_back(make_stream):
    stream = make_stream()
    stream.next()
    state = stream.state()
    first = [stream.next()["indices"] for _ in range(9)]
    assert stream.load_state(state)
    again = [stream.next()["indices"] for _ in range(9)]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_checkpointed_state_survives_torch_save_without_pickle(make_stream, tmp_path):
    stream = make_stream()
    stream.next()
    torch.save(stream.state(), tmp_path / "state.pt")
    assert make_stream().load_state(torch.load(tmp_path / "state.pt", weights_only=True))


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


def test_coverage_counts_the_rays_of_each_image(make_stream):
    stream = make_stream(window=3, repeat=2)
    counts = torch.zeros(8, dtype=torch.int64)
    for _ in range(11):
        counts += torch.bincount(stream.next()["indices"][:, 0], minlength=8)
    assert stream.coverage.rays.tolist() == counts.tolist()


@pytest.mark.usefixtures("quick_collection")
def test_an_old_window_is_let_go_of(make_stream):
    stream = make_stream(window=3, repeat=2)
    pixels = []
    for _ in range(12):
        stream.next()
        if not pixels or pixels[-1]() is not stream._feed.window.pixels:
            pixels.append(weakref.ref(stream._feed.window.pixels))
        gc.collect()
        assert sum(reference() is not None for reference in pixels) == 1
    assert len(pixels) == 6
    stream.close()
    gc.collect()
    assert all(reference() is None for reference in pixels)


def test_the_next_window_is_loaded_while_the_present_one_is_in_use(make_stream, monkeypatch):
    """The second load is held back; steps of the first window go on, and its end waits for the load."""
    real = stream_module.load_window
    loads: list[tuple[int, ...]] = []
    second_started, let_second_go = threading.Event(), threading.Event()

    def load(dataset, source, images, stopped, masked):
        loads.append(images)
        if len(loads) == 2:
            second_started.set()
            assert let_second_go.wait(TIMEOUT_S)
        return real(dataset, source, images, stopped, masked)

    monkeypatch.setattr(stream_module, "load_window", load)
    stream = make_stream(window=3, repeat=4)
    for _ in range(4):
        stream.next()
    assert second_started.wait(TIMEOUT_S)
    assert not stream._feed.prefetcher.ready
    let_second_go.set()
    upcoming = stream.cycle.upcoming()
    assert upcoming is not None and images_in(stream.next()) <= set(upcoming)
    assert loads[:2] == [loads[0], upcoming]


def test_nothing_is_loaded_before_the_first_batch(make_stream, monkeypatch):
    def fail(*args):
        raise AssertionError("loaded too early")

    monkeypatch.setattr(stream_module, "load_window", fail)
    stream = make_stream()
    stream.state()
    assert stream.coverage.summary()["images_seen"] == 0
    with pytest.raises(AssertionError, match="too early"):
        stream.next()


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


def test_all_images_need_one_load(make_stream, monkeypatch):
    loads = []
    real = stream_module.load_window
    monkeypatch.setattr(stream_module, "load_window", lambda *args: (loads.append(args[2]), real(*args))[1])
    stream = make_stream(window=None, repeat=2)
    for _ in range(7):
        stream.next()
    assert len(loads) == 1 and sorted(loads[0]) == list(range(8))
    assert stream.coverage.appearances.tolist() == [1] * 8


def test_a_window_that_comes_again_is_counted_again(make_stream, monkeypatch):
    """An epoch may begin with the very window the last one ended with."""
    stream = make_stream(window=4, repeat=1)
    orders = [0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3]
    monkeypatch.setattr(stream.cycle, "_shuffled", lambda epoch, *args: orders[epoch % 2])
    seen = []
    for step in range(1, 8):
        seen.append(frozenset(images_in(stream.next())))
        appearances = stream.coverage.appearances
        assert appearances.sum() == 4 * step and appearances.max() - appearances.min() <= 1
    assert any(first == second for first, second in itertools.pairwise(seen))
