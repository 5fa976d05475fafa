"""Random generators go on exactly where their state was taken."""

import random
from typing import Any

import numpy as np
import torch

from f3rm_ext.engine import random_state

CPU = torch.device("cpu")


def draw() -> list[Any]:
    # An odd number of normal draws leaves a cached one in the generators of Python and numpy.
    return [torch.randn(3).tolist(), np.random.randn(), np.random.rand(2).tolist(), random.gauss(0, 1), random.random()]


def test_capture_draws_nothing() -> None:
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = draw()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    random_state.capture(CPU)
    assert draw() == expected


def test_state_survives_a_file_without_pickled_objects(tmp_path: Any) -> None:
    state = random_state.capture(CPU)
    expected = draw()
    torch.save(state, tmp_path / "state")
    random_state.restore(torch.load(tmp_path / "state", weights_only=True), CPU)
    assert draw() == expected


def test_state_of_a_gpu_is_ignored_on_the_cpu() -> None:
    state = {**random_state.capture(CPU), "cuda": torch.zeros(16, dtype=torch.uint8)}
    expected = draw()
    random_state.restore(state, CPU)
    assert draw() == expected


def test_every_process_goes_on_with_numbers_of_its_own() -> None:
    state = random_state.capture(CPU)
    drawn = []
    for rank in (0, 1, 2, 1):
        random_state.restore(state, CPU, rank=rank)
        drawn.append(draw())
    zero, one, two, again = drawn
    assert again == one, "a resumed run can be repeated"
    for first, second in ((zero, one), (zero, two), (one, two)):
        assert all(a != b for a, b in zip(first, second, strict=True))
