"""The number of Gaussians at each step of a run, by its schedule."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from f3rm_ext.engine.optimizers import schedule_length
from f3rm_ext.errors import ConfigError
from f3rm_ext.mesh.bound.model import BoundModelConfig
from f3rm_ext.planning.request import PlanRequest, RefinementStart
from f3rm_ext.splat.densify import DensifyOptions
from f3rm_ext.splat.initialization import FEWEST_POINTS
from f3rm_ext.splat.model import SplatModelConfig

ASSUMED_GAUSSIANS = 3_000_000
"""Gaussians at the end of growth without a limit, where the capture tells no more: 3DGS reports 1 to 6 million for the
captures of Mip-NeRF 360 (Kerbl et al. 2023, and the sizes of its published models)."""
LIMIT = "pipeline.model.densify.max-gaussians"


@dataclass(frozen=True)
class Growth:
    """The number of Gaussians of a run, and when it changes."""

    first: int
    """Gaussians at the first step; with --pipeline.model.start-from, those of the file."""
    last: int
    """Gaussians at the end of growth; memory is planned for them."""
    source: str
    """The origin of `last`, as the plan prints it."""
    begin: int
    """Step of the run after which Gaussians are added."""
    end: int
    """Step from which none are added; equal to ``begin`` if none ever are."""
    every: int
    """Steps between rounds of growth."""


def plan_growth(request: PlanRequest) -> Growth | None:
    """Returns the growth of a run; None for fields."""
    model = request.config.pipeline.model
    if isinstance(model, BoundModelConfig):
        return Growth(starting_gaussians(request), final_gaussians(request), _mesh_source(request), 0, 0, 1)
    if not isinstance(model, SplatModelConfig):
        return None
    options, begin, end = _growth_steps(request, model)
    first, last = starting_gaussians(request), final_gaussians(request)
    if options.strategy == "none":
        source = "growth is off"
    elif options.cap is not None and last == options.cap:
        source = f"the limit, --{LIMIT}"
    elif request.gaussians is not None:
        source = "as given by --gaussians"
    elif end == begin:
        source = "growth stops before it starts"
    elif options.cap is not None and last > options.cap:
        source = "above the limit of growth, which removes none"
    elif options.strategy == "mcmc":
        source = "the result of all rounds of growth"
    else:
        source = "assumed, as there is no limit: give --gaussians"
    return Growth(first, last, source, begin, end, options.every)


def _growth_steps(request: PlanRequest, model: SplatModelConfig) -> tuple[DensifyOptions, int, int]:
    """Returns the options of growth for the length of the run, and the steps of the run between which Gaussians are
    added; the two are equal if none ever are."""
    schedule = model.schedule(schedule_length(request.config))
    options = schedule.densify(model.densify)
    stop = min(schedule.last_growth(), options.mcmc_stop if options.strategy == "mcmc" else options.stop)
    begin = max(0, options.start - schedule.offset)
    last = begin if options.strategy == "none" else min(request.config.max_num_iterations, stop - schedule.offset)
    return options, begin, max(begin, last)


def _mesh_source(request: PlanRequest) -> str:
    if request.gaussians is not None:
        return "as given by --gaussians"
    if request.start is not None:
        return f"{request.start.triangles:,} triangles, divided where splats are dense; {request.start.free:,} are free"
    has_start = request.config.pipeline.model.start_from is not None  # type: ignore[attr-defined]
    return "on the triangles of the mesh" + (" as it is: give --data to count what splats add" if has_start else "")


def starting_gaussians(request: PlanRequest) -> int:
    """Returns how many Gaussians a run starts with.

    Raises:
        ConfigError: it starts from a file, and the request does not tell their number.
        MeshError: the mesh to refine cannot be read.
    """
    model: Any = request.config.pipeline.model
    if isinstance(model, BoundModelConfig):
        if request.gaussians is not None:
            return request.gaussians
        if model.mesh is None and request.start is None:
            raise ConfigError(
                "The plan of a refinement needs the number of Gaussians: give the mesh by --mesh, or --gaussians."
            )
        start = refinement_start(request)
        return start.triangles * model.gaussians_per_triangle + start.free
    if model.start_from is not None:
        if request.gaussians is None:
            raise ConfigError(
                f"The plan of a run that starts from {model.start_from} needs their number: give --gaussians."
            )
        return request.gaussians
    points = request.capture.points
    count = points if points >= FEWEST_POINTS else points + model.num_random
    cap = model.densify.max_gaussians
    return min(count, cap) if cap else count


def refinement_start(request: PlanRequest) -> RefinementStart:
    """Returns what a refinement starts from; without a mesh the proportions of a closed one.

    Raises:
        MeshError: the mesh cannot be read.
    """
    mesh: Path | None = request.config.pipeline.model.mesh  # type: ignore[attr-defined]
    return request.start or (RefinementStart(1, 2) if mesh is None else RefinementStart.from_mesh(mesh))


def final_gaussians(request: PlanRequest) -> int:
    """Returns how many Gaussians there are when growth ends: those of the request, or what the options suggest.

    mcmc grows by a fixed share in each round, up to its limit. The number of the default strategy cannot be known: it
    is taken to be the limit.
    """
    if request.gaussians is not None:
        return request.gaussians
    count, model = starting_gaussians(request), request.config.pipeline.model
    if not isinstance(model, SplatModelConfig):
        return count
    densify, begin, end = _growth_steps(request, model)
    if end == begin:
        return count
    if densify.strategy == "default":
        return max(count, densify.cap or ASSUMED_GAUSSIANS)
    most = max(count, densify.cap or count)  # growth stops there, and removes none
    for _ in range((end - 1) // densify.every - begin // densify.every):
        count = min(most, int((1 + densify.mcmc_growth) * count))
    return count


def count_parts(request: PlanRequest) -> int:
    """Returns over how many devices the Gaussians are divided; 1 where each has all of them."""
    return request.processes if getattr(request.config.pipeline.model, "shard_gaussians", False) else 1
