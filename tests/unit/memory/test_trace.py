"""The tracker against sequences whose bytes are known."""

import gc
from contextlib import ExitStack

import pytest
import torch

from f3rm_ext.memory.shapes import shapes_only
from f3rm_ext.memory.trace import AllocationTracker

KIB = 1024


@pytest.fixture(params=["real", "shapes"])
def tracker(request: pytest.FixtureRequest) -> object:
    """Entered, on tensors with and without values."""
    with ExitStack() as stack:
        if request.param == "shapes":
            stack.enter_context(shapes_only())
        yield stack.enter_context(AllocationTracker())


def test_what_is_made_counts_until_it_is_freed(tracker: AllocationTracker) -> None:
    one = torch.zeros(256)
    two = torch.zeros(512)
    assert tracker.total == 3 * KIB
    del one
    assert tracker.total == 2 * KIB
    three = two + 1
    assert tracker.total == 4 * KIB and tracker.peak == {"workspace": 4 * KIB}
    del two, three
    assert tracker.total == 0 and sum(tracker.peak.values()) == 4 * KIB


def test_views_and_changes_in_place_take_nothing(tracker: AllocationTracker) -> None:
    base = torch.zeros(256)
    view = base.view(16, 16)[:, :4].t()
    base.add_(1.0)
    assert tracker.total == KIB
    del base
    assert tracker.total == KIB, "the view still holds the storage"
    del view
    assert tracker.total == 0


def test_temporaries_count_at_the_peak(tracker: AllocationTracker) -> None:
    base = torch.zeros(256)
    tracker.reset_peak()
    found = (base * 2 + 1).sum()
    assert tracker.total == KIB + 4
    assert sum(tracker.peak.values()) == 3 * KIB
    del found


def test_labels_move_bytes_between_categories(tracker: AllocationTracker) -> None:
    with tracker.allocating("images"):
        window = torch.zeros(256)
    weights = torch.zeros(512)
    tracker.label([weights, weights.view(2, 256)], "parameters")
    assert {name: size for name, size in tracker.now.items() if size} == {"images": KIB, "parameters": 2 * KIB}
    del window
    assert tracker.now["images"] == 0 and tracker.total == 2 * KIB


def test_tensors_made_before_count_once_they_are_labelled() -> None:
    before = torch.zeros(256)
    with AllocationTracker() as tracker:
        assert tracker.total == 0
        tracker.label([before], "buffers")
        assert tracker.total == KIB and tracker.now["buffers"] == KIB


def test_a_step_of_training(tracker: AllocationTracker) -> None:
    """y = relu(x w): x and y are saved, the product is not; the gradient of w comes with the backward pass."""
    weight = torch.nn.Parameter(torch.zeros(16, 16))
    inputs = torch.zeros(64, 16)
    tracker.label([weight], "parameters")
    weight.register_post_accumulate_grad_hook(lambda value: tracker.label([value.grad], "gradients"))
    with tracker.saving():
        loss = (inputs @ weight).relu().sum()
    assert tracker.now["activations"] == 2 * 4 * KIB and tracker.now["parameters"] == KIB
    loss.backward()
    assert tracker.now["gradients"] == KIB and tracker.now["activations"] == 4 * KIB, "inputs are still held"
    del loss, inputs
    weight.grad = None
    gc.collect()
    assert tracker.total == KIB
