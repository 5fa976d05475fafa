"""How many Gaussians a run has, at first and in the end."""

from dataclasses import dataclass

from nerfstudio.engine.trainer import TrainerConfig

from f3rm_ext.engine.optimizers import schedule_length
from f3rm_ext.planning.request import CaptureSizes
from f3rm_ext.splat.initialization import FEWEST_POINTS
from f3rm_ext.splat.model import SplatModelConfig
from f3rm_ext.splat.schedule import Schedule

USUAL_GAUSSIANS = 3_240_000
"""Gaussians after 30 000 steps, the mean of seven Mip-NeRF 360 scenes, without a limit (gsplat's documentation)."""


@dataclass(frozen=True)
class Growth:
    """Numbers of Gaussians of a run, and when they change."""

    first: int
    """At the first step; with --pipeline.model.start-from, what the file has instead."""
    last: int
    """At the end of growth; memory is planned for it."""
    source: str
    """Where that number is from, for people."""
    begin: int
    """Step after which Gaussians are added."""
    end: int
    """Step from which no Gaussians are added; equal to ``begin`` if none ever are."""
    every: int
    """Steps between rounds of growth."""


def plan_growth(config: TrainerConfig, capture: CaptureSizes, gaussians: int | None = None) -> Growth | None:
    """Returns the growth of a run; None for fields.

    Without a limit the number depends on the scene, so it is assumed, and :attr:`Growth.source` says so.

    Args:
        config: options of the run.
        capture: its sizes.
        gaussians: the number at the end, if it is known.
    """
    model = config.pipeline.model
    if not isinstance(model, SplatModelConfig):
        return None
    options = model.densify
    first = capture.points if capture.points >= FEWEST_POINTS else model.num_random
    if options.cap is not None:
        first = min(first, options.cap)
    schedule = Schedule.of(schedule_length(config), model.surface, model.start_stage)
    scaled = schedule.densify(options)
    begin = max(0, scaled.start - schedule.offset)
    end = max(begin, min(config.max_num_iterations, schedule.last_growth() - schedule.offset))
    if gaussians is not None:
        last, source = gaussians, "as given by --gaussians"
    elif options.strategy == "none":
        last, source = first, "growth is off"
    elif options.cap is not None:
        last, source = options.cap, "the limit of --pipeline.model.densify.max-gaussians"
    else:
        last, source = USUAL_GAUSSIANS, "assumed, since there is no limit: give --gaussians"
    if options.cap is not None and last > options.cap:
        last, source = options.cap, "the limit of --pipeline.model.densify.max-gaussians"
    if options.strategy == "none":
        end = begin
    return Growth(first, last, source, begin, end, scaled.every)
