"""Options of a field that can be lowered when memory runs out in training."""

from collections.abc import Iterator, Mapping, Sequence

from f3rm_ext.memory.options import MemoryOption, QualityImpact, halve
from f3rm_ext.nerf.fields import GridOptions

MIN_SAMPLES, MIN_PROPOSAL_SAMPLES = 16, 32
"""Samples per ray of the scene field and of a proposal network below which no memory option goes."""
MIN_CHUNK = 1024
"""Rays per chunk of a picture below which no memory option goes."""
FEW_FEATURE_SAMPLES = 4
"""Samples of a ray that suffice to render features (:func:`~f3rm_ext.nerf.losses.heaviest_samples`)."""
MIN_LOG2_TABLE = 14
"""Binary logarithm of the rows of a hash table below which no memory option goes."""


def field_options(
    num_samples: int,
    proposal_samples: Sequence[int],
    feature_samples_per_ray: int | None,
    grids: Mapping[str, GridOptions],
) -> Iterator[MemoryOption]:
    """Yields what can still be lowered.

    Args:
        feature_samples_per_ray: samples per ray at which features are rendered, 0 for all; None without features.
    """
    if feature_samples_per_ray is not None and (
        feature_samples_per_ray == 0 or feature_samples_per_ray > FEW_FEATURE_SAMPLES
    ):
        now = feature_samples_per_ray or f"0, all {num_samples}"
        yield MemoryOption(QualityImpact.DETAIL, "pipeline.model.feature-samples-per-ray", now, FEW_FEATURE_SAMPLES)
    yield from halve(QualityImpact.DETAIL, "pipeline.model.num-samples", num_samples, MIN_SAMPLES)
    for index, samples in enumerate(proposal_samples):
        yield from halve(
            QualityImpact.DETAIL, f"pipeline.model.proposals.{index}.num-samples", samples, MIN_PROPOSAL_SAMPLES
        )
    for name, grid in grids.items():
        rows = grid.log2_hashmap_size
        if rows > MIN_LOG2_TABLE:
            yield MemoryOption(QualityImpact.RESTART, f"pipeline.model.{name}.log2-hashmap-size", rows, rows - 1)
