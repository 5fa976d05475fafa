"""The table of batches and queues against the guide's figures and a simulation."""

import random

import pytest

from f3rm_ext.errors import ConfigError
from f3rm_ext.moco.pairs import PRESETS, Pair, advised_queue, listed_queues


def test_presets_are_the_four_rows_of_the_guide() -> None:
    rows = [(preset.batch_size, preset.queue_size, preset.epochs) for preset in PRESETS.values()]
    assert rows == [(64, 65_536, 300), (96, 76_800, 600), (80, 64_000, 300), (128, 65_536, 300)]
    pairs = [Pair(batch, queue, 2000, 2, 4, epochs) for batch, queue, epochs in rows]
    assert [pair.effective_batch for pair in pairs] == [512, 768, 640, 1024]
    assert all(pair.is_multiple for pair in pairs) and not Pair(88, 76_800).is_multiple
    assert pairs[1].optimizer_steps == 1500 and pairs[1].time_constants == pytest.approx(1.5)
    assert [pair.batches_in_queue for pair in pairs] == [512, 400, 400, 256]


@pytest.mark.parametrize(("images", "batch", "queue"), [(40, 4, 20), (40, 8, 100), (60, 6, 54)])
def test_same_image_keys_are_those_of_a_simulation(images: int, batch: int, queue: int) -> None:
    order = random.Random(0)
    keys: list[int] = []
    met = queries = 0
    for epoch in range(600):
        passed = order.sample(range(images), images)
        for start in range(0, images, batch):
            if epoch > queue // images + 1:
                met += sum(keys.count(image) for image in passed[start : start + batch])
                queries += batch
            keys = [*keys, *passed[start : start + batch]][-queue:]
    assert Pair(batch, queue, images).same_image_keys == pytest.approx(met / queries, rel=0.06)


def test_an_advised_queue_is_short_for_the_data() -> None:
    assert Pair(64, advised_queue(2800, 64), 2800).is_advised
    assert Pair(64, advised_queue(2800, 64), 2800).same_image_keys < 0.5
    assert not Pair(64, advised_queue(2800, 64) + 1, 2800).is_advised
    assert listed_queues(96, 96, 2000) == [1904, 4096, 16_384, 65_536, 76_800]


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="--batch-size is 0"):
        Pair(0, 10)
    with pytest.raises(ConfigError, match="--momentum is 1"):
        Pair(8, 10, momentum=1.0)
