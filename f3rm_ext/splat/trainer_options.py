"""What training splats asks of the trainer and of the machine, before anything is built."""

from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError
from f3rm_ext.splat.memory.allocator import SETTING, VARIABLE, ask_for_expandable_segments
from f3rm_ext.splat.memory.options import MemoryOptions
from f3rm_ext.splat.rasterize import Backend


def fit_trainer(trainer: TrainerConfig, memory: MemoryOptions, backend: Backend) -> None:
    """Checks and adapts the trainer's options; asks CUDA for what it takes at its start.

    Args:
        trainer: its options, changed in place.
        memory: says whether CUDA is to grow its segments.
        backend: what draws the splats.

    Raises:
        ConfigError: splats cannot be trained like this on this machine.
    """
    devices = trainer.machine.num_devices * trainer.machine.num_machines
    if devices > 1:
        raise ConfigError(
            f"{devices} devices were asked for, but Gaussians come and go while splats train, which nerfstudio "
            "cannot follow on several: use --machine.num-devices 1."
        )
    if trainer.mixed_precision or trainer.use_grad_scaler:
        trainer.mixed_precision = trainer.use_grad_scaler = False
        CONSOLE.print("Splats train in single precision: mixed precision and the gradient scaler are off.")
    if trainer.machine.device_type != "cuda":
        return
    if memory.grow_segments and ask_for_expandable_segments() == "late":
        CONSOLE.print(f"[yellow]CUDA runs already, too late for expandable segments: set {VARIABLE}={SETTING}.")
    if backend in ("auto", "gsplat"):
        compat.check_gsplat_kernels()  # Compiling them starts CUDA.
