"""The ring of keys: order, lengths that divide nothing, and state."""

import io

import pytest
import torch

from f3rm_ext.moco.queue import KeyQueue, restore_queue


def fill(queue: KeyQueue, batches: int, batch: int) -> list[int]:
    """Writes keys that hold their number; returns the numbers that a list of the newest would have."""
    for step in range(batches):
        numbers = torch.arange(step * batch, (step + 1) * batch)
        queue.enqueue(numbers[:, None].float().expand(-1, queue.keys.shape[1]), numbers)
    return list(range(batches * batch))[-queue.size :]


@pytest.mark.parametrize(("size", "batch", "batches"), [(10, 4, 1), (10, 4, 7), (7, 3, 9), (8, 4, 5), (3, 5, 4)])
def test_the_ring_holds_the_newest_keys_whatever_divides(size: int, batch: int, batches: int) -> None:
    queue = KeyQueue(size, 2)
    assert queue.negatives()[0].shape == (0, 2)
    newest = fill(queue, batches, batch)
    keys, ids = queue.negatives()
    assert sorted(ids.tolist()) == newest and len(queue) == len(newest)
    assert keys[:, 0].tolist() == ids.tolist()
    assert int(queue.filled) == len(newest)


def test_state_goes_on_with_the_same_keys_pointer_and_images() -> None:
    first, second = KeyQueue(7, 2), KeyQueue(7, 2)
    fill(first, 3, 3)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert len(second) == 7
    for queue in (first, second):
        queue.enqueue(torch.full((2, 2), 99.0), torch.tensor([98, 99]))
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


@pytest.mark.parametrize("size", [3, 6, 12])
def test_another_length_keeps_the_newest_in_order(size: int) -> None:
    queue = KeyQueue(6, 2)
    newest = fill(queue, 4, 4)
    other = restore_queue(queue.state_dict(), size)
    assert other.size == size and sorted(other.negatives()[1].tolist()) == newest[-size:]
    other.enqueue(torch.zeros(1, 2), torch.tensor([77]))
    kept = [*newest[-size:], 77][-size:]
    assert sorted(other.negatives()[1].tolist()) == sorted(kept)
