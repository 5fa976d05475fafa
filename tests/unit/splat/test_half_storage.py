"""A model whose harmonics are stored in half the bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.splat.memory.options import MemoryOptions
from f3rm_ext.splat.model import SplatModel


@pytest.fixture
def half(make_splat_model: Callable[..., SplatModel]) -> SplatModel:
    return make_splat_model(sh_degree=2, memory=MemoryOptions(sh_storage="float16"))


def test_only_harmonics_are_stored_in_half(half: SplatModel) -> None:
    stored = {name: value.dtype for name, value in half.gauss_params.items()}
    assert stored.pop("features_rest") == torch.float16
    assert set(stored.values()) == {torch.float32}


def test_the_picture_is_that_of_float32(
    half: SplatModel, make_splat_model: Callable[..., SplatModel], ring_cameras: Callable[..., Any]
) -> None:
    whole = make_splat_model(sh_degree=2)
    camera = ring_cameras()[1:2]
    difference = half.get_outputs_for_camera(camera)["rgb"] - whole.get_outputs_for_camera(camera)["rgb"]
    assert 0 < float(difference.abs().max()) < 2e-3


def test_a_checkpoint_of_float32_opens_and_says_what_is_lost(
    half: SplatModel, make_splat_model: Callable[..., SplatModel], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = make_splat_model(45, sh_degree=2)
    half.load_state_dict(whole.state_dict())
    assert "by rounding" in " ".join(capsys.readouterr().out.split())
    rest = half.gauss_params["features_rest"]
    assert rest.dtype == torch.float16 and torch.equal(rest.data, whole.gauss_params["features_rest"].data.half())


def test_half_opens_as_float32_without_loss(
    half: SplatModel, make_splat_model: Callable[..., SplatModel], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = make_splat_model(45, sh_degree=2)
    whole.load_state_dict(half.state_dict())
    assert whole.gauss_params["features_rest"].dtype == torch.float32
    assert "SH degree" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("memory", "moments", "reflective"),
    [
        (MemoryOptions(), "float32", 0.0),
        (MemoryOptions(optimize_memory=True, expandable_segments=False), "bfloat16", 0.0),
        (MemoryOptions(sh_storage="selective", sh_moments="int8"), "int8", 0.05),
    ],
)
def test_the_optimiser_keeps_what_the_options_say(memory: MemoryOptions, moments: str, reflective: float) -> None:
    config = make_splat_config("sugar-ext")
    config.pipeline.model.memory = memory
    config.pipeline.model.fit_optimizers(config.optimizers)
    optimizer = config.optimizers["features_rest"]["optimizer"]
    assert optimizer.moments == moments and optimizer.reflective_above == reflective
