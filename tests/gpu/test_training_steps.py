"""Steps of the pose estimator's training and of MoCo on a GPU: memory beside the plan, and waits of the host."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

OPTIONS = ["--tiny", "--warm-up", "1", "--steps", "2", "--seconds", "0"]
TOLERANCE = 0.4
"""Libraries of CUDA take some MiB of torch's allocator for themselves, and tiny models are small."""


@pytest.mark.parametrize(
    ("program", "row", "waits"),
    [("pose_training", "sparse", 1), ("pose_training", "dense-all", 1), ("moco_training", "low-vram", 0)],
)
def test_a_step_takes_what_is_planned_and_waits_seldom(
    program: str, row: str, waits: int, load: Callable[[str], ModuleType], device: torch.device
) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("diffusers")
    found_in = load(program)
    found = found_in.run_one(row, found_in.make_parser().parse_args([*OPTIONS, "--device", device.type]))
    assert found["peak_to_plan"] == pytest.approx(1, abs=TOLERANCE) and not found["refused"]
    if device.type == "cuda":
        assert found["sync_warnings_per_step"] <= waits
