"""How many Gaussians there are at each step, by the schedule of a run."""

from pathlib import Path
from typing import Any

from f3rm_ext.engine.optimizers import schedule_length
from f3rm_ext.errors import ConfigError
from f3rm_ext.mesh.bound.model import BoundModelConfig
from f3rm_ext.planning.refinements import RefinementStart, plain_start
from f3rm_ext.planning.request import PlanRequest
from f3rm_ext.splat.initialization import FEWEST_POINTS
from f3rm_ext.splat.schedule import Schedule

GROWN = 3_000_000
"""Gaussians at the end of growth without a limit, where the capture tells no more: 3DGS reports 1 to 6 million for the
captures of Mip-NeRF 360 (Kerbl et al. 2023, and the sizes of its published models)."""


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
    count = (
        request.capture.points if request.capture.points >= FEWEST_POINTS else request.capture.points + model.num_random
    )
    cap = model.densify.max_gaussians
    return min(count, cap) if cap else count


def refinement_start(request: PlanRequest) -> RefinementStart:
    """Returns what a refinement begins with; without a mesh the proportions of a closed one.

    Raises:
        MeshError: the mesh cannot be read.
    """
    mesh: Path | None = request.config.pipeline.model.mesh  # type: ignore[attr-defined]
    return request.start or (RefinementStart(1, 2) if mesh is None else plain_start(mesh))


def final_gaussians(request: PlanRequest) -> int:
    """Returns how many Gaussians there are when growth ends: those of the request, or what the options suggest."""
    if request.gaussians is not None:
        return request.gaussians
    densify: Any = request.config.pipeline.model.densify  # type: ignore[attr-defined]
    begin = starting_gaussians(request)
    if densify.strategy == "none":
        return begin
    if densify.strategy == "default":
        return max(begin, densify.cap or GROWN)
    return gaussians_at(request, schedule_of(request).last_growth())


def gaussians_at(request: PlanRequest, step: int) -> int:
    """Returns how many Gaussians there are at a step of the run.

    mcmc grows by a fixed share in each round, up to its limit. For the default strategy the number is not known
    before; it is taken to grow evenly from the first round to the last.

    Args:
        request: the run.
        step: of the run, from 0.
    """
    config: Any = request.config.pipeline.model
    schedule = schedule_of(request)
    densify = schedule.densify(config.densify)
    begin, at, last = starting_gaussians(request), schedule.at(step), schedule.last_growth()
    if densify.strategy == "none":
        return request.gaussians or begin
    if densify.strategy == "mcmc":
        end = request.gaussians or densify.cap or begin
        rounds = max(0, min(at, last, densify.mcmc_stop) - 1) // densify.every - densify.start // densify.every
        count = begin
        for _ in range(max(0, rounds)):
            count = min(end, int((1 + densify.mcmc_growth) * count))
            if count == end:
                break
        return count
    end, last = final_gaussians(request), min(last, densify.stop)
    share = (at - densify.start) / max(1, last - densify.start)
    return round(begin + (end - begin) * min(1.0, max(0.0, share)))


def schedule_of(request: PlanRequest) -> Schedule:
    """Returns the schedule of the run."""
    model: Any = request.config.pipeline.model
    return Schedule.of(schedule_length(request.config), model.regularization_options, model.start_stage)
