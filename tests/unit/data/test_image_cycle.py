"""Exact cycling: appearances, uses, resume."""

import itertools
import json
import math
import random

import pytest

from f3rm_ext.data.cycling_config import parse_count
from f3rm_ext.data.image_cycle import ImageCycle, ImageTurns
from f3rm_ext.errors import ConfigError


def spread(counts: list[int]) -> int:
    return max(counts) - min(counts)


@pytest.mark.parametrize("num_images", range(1, 10))
def test_appearances_differ_by_at_most_one_at_every_step(num_images: int):
    for window in range(1, num_images + 1):
        for seed in range(3):
            cycle = ImageCycle(num_images, window, 1, seed=seed)
            counts = [0] * num_images
            for _ in range(1 if window == num_images else 6 * num_images):
                images = cycle.step()
                assert len(images) == window == len(set(images)), "an image is twice in a window"
                for image in images:
                    counts[image] += 1
                assert spread(counts) <= 1
                assert cycle.appearances() == counts


@pytest.mark.parametrize("shards", [2, 3, 5])
@pytest.mark.parametrize(("num_images", "window"), [(5, 2), (7, 3), (7, 7), (4, 3), (11, 2), (16, 3), (15, 3)])
def test_appearances_are_exact_over_all_processes_together(num_images: int, window: int, shards: int):
    cycles = [ImageCycle(num_images, window, 2, seed=4, shards=shards, shard=shard) for shard in range(shards)]
    counts = [0] * num_images
    for step in range(60):
        dealt = [cycle.step() for cycle in cycles]
        if (cycles[0].changes and step % 2 == 0) or step == 0:
            for images in dealt:
                for image in images:
                    counts[image] += 1
        assert tuple(dealt) == cycles[0].round
        if shards * window <= num_images:
            assert len({image for images in dealt for image in images}) == shards * window
        assert spread(counts) <= 1
        assert cycles[-1].appearances() == counts


@pytest.mark.parametrize("shards", [2, 3, 5])
@pytest.mark.parametrize("num_images", range(2, 9))
def test_no_image_is_twice_in_a_window_where_processes_want_more_images_than_there_are(num_images: int, shards: int):
    for window in range(num_images // shards + 1, num_images):
        assert shards * window > num_images
        for seed in range(3):
            cycle = ImageCycle(num_images, window, 1, seed=seed, shards=shards)
            for _ in range(3 * num_images):  # enough for windows over the end of an epoch in every process
                cycle.step()
                assert all(len(set(images)) == window for images in cycle.round)


@pytest.mark.parametrize("repeat", [1, 2, 3, 7])
def test_a_window_is_used_for_exactly_the_stated_steps(repeat: int):
    cycle = ImageCycle(100, 3, repeat)
    used = [cycle.step() for _ in range(20 * repeat)]
    windows = [used[start : start + repeat] for start in range(0, len(used), repeat)]
    assert all(len(set(group)) == 1 for group in windows)
    assert all(first[0] != second[0] for first, second in itertools.pairwise(windows))


def test_epochs_are_shuffled_differently_and_windows_mix_images():
    cycle = ImageCycle(20, 5, 1)
    epochs = [[image for _ in range(4) for image in cycle.step()] for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != list(range(20))


def test_the_seed_decides_and_the_global_random_state_does_not():
    random.seed(1)
    first = ImageCycle(30, 4, 1, seed=5).step()
    random.seed(99)
    assert ImageCycle(30, 4, 1, seed=5).step() == first
    assert ImageCycle(30, 4, 1, seed=6).step() != first


@pytest.mark.parametrize(("window", "repeat"), [(None, 3), (None, None), (6, 3), (2, None)])
def test_windows_that_never_change(window: int | None, repeat: int | None):
    cycle = ImageCycle(6, window, repeat)
    first = cycle.step()
    assert {cycle.step() for _ in range(20)} == {first}
    assert len(first) == (window or 6)
    assert not cycle.changes and cycle.upcoming() is None


def test_upcoming_is_what_comes():
    cycle = ImageCycle(7, 3, 2)
    assert cycle.upcoming() == cycle.step()
    for _ in range(30):
        upcoming, uses = cycle.upcoming(), cycle.uses
        images = cycle.step()
        assert images == upcoming if uses == 2 else cycle.uses == 2


@pytest.mark.parametrize("steps", range(0, 15))
def test_resume_goes_on_with_the_same_windows(steps: int):
    cycle = ImageCycle(7, 3, 4, seed=8)
    for _ in range(steps):
        cycle.step()
    state = json.loads(json.dumps(cycle.state()))
    expected = [cycle.step() for _ in range(40)]
    resumed = ImageCycle(7, 3, 4, seed=123)
    assert resumed.load_state(state)
    assert [resumed.step() for _ in range(40)] == expected
    assert resumed.appearances() == cycle.appearances()


def test_state_of_the_first_process_resumes_every_process():
    cycles = [ImageCycle(9, 2, 3, seed=8, shards=3, shard=shard) for shard in range(3)]
    for cycle in cycles:
        for _ in range(10):
            cycle.step()
    state = cycles[0].state()
    for cycle in cycles:
        resumed = ImageCycle(9, 2, 3, shards=3, shard=cycle.shard)
        assert resumed.load_state(state)
        assert [resumed.step() for _ in range(12)] == [cycle.step() for _ in range(12)]


def test_resume_with_another_window_size_keeps_appearances_exact():
    cycle = ImageCycle(11, 4, 3, seed=8)
    for _ in range(8):
        cycle.step()
    counts = cycle.appearances()
    resumed = ImageCycle(11, 5, 1)
    assert resumed.load_state(cycle.state())
    for _ in range(40):
        for image in resumed.step():
            counts[image] += 1
        assert spread(counts) <= 1
    assert resumed.appearances() == counts


def test_the_turn_of_a_process_with_other_images_is_not_used():
    first, second = (ImageTurns(ImageCycle(4, 2, 1, shards=2, shard=shard), "train") for shard in (0, 1))
    first.draw((0, 1))
    second.load_state(first.state())
    assert {second.draw((2, 3)) for _ in range(2)} == {2, 3}


def test_state_of_other_images_is_not_used():
    other = ImageCycle(8, 3, 4, seed=1)
    other.step()
    cycle, untouched = ImageCycle(7, 3, 4, seed=2), ImageCycle(7, 3, 4, seed=2)
    assert not cycle.load_state(other.state())
    assert cycle.step() == untouched.step()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_window_larger_than_the_data_set_is_all_of_it(shards: int):
    cycle, whole = (ImageCycle(8, window, 1, seed=3, shards=shards) for window in (9, None))
    assert not cycle.changes and cycle.window_size == 8
    assert [cycle.step() for _ in range(3)] == [whole.step() for _ in range(3)]
    assert cycle.state() == whole.state()


@pytest.mark.parametrize(
    ("value", "expected"), [(-1, None), (math.inf, None), (-1.0, None), (1, 1), (512, 512), (3.0, 3)]
)
def test_counts(value: float, expected: int | None):
    assert parse_count(value, "option", unit="steps") == expected


@pytest.mark.parametrize("value", [0, -2, 2.5, math.nan, -math.inf])
def test_impossible_counts_are_refused(value: float):
    with pytest.raises(ConfigError, match=r"--option.*steps"):
        parse_count(value, "option", unit="steps")


@pytest.mark.parametrize("saved", [0, 2, 3, 9])
def test_a_cycle_may_begin_with_fewer_images(saved):
    cycle, again = (ImageCycle(8, None, None, start=(3, 3), seed=1) for _ in range(2))
    windows, counts = [], []
    for step in range(10):
        if step == saved:
            assert again.load_state(cycle.state())
        if step == 2:
            assert sorted(cycle.upcoming() or ()) == list(range(8))
        windows.append(cycle.step())
        counts.append(cycle.appearances())
        assert step < saved or again.step() == windows[-1]
    assert [len(window) for window in windows] == [3] * 3 + [8] * 7 and cycle.upcoming() is None
    assert len(set(windows)) == 2 and {max(count) - min(count) for count in counts} == {1}
    assert ImageCycle(3, None, None, start=(3, 3)).start is None


def test_a_run_that_began_with_few_images_uses_all_once_they_fit():
    cycle, resumed = ImageCycle(8, None, None, start=(3, 9), seed=1), ImageCycle(8, None, None, seed=1)
    cycle.step()
    assert resumed.load_state(cycle.state())
    assert sorted(resumed.step()) == list(range(8))
