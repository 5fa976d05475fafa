"""The memory that a run takes, without a GPU and without data."""

from collections.abc import Callable, Mapping

from f3rm_ext.errors import ConfigError
from f3rm_ext.mesh.bound.model import BoundModelConfig
from f3rm_ext.nerf.model import F3rmModelConfig
from f3rm_ext.planning.allowances import (
    CONTEXT_BYTES,
    CPU_FRAGMENTATION,
    FRAGMENTATION,
    PROCESS_BYTES,
    REFINEMENT_BYTES,
    process_bytes,
)
from f3rm_ext.planning.estimate import Category, MemoryEstimate, Phase
from f3rm_ext.planning.fields import estimate_field
from f3rm_ext.planning.request import PlanRequest
from f3rm_ext.planning.splats import estimate_splats
from f3rm_ext.splat.model import SplatModelConfig

MemoryPlanner = Callable[[PlanRequest], MemoryEstimate]
"""Returns the memory of the tensors of a run, for one kind of model: without what CUDA takes and without gaps."""
PLANNERS: dict[type, MemoryPlanner] = {
    F3rmModelConfig: estimate_field,
    SplatModelConfig: estimate_splats,
    BoundModelConfig: estimate_splats,
}
"""By configuration of the model; see :func:`register_planner`."""


def register_planner(config_type: type, planner: MemoryPlanner) -> None:
    """Lets a method take part in plans.

    Args:
        config_type: class of the configuration of its model, ``config.pipeline.model``. Subclasses need planners
            of their own.
        planner: of these models.
    """
    PLANNERS[config_type] = planner


def estimate_memory(request: PlanRequest) -> MemoryEstimate:
    """Plans the memory of a run: what each device holds at the peak of a training step, a picture and a query.

    Two training steps of the real model run on tensors without values. With several processes, figures are those of one
    of them, which is one device.

    Args:
        request: the run; nothing of it is changed.

    Raises:
        ConfigError: there is no plan for this method.
        UserError: an option of the run cannot be used.
    """
    planner = PLANNERS.get(type(getattr(request.config.pipeline, "model", None)))
    if planner is None:
        raise ConfigError(
            f"The method {request.config.method_name} has no memory plan: plans are made for f3rm-ext and sugar-ext, "
            "and for methods that register a planner."
        )
    found = planner(request)
    device: dict[Phase, dict[Category, int]] = {
        phase: with_allowances(held, request.device.type) for phase, held in found.device.items()
    }
    if request.device.type == "cpu":
        for held in device.values():
            held["context"] = process_bytes() + REFINEMENT_BYTES * isinstance(
                request.config.pipeline.model, BoundModelConfig
            )
    return MemoryEstimate(device, found.host)


def with_allowances(held: Mapping[Category, int], device_type: str) -> dict[Category, int]:
    """Adds to the tensors on a device what CUDA or the process takes, and an allowance for gaps."""
    cuda, tensors = device_type == "cuda", sum(held.values())
    gaps = round((FRAGMENTATION if cuda else CPU_FRAGMENTATION) * tensors)
    return {**held, "context": CONTEXT_BYTES if cuda else PROCESS_BYTES, "fragmentation": gaps}
