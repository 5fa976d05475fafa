"""Estimates the memory of a run, without a GPU and without data."""

import time
from collections.abc import Callable
from dataclasses import replace

from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.estimate import Category, MemoryEstimate, Phase, add_overhead, process_bytes
from f3rm_ext.mesh.bound.model import BoundModelConfig
from f3rm_ext.nerf.model import F3rmModelConfig
from f3rm_ext.planning.fields import estimate_field
from f3rm_ext.planning.request import PlanRequest
from f3rm_ext.planning.splats import estimate_splats
from f3rm_ext.splat.model import SplatModelConfig
from f3rm_ext.utils.console import silence

Estimator = Callable[[PlanRequest], MemoryEstimate]
PLANNERS: dict[type, Estimator] = {
    F3rmModelConfig: estimate_field,
    SplatModelConfig: estimate_splats,
    BoundModelConfig: estimate_splats,
}
"""Functions that estimate the memory of a run's tensors, by the class of its model's configuration; see
:func:`register_planner`."""
REFINEMENT_BYTES = 120 << 20
"""What a refinement adds to the process: Open3D, and what the C library keeps after colours were taken from photos."""
PROGRESS_EVERY_S = 10.0
"""Seconds between messages of a long search."""


def register_planner(config_type: type, planner: Estimator) -> None:
    """Adds a method to those that can be planned.

    Args:
        config_type: class of its model's configuration, ``config.pipeline.model``. Subclasses need planners of their
            own.
        planner: estimates the memory of the tensors of such a run: neither that of CUDA itself nor fragmentation.
    """
    PLANNERS[config_type] = planner


def estimate_memory(request: PlanRequest) -> MemoryEstimate:
    """Estimates the memory of a run: what each device holds at the peak of a training step, a picture and a query.

    Two training steps of the real model run on tensors without values. With several processes, figures are those of one
    of them, which is one device.

    Raises:
        ConfigError: there is no planner for this method.
        UserError: an option of the run cannot be used.
    """
    planner = PLANNERS.get(type(getattr(request.config.pipeline, "model", None)))
    if planner is None:
        raise ConfigError(
            f"The method {request.config.method_name} has no memory plan: plans are made for f3rm-ext and sugar-ext, "
            "and for methods that register a planner."
        )
    tensors = planner(request)
    device: dict[Phase, dict[Category, int]] = {
        phase: add_overhead(held, request.device.type) for phase, held in tensors.device.items()
    }
    if request.device.type == "cpu":
        refined = isinstance(request.config.pipeline.model, BoundModelConfig)
        for held in device.values():
            held["context"] = process_bytes() + REFINEMENT_BYTES * refined
    return MemoryEstimate(device, tensors.host)


def cached(estimate: Estimator, report: Callable[[str], None] = lambda text: None) -> Estimator:
    """Remembers estimates by the contents of their requests. One with pictures answers a request without them, too.

    Args:
        report: receives a message from time to time in a long search.
    """
    estimates: dict[str, MemoryEstimate] = {}
    reported_s = time.monotonic()

    def estimate_once(request: PlanRequest) -> MemoryEstimate:
        nonlocal reported_s
        with_pictures = repr(replace(request, pictures=True))
        key = with_pictures if with_pictures in estimates else repr(request)
        if key not in estimates:
            if time.monotonic() - reported_s > PROGRESS_EVERY_S:
                reported_s = time.monotonic()
                report(f"Searching for options that fit: {len(estimates)} tried.")
            with silence():  # models print how they start
                estimates[key] = estimate(request)
        return estimates[key]

    return estimate_once
