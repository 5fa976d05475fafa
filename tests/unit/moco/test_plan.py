"""Memory of pre-training beside what torch's profiler counts, and the batch and queue that `auto` chooses."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.devices import GIB
from f3rm_ext.moco.options import Plan, TrainConfig, make_plan
from f3rm_ext.moco.pairs import Pair
from f3rm_ext.moco.plan import memory_line, memory_of_pairs, plan_memory, step_bytes
from f3rm_ext.moco.training import Training

CPU = torch.device("cpu")


def config(**options: Any) -> TrainConfig:
    return TrainConfig(data=Path("data"), output=Path("out"), **{"epochs": 2, "image_size": 64, **options})


def allocated(plan: Plan) -> int:
    """Returns the most bytes that torch holds in the second step, by the memory events of its profiler."""
    batch, size = plan.pair.batch_size, plan.config.image_size
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        training = Training(plan, "", CPU)
        for step in range(2):
            with torch.profiler.record_function(f"step {step}"):
                one, two = (torch.randn(batch, 3, size, size) for _ in range(2))
                numbers = torch.arange(batch)
                if training.queue is not None:
                    training.queue._filled = training.queue.size
                training.train_step(iter([(one, two, numbers)] * plan.accumulation))
    results: Any = profile.profiler
    events = sorted(results.kineto_results.events(), key=lambda event: event.start_ns())
    (second,) = [event for event in events if event.name() == "step 1"]
    held = peak = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            if second.start_ns() <= event.start_ns() <= second.start_ns() + second.duration_ns():
                peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 32, "queue_size": 500},
        {"batch_size": 48, "use_amp": True, "queue_size": 20_000},
        {"batch_size": 24, "use_grad_checkpointing": True, "image_size": 96},
        {"batch_size": 16, "algorithm": "v3"},
    ],
    ids=["plain", "amp", "checkpointing", "v3"],
)
def test_planned_memory_is_within_ten_percent(options: dict[str, Any]) -> None:
    plan = make_plan(config(**options), 1000)
    assert step_bytes(plan) == pytest.approx(allocated(plan), rel=0.1)


def test_memory_is_a_line_over_the_batch() -> None:
    line = memory_line(config(queue_size=500), 1000)
    planned = step_bytes(make_plan(config(batch_size=96, queue_size=500), 1000))
    assert line.fixed_bytes + 96 * line.image_bytes == pytest.approx(planned, rel=0.02)
    assert line.largest_batch(line.fixed_bytes + 33.5 * line.image_bytes) == 33 and line.largest_batch(0.0) == 0
    accumulated = config(batch_size=8, queue_size=500, use_amp=True, gradient_accumulation_steps=2)
    listed = memory_of_pairs([Pair(8, 500), Pair(256, 65_536)], "resnet18", 64, "cpu")
    long = replace(accumulated, batch_size=256, queue_size=65_536)
    planned = [plan_memory(accumulated, 1000, CPU, 8.0).peak_bytes, plan_memory(long, 100_000, CPU, 8.0).peak_bytes]
    assert listed == pytest.approx(planned, rel=0.05)


def test_auto_takes_the_largest_batch_that_fits_with_an_advised_queue() -> None:
    given = config(preset="auto", image_size=96)
    roomy = plan_memory(given, 2800, CPU, 8.0)
    assert roomy.config.batch_size == 128  # 20 steps per pass at least
    assert make_plan(roomy.config, 2800).pair.queue_size == 2800 - 128
    narrow = plan_memory(given, 2800, CPU, 0.75)
    assert narrow.config.batch_size is not None and 2 < narrow.config.batch_size < 128
    assert narrow.peak_bytes <= 0.75 * GIB and "of 0.8 GiB" in narrow.sentences()[0]
    assert f"auto takes batch {narrow.config.batch_size} and queue" in narrow.sentences()[1]
    above = narrow.compare_first_pass(int(0.8 * GIB))
    assert "--batch-size" in above[1] and "--queue-size" in above[1]
    assert len(narrow.compare_first_pass(GIB // 2)) == 1


def test_what_cannot_fit_is_refused_with_what_does() -> None:
    with pytest.raises(ConfigError, match=r"96.* GiB.*--batch-size \d+ --queue-size \d"):
        plan_memory(config(preset="optimized-16gb", image_size=128), 2000, CPU, 1.0)
    with pytest.raises(ConfigError, match="smaller --image-size"):
        plan_memory(config(batch_size=4), 2000, CPU, 0.01)
