"""What is advised where memory runs out in training splats: only what lowers it, by options that exist."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from f3rm_ext.engine.shortage import Loss
from f3rm_ext.splat.memory.levers import levers
from f3rm_ext.splat.memory.options import MemoryOptions
from f3rm_ext.splat.model import SplatModel, SplatModelConfig


def advised(config: SplatModelConfig, device: str = "cuda", growing: bool = True) -> dict[str, tuple[object, object]]:
    found = sorted(levers(config, device, 90_000, growing), key=lambda lever: lever.loss)
    return {lever.option.removeprefix("pipeline.model."): (lever.now, lever.lower) for lever in found}


def test_the_defaults_can_be_lowered_in_every_way() -> None:
    assert list(advised(SplatModelConfig()).items()) == [
        ("expandable-segments", ("False", "True")),
        ("fragmentation", ("auto", "aggressive")),
        ("optimize-memory", ("False", "True")),
        ("sh-moments", ("float32", "int8")),
        ("surface.samples", (1_000_000, 500_000)),
        ("sh-degree", (3, 2)),
        ("densify.max-gaussians", ("without limit, 90000 there", 72_000)),
    ]


def test_the_cpu_has_no_allocator_to_set() -> None:
    assert next(iter(advised(SplatModelConfig(), "cpu"))) == "optimize-memory"


def test_what_is_low_already_is_not_named() -> None:
    config = SplatModelConfig(
        sh_degree=0, regularization="none", memory=MemoryOptions(optimize_memory=True, fragmentation="aggressive")
    )
    assert advised(config, growing=False) == {}


@pytest.mark.parametrize(("step", "growing"), [(10, True), (90, False)])
def test_a_model_knows_whether_it_grows(
    make_splat_model: Callable[..., SplatModel], begin_training: Callable[..., Any], step: int, growing: bool
) -> None:
    model = make_splat_model()
    begin_training(model, 100).before(step)
    options = [lever.option for lever in model.memory_levers()]
    assert ("pipeline.model.densify.max-gaussians" in options) is growing
    assert all(lever.loss < Loss.NEW_START for lever in model.memory_levers())


def test_every_value_that_is_advised_is_accepted() -> None:
    for memory in (MemoryOptions(), MemoryOptions(optimize_memory=True), MemoryOptions(sh_moments="int8")):
        for found in levers(SplatModelConfig(memory=memory), "cuda", 10, True):
            name = found.option.removeprefix("pipeline.model.").replace("-", "_")
            if hasattr(memory, name):
                value = {"True": True, "False": False}.get(str(found.lower), found.lower)
                assert MemoryOptions(**{name: value}).sh_dtype in (torch.float16, torch.float32)
