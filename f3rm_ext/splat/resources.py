"""What training splats needs from the trainer and the machine: checks before it starts, advice when memory runs out."""

from collections.abc import Iterator

from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext import compat
from f3rm_ext.memory.options import MemoryOption, QualityImpact, RunState, halve
from f3rm_ext.splat.memory.allocator import SETTING, VARIABLE, request_expandable_segments
from f3rm_ext.splat.memory.options import MemoryOptions
from f3rm_ext.splat.rasterize import Backend

_FEWEST_POINTS = 10_000
"""Surface regularisation needs at least this many points per step."""


def fit_trainer(trainer: TrainerConfig, memory: MemoryOptions, backend: Backend) -> None:
    """Checks and adapts the trainer's options, and sets up CUDA's allocator, before anything is built.

    Args:
        trainer: options of the trainer, changed in place.

    Raises:
        ConfigError: splats cannot be trained with these options on this machine.
    """
    if trainer.mixed_precision or trainer.use_grad_scaler:
        trainer.mixed_precision = trainer.use_grad_scaler = False
        CONSOLE.print("Splats train in single precision: mixed precision and the gradient scaler are off.")
    if trainer.machine.device_type != "cuda":
        return
    if memory.grow_segments and request_expandable_segments() == "late":
        CONSOLE.print(f"[yellow]CUDA is running already, too late for expandable segments: set {VARIABLE}={SETTING}.")
    if backend in ("auto", "gsplat"):
        compat.check_gsplat_kernels()  # Compiling the kernels starts CUDA.


def splat_memory_options(
    memory: MemoryOptions, state: RunState, sh_degree: int, samples: int = 0, max_gaussians: int = 0
) -> Iterator[MemoryOption]:
    """Yields the options that can still be changed to lower the memory of a training step.

    Args:
        samples: points per step at which surfaces are regularised; 0 without regularisation.
        max_gaussians: limit on the number of Gaussians; 0 for no limit.
    """
    if state.device_type == "cuda":
        if not memory.grow_segments:
            yield MemoryOption(QualityImpact.NONE, "pipeline.model.expandable-segments", "False", "True")
        if memory.fragmentation != "aggressive":
            yield MemoryOption(QualityImpact.NONE, "pipeline.model.fragmentation", memory.fragmentation, "aggressive")
    if sh_degree:
        if not memory.optimize_memory:
            yield MemoryOption(QualityImpact.PRECISION, "pipeline.model.optimize-memory", "False", "True")
        if memory.moments != "int8":
            yield MemoryOption(QualityImpact.PRECISION, "pipeline.model.sh-moments", memory.moments, "int8")
    if samples:
        yield from halve(QualityImpact.NOISE, "pipeline.model.surface.samples", samples, _FEWEST_POINTS)
    if sh_degree:
        yield MemoryOption(QualityImpact.DETAIL, "pipeline.model.sh-degree", sh_degree, sh_degree - 1)
    if state.growing:
        # A lower limit removes no Gaussians, but stops growth.
        lower = max(1, int(0.8 * min(state.gaussians, max_gaussians or state.gaussians)))
        now = f"{max_gaussians or 'without limit'}, {state.gaussians} there"
        yield MemoryOption(QualityImpact.DETAIL, "pipeline.model.densify.max-gaussians", now, lower)
