"""Whole images from a cycling window: turns, resume, memory, resolution, background loading."""

import gc
import weakref
from collections import Counter

import numpy as np
import pytest
import torch

from f3rm_ext.data import image_stream as module
from f3rm_ext.data.image_cycle import ImageCycle
from f3rm_ext.data.image_stream import ImageStream
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.errors import CaptureError


@pytest.fixture
def dataset(make_outputs) -> PinholeDataset:
    return PinholeDataset(make_outputs(sizes=((13, 18), (18, 13))))


@pytest.fixture
def make_stream(dataset, keep):
    """Streams over the 8 images, closed at the end."""

    def make(window: int | None = 3, repeat: int | None = 6, *, seed: int = 0, **cycle) -> ImageStream:
        return keep(ImageStream(dataset, ImageCycle(8, window, repeat, seed=seed, **cycle)))

    return make


def take(stream: ImageStream, count: int, halvings: int = 0) -> list[int]:
    return [stream.next(halvings)[1]["image_idx"] for _ in range(count)]


def test_camera_and_image_belong_together(make_stream, dataset):
    stream = make_stream()
    for _ in range(20):
        camera, batch = stream.next()
        i = batch["image_idx"]
        assert camera.shape == (1,) and camera.metadata["cam_idx"] == i
        assert torch.equal(camera.camera_to_worlds[0], dataset.cameras.camera_to_worlds[i])
        height, width = int(camera.height), int(camera.width)
        assert batch["image"].shape == (height, width, 3) and batch["image"].dtype == torch.float32
        assert stream.pixels_per_batch == height * width
        pixel = (batch["image"][4, 7] * 255).round().tolist()
        assert pixel == [10 * i, 4, 7] and set(batch) == {"image", "image_idx"}


def test_all_images_take_turns(make_stream):
    stream = make_stream(window=None, repeat=None)
    turns = [take(stream, 8) for _ in range(6)]
    assert all(sorted(turn) == list(range(8)) for turn in turns)
    assert len({tuple(turn) for turn in turns}) == 6, "each in an order of its own"
    assert take(make_stream(window=None, repeat=None, seed=1), 8) != turns[0]
    assert take(make_stream(window=None, repeat=None), 8) == turns[0], "the seed decides"


@pytest.mark.parametrize(("window", "repeat"), [(1, 1), (3, 6), (4, 4), (5, 15), (8, 3)])
def test_use_is_exact_where_turns_fit(make_stream, window, repeat):
    """An image is used repeat / window times in each window it is in."""
    stream = make_stream(window=window, repeat=repeat)
    for step in range(1, 200):
        stream.next()
        assert stream._turns.uses.sum() == step
        if window == 8:
            assert stream._turns.uses.max() - stream._turns.uses.min() <= 1
        elif step % repeat == 0:
            appearances = np.array(stream.cycle.appearances())
            assert (stream._turns.uses == appearances * (repeat // window)).all()


def test_where_turns_are_cut_off_the_least_used_go_first(make_stream):
    """7 steps with 3 images: two or three uses each; over the run they even out."""
    stream = make_stream(window=3, repeat=7)
    for _ in range(4 * 24):
        used = Counter(take(stream, 7))
        assert sorted(used.values()) == [2, 2, 3]
    appearances = np.array(stream.cycle.appearances())
    assert len(set(appearances)) == 1, "24 windows of 3 are 9 epochs of 8"
    assert stream._turns.uses.max() - stream._turns.uses.min() <= 2


def test_resume_with_another_window_begins_a_new_turn(make_stream):
    stream = make_stream(window=None, repeat=None)
    take(stream, 5)
    resumed = make_stream(window=2, repeat=4)
    assert resumed.load_state(stream.state())
    for _ in range(10):
        assert len(set(take(resumed, 4))) == 2


@pytest.mark.parametrize("halvings", [1, 2, 5])
def test_lower_resolution_comes_with_its_camera(make_stream, dataset, halvings):
    stream = make_stream()
    for _ in range(6):
        camera, batch = stream.next(halvings)
        i = batch["image_idx"]
        full = dataset.cameras[i]
        height, width = batch["image"].shape[:2]
        assert (height, width) == (int(camera.height), int(camera.width))
        assert height == max(1, int(int(full.height) / 2**halvings + 0.5))
        torch.testing.assert_close(camera.fx[0] / width, full.fx / full.width)
        torch.testing.assert_close(camera.cy[0] / height, full.cy / full.height)
        # Green is the row: its mean does not change with the resolution, up to the rounding of bytes.
        mean = float(batch["image"][..., 1].mean()) * 255
        assert mean == pytest.approx((int(full.height) - 1) / 2, abs=0.51)
    assert int(dataset.cameras.height.max()) == 18, "the data set's cameras stay as they are"


def test_resolution_does_not_change_which_images_come(make_stream):
    assert take(make_stream(), 30, halvings=2) == take(make_stream(), 30)


def test_smaller_copies_are_made_once_and_of_one_resolution_at_a_time(make_stream, watch_calls):
    made = watch_calls(module, "shrunk")
    stream = make_stream(window=None, repeat=None)
    take(stream, 24, halvings=1)
    assert len(made) == 8
    take(stream, 8, halvings=2)
    window = stream._window
    assert len(made) == 16 and len(window._small) == 8
    take(stream, 1)
    assert not window._small


def test_photos_of_the_window_are_at_hand_beside_that_of_the_step(make_stream, dataset):
    stream = make_stream(window=3, repeat=6)
    assert stream.photo(0) is None, "nothing is loaded before the first step"
    _, batch = stream.next(halvings=1)
    present = sorted(stream._window.images)
    for image_idx in range(len(dataset)):
        photo = stream.photo(image_idx)
        assert (photo is not None) == (image_idx in present)
        if photo is not None:
            full = dataset.cameras[image_idx]
            half = tuple(int(int(side) / 2 + 0.5) for side in (full.height, full.width))
            assert photo["image_idx"] == image_idx and photo["image"].shape[:2] == half
    again = stream.photo(batch["image_idx"])
    assert torch.equal(again["image"], batch["image"])
    assert stream._turns.uses.sum() == 1, "looking is not using"
    stream.close()


@pytest.mark.usefixtures("quick_collection")
def test_only_the_pictures_of_the_window_are_in_memory(make_stream, dataset, monkeypatch):
    """Of all pictures ever read, at most those of the present window and of the next are alive."""
    alive = []
    real = PinholeDataset.picture

    def picture(self, image_idx, masked):
        found = real(self, image_idx, masked)
        alive.append(weakref.ref(found.pixels))
        return found

    monkeypatch.setattr(PinholeDataset, "picture", picture)
    stream = make_stream(window=2, repeat=2)
    for _ in range(24):
        stream.next(1)
        gc.collect()
        assert sum(reference() is not None for reference in alive) <= 4
        assert len(stream._window.pictures) == 2
        assert all(picture.pixels.dtype == torch.uint8 for picture in stream._window.pictures.values())
    assert len(alive) >= 24
    stream.close()
    gc.collect()
    assert all(reference() is None for reference in alive)


def test_coverage_counts_windows_steps_and_pixels(make_stream):
    stream = make_stream(window=3, repeat=6)
    for step in range(1, 30):
        stream.next(1)
        coverage = stream.coverage
        assert coverage.appearances.tolist() == stream.cycle.appearances()
        assert coverage.steps.sum() == 3 * step
        assert (coverage.rays == stream._turns.uses * 7 * 9).all()
        assert coverage.summary()["images_seen"] == (stream._turns.uses > 0).sum(), "in memory is not seen"


def test_masks_that_leave_nothing_are_refused(make_outputs):
    stream = ImageStream(PinholeDataset(make_outputs(2, masks=99)), ImageCycle(2, None, None))
    with pytest.raises(CaptureError, match="masks"):
        stream.next()
    stream.close()
