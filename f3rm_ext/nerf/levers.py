"""Options of fields that lower what training takes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from f3rm_ext.engine.shortage import Lever, Loss, halved

if TYPE_CHECKING:
    from f3rm_ext.nerf.model import F3rmModelConfig

_FEWEST_SAMPLES, _HEAVIEST, _SMALLEST_TABLE = 16, 4, 14
"""Samples per ray, samples with features per ray, and exponent of the rows of a hash table."""


def levers(config: "F3rmModelConfig", has_features: bool) -> Iterator[Lever]:
    """What can still be lowered.

    Args:
        config: the options of the run.
        has_features: whether features are distilled.
    """
    samples = config.feature_samples_per_ray
    if has_features and (samples == 0 or samples > _HEAVIEST):
        now = samples or f"0, all {config.num_samples}"
        yield Lever(Loss.DETAIL, "pipeline.model.feature-samples-per-ray", now, _HEAVIEST)
    yield from halved(Loss.DETAIL, "pipeline.model.num-samples", config.num_samples, _FEWEST_SAMPLES)
    for index, proposal in enumerate(config.proposals):
        option = f"pipeline.model.proposals.{index}.num-samples"
        yield from halved(Loss.DETAIL, option, proposal.num_samples, 2 * _FEWEST_SAMPLES)
    grids = {"grid": config.grid} | ({"feature-grid": config.feature_grid} if has_features else {})
    for name, grid in grids.items():
        rows = grid.log2_hashmap_size
        if rows > _SMALLEST_TABLE:
            yield Lever(Loss.NEW_START, f"pipeline.model.{name}.log2-hashmap-size", rows, rows - 1)
