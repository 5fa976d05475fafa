"""Options of splats that lower what training takes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from f3rm_ext.engine.shortage import Lever, Loss, halved

if TYPE_CHECKING:
    from f3rm_ext.splat.model import SplatModelConfig

_FEWEST_POINTS = 10_000
"""At which surfaces are still regularised."""


def levers(config: "SplatModelConfig", device_type: str, gaussians: int, growing: bool) -> Iterator[Lever]:
    """What can still be lowered.

    Args:
        config: the options of the run.
        device_type: what it runs on.
        gaussians: how many there are.
        growing: whether more will be added.
    """
    memory = config.memory
    if device_type == "cuda":
        if not memory.grow_segments:
            yield Lever(Loss.NOTHING, "pipeline.model.expandable-segments", "False", "True")
        if memory.fragmentation != "aggressive":
            yield Lever(Loss.NOTHING, "pipeline.model.fragmentation", memory.fragmentation, "aggressive")
    if config.sh_degree:
        if not memory.optimize_memory:
            yield Lever(Loss.ROUNDING, "pipeline.model.optimize-memory", "False", "True")
        if memory.moments != "int8":
            yield Lever(Loss.ROUNDING, "pipeline.model.sh-moments", memory.moments, "int8")
    if config.regularization != "none":
        yield from halved(Loss.NOISE, "pipeline.model.surface.samples", config.surface.samples, _FEWEST_POINTS)
    if config.sh_degree:
        yield Lever(Loss.DETAIL, "pipeline.model.sh-degree", config.sh_degree, config.sh_degree - 1)
    if growing:
        # What is there is not taken away again, but no more is added.
        cap = config.densify.max_gaussians
        lower = max(1, int(0.8 * min(gaussians, cap or gaussians)))
        now = f"{cap or 'without limit'}, {gaussians} there"
        yield Lever(Loss.DETAIL, "pipeline.model.densify.max-gaussians", now, lower)
