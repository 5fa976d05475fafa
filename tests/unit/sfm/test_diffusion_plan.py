"""Memory of a training of DiffusionSfM at the published size."""

import pytest

from f3rm_ext.sfm.diffusion.plan import make_plan, memory_lines, step_memory
from f3rm_ext.sfm.diffusion.settings import parse_settings

MIB = 2**20


def test_weights_gradients_and_moments_are_those_that_the_plan_counts() -> None:
    settings = parse_settings(("model.num_images=2", "training.batch_size=1"), "sparse")
    held = step_memory(settings, processes=1)
    plan = make_plan(settings, 1)
    assert held["parameters"] == 4 * plan.parameters
    assert held["optimizer"] == pytest.approx(2 * 4 * plan.trained, rel=1e-3)
    assert step_memory(settings, processes=8).get("gradients", 0) >= 4 * plan.trained, "buckets"


def test_more_scenes_and_full_precision_take_more() -> None:
    few, many = (
        step_memory(parse_settings((f"training.batch_size={batch}", "model.size=tiny")), 1)["activations"]
        for batch in (2, 4)
    )
    assert 1.8 < many / few < 2.1
    full = parse_settings(("training.batch_size=2", "model.size=tiny", "training.mixed_precision=False"))
    assert step_memory(full, 1)["activations"] > 1.3 * few


def test_unfreezing_takes_gradients_of_everything() -> None:
    small = ("training.batch_size=1", "model.num_images=2", "model.size=tiny")
    frozen, unfrozen = memory_lines(parse_settings(small, "dense"), 1)
    assert "at the peak of a step" in frozen and "after 50,000 steps" in unfrozen
    settings = parse_settings(small, "dense")
    assert step_memory(settings, 1, unfrozen=True)["optimizer"] > 5 * step_memory(settings, 1)["optimizer"]
