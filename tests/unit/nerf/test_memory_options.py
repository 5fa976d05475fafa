"""Options that are suggested when memory runs out in training a field."""

from typing import Any

import pytest

from f3rm_ext.memory.options import QualityImpact
from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.nerf.fields import GridOptions
from f3rm_ext.nerf.memory_options import field_options
from f3rm_ext.nerf.model import F3rmModelConfig

GRIDS = {"grid": GridOptions(), "feature-grid": GridOptions()}


def test_what_needs_a_new_start_comes_last() -> None:
    found = sorted(field_options(48, (256, 96), 0, GRIDS), key=lambda option: option.quality_impact)
    assert [(option.name.removeprefix("pipeline.model."), option.now, option.lower) for option in found] == [
        ("feature-samples-per-ray", "0, all 48", 4),
        ("num-samples", 48, 24),
        ("proposals.0.num-samples", 256, 128),
        ("proposals.1.num-samples", 96, 48),
        ("grid.log2-hashmap-size", 19, 18),
        ("feature-grid.log2-hashmap-size", 19, 18),
    ]
    assert [option.quality_impact for option in found][-2:] == [QualityImpact.RESTART] * 2


def test_nothing_is_left_to_lower() -> None:
    smallest = GridOptions(log2_hashmap_size=14)
    assert not list(field_options(24, (48,), 4, {"grid": smallest}))


@pytest.mark.parametrize("has_features", [True, False])
def test_a_model_names_its_own(make_model: Any, make_spec: Any, has_features: bool) -> None:
    model = make_model((make_spec("a"),) if has_features else ())
    assert any("feature" in option.name for option in model.memory_options()) is has_features


def test_the_lite_preset_has_its_features_at_four_samples() -> None:
    config = make_config("f3rm-ext-lite").pipeline.model
    assert isinstance(config, F3rmModelConfig)
    samples = config.feature_samples_per_ray
    found = field_options(config.num_samples, (), samples, {})
    assert samples == 4 and "pipeline.model.feature-samples-per-ray" not in [option.name for option in found]
