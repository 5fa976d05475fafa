"""The growth of a splat run, for people."""

from dataclasses import dataclass

from f3rm_ext.mesh.bound.model import BoundModelConfig
from f3rm_ext.planning.growth import final_gaussians, schedule_of, starting_gaussians
from f3rm_ext.planning.request import PlanRequest
from f3rm_ext.splat.model import SplatModelConfig

LIMIT = "pipeline.model.densify.max-gaussians"


@dataclass(frozen=True)
class Growth:
    """Numbers of Gaussians of a run, and when they change."""

    first: int
    """At the first step; with --pipeline.model.start-from, what the file has instead."""
    last: int
    """At the end of growth; memory is planned for it."""
    source: str
    """Where that number is from."""
    begin: int
    """Step of the run after which Gaussians are added."""
    end: int
    """Step from which none are added; equal to ``begin`` if none ever are."""
    every: int
    """Steps between rounds of growth."""


def growth_of(request: PlanRequest) -> Growth | None:
    """Returns the growth of a run; None for fields."""
    model = request.config.pipeline.model
    if not isinstance(model, SplatModelConfig):
        return None
    schedule = schedule_of(request)
    options = schedule.densify(model.densify)
    first, last = starting_gaussians(request), final_gaussians(request)
    begin = max(0, options.start - schedule.offset)
    end = max(begin, min(request.config.max_num_iterations, schedule.last_growth() - schedule.offset))
    if isinstance(model, BoundModelConfig):
        source, end = _of_mesh(request), begin
    elif options.strategy == "none":
        source, end = "growth is off", begin
    elif options.cap is not None and last == options.cap:
        source = f"the limit, --{LIMIT}"
    elif request.gaussians is not None:
        source = "as given by --gaussians"
    elif options.strategy == "mcmc":
        source = "what its rounds of growth lead to"
    else:
        source = "assumed, as there is no limit: give --gaussians"
    return Growth(first, last, source, begin, end, options.every)


def _of_mesh(request: PlanRequest) -> str:
    if request.gaussians is not None:
        return "as given by --gaussians"
    if request.start is not None:
        return f"{request.start.triangles:,} triangles, divided where splats are dense; {request.start.free:,} are free"
    given = request.config.pipeline.model.start_from is not None  # type: ignore[attr-defined]
    return "on the triangles of the mesh" + (" as it is: give --data to count what splats add" if given else "")


def limited(gaussians: int | None, model: object) -> int | None:
    """Returns a number of Gaussians within the limit of a model's options."""
    cap = model.densify.cap if isinstance(model, SplatModelConfig) else None
    return gaussians if gaussians is None or cap is None else min(gaussians, cap)
