"""Where training images are kept, and what the log says of it."""

import pytest
import torch

from f3rm_ext.data import placement as module
from f3rm_ext.data.placement import Placement, free_memory

GIB = 2**30
CUDA = torch.device("cuda", 1)


def test_a_second_window_needs_room_of_its_own(set_gpu_memory):
    set_gpu_memory(24, 24)
    placement = Placement(CUDA, wanted=True, off="off", log=False)
    assert not placement.has_room(1), "nothing is decided yet"
    assert placement.decide(6) and placement.has_room(6)
    set_gpu_memory(20, 24)
    assert not placement.has_room(6) and placement.on_device
    placement.give_up()
    assert not placement.has_room(1)


def test_what_torch_holds_without_using_it_is_free(set_gpu_memory):
    set_gpu_memory(5 * GIB, 24 * GIB, reserved=3 * GIB, allocated=GIB)
    assert free_memory(CUDA) == 7 * GIB


@pytest.mark.parametrize(
    ("wanted", "needed", "there", "line"),
    [
        (True, 2 * GIB, True, "2.0 GiB on the GPU, within 25% of its 20.0 GiB of free memory."),
        (True, 6 * GIB, False, "6.0 GiB in main memory, more than 25% of the GPU's 20.0 GiB of free memory; copied "
         "there batch by batch."),
        (False, 3 << 20, False, "3.0 MiB in main memory (--some-option False), copied to the GPU batch by batch."),
    ],
)  # fmt: skip
def test_one_decision_and_one_line(log, watch_calls, set_gpu_memory, wanted, needed, there, line):
    set_gpu_memory(20 * GIB, 24 * GIB)
    asked = watch_calls(module, "free_memory")
    placement = Placement(CUDA, wanted=wanted, off="some-option False", what="Photos")
    assert placement.on_device is None and not log
    assert placement.decide(needed) is there
    assert placement.decide(1000 * GIB) is there and placement.decide(0) is there, "the first decision stays"
    assert log == [f"Photos: {line}"] and [call.args for call in asked] == [(CUDA,)] * wanted


def test_memory_that_runs_out_is_said_once_more(log, set_gpu_memory):
    set_gpu_memory(GIB, GIB)
    placement = Placement(CUDA, wanted=True, off="o")
    assert placement.decide(0)
    placement.give_up()
    assert not placement.decide(0) and len(log) == 2
