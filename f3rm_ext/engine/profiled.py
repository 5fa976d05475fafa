"""The tensor profiler at work in the trainer: --profile-tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation
from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.utils import writer
from nerfstudio.utils.misc import step_check
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext import __version__
from f3rm_ext.engine.protocols import SavesMemory
from f3rm_ext.engine.ranks import is_first
from f3rm_ext.memory.options import MemoryOption
from f3rm_ext.memory.shortage import is_out_of_memory
from f3rm_ext.profiling.profile_file import NAME
from f3rm_ext.profiling.profiler import Parts, TensorProfiler

TAG = "TensorProfiling"


class ProfiledTrainer:
    """Mixin of the trainer: records what the memory is made of, if the options say so. Rank 0 does it for all."""

    config: Any
    pipeline: Any
    optimizers: Optimizers
    callbacks: list[TrainingCallback]
    base_dir: Path
    device: Any
    viewer_state: Any
    training_state: Literal["training", "paused", "completed"]
    profiler: TensorProfiler | None = None

    def prepare_profile(self) -> None:
        """Starts the profile, after everything else is set up."""
        if not self.config.profile_tensors or not is_first():
            return
        self.base_dir.mkdir(parents=True, exist_ok=True)
        profiler = self.profiler = TensorProfiler(
            self.base_dir / NAME,
            torch.device(self.device),
            self._parts,
            every=self.config.profile_tensors_every,
            last_step=self.config.max_num_iterations - 1,
            about={"method": self.config.method_name, "version": __version__},
            say=lambda text: CONSOLE.print(f"Profile: {text}", style="bold yellow", highlight=False, markup=False),
            publish=_publisher(self.base_dir / self.config.logging.relative_log_dir),
            between="between steps" if self.viewer_state is None else "viewer",
        )

        def after(step: int) -> None:
            last = step == self.config.max_num_iterations - 1
            if last and hasattr(self.pipeline.model, "lifted"):
                profiler.ends("finish")
            else:
                profiler.ends("densify" if hasattr(self.pipeline.model, "densifier") else "train")
            profiler.step_post_backward(step)

        self.callbacks = [
            TrainingCallback(
                [TrainingCallbackLocation.BEFORE_TRAIN_ITERATION], lambda step: profiler.step_pre_backward()
            ),
            *self.callbacks,
            TrainingCallback([TrainingCallbackLocation.AFTER_TRAIN_ITERATION], after),
        ]

    def _parts(self) -> Parts:
        options = _entries(self.memory_options())
        return Parts(self.pipeline.model, self.optimizers.optimizers, self.pipeline.datamanager, options)

    def memory_options(self) -> list[MemoryOption]:
        """Returns the options that lower the memory of training, in any order."""
        parts = (self.pipeline.datamanager, self.pipeline.model)
        return [option for part in parts if isinstance(part, SavesMemory) for option in part.memory_options()]

    def train(self) -> None:
        try:
            super().train()  # type: ignore[misc]
        except BaseException as error:
            self._end_profile(_reason(error))
            raise
        self._end_profile("finished")

    def train_iteration(self, step: int) -> Any:
        if self.profiler is None:
            return super().train_iteration(step)  # type: ignore[misc]
        with self.profiler.step(step):
            outcome = super().train_iteration(step)  # type: ignore[misc]
        self.profiler.ends("train")
        return outcome

    def eval_iteration(self, step: int) -> None:
        if self.profiler is None or not self._evaluates(step):
            super().eval_iteration(step)  # type: ignore[misc]
            return
        with self.profiler.evaluation():
            super().eval_iteration(step)  # type: ignore[misc]

    def _evaluates(self, step: int) -> bool:
        config = self.config
        intervals = (config.steps_per_eval_batch, config.steps_per_eval_image, config.steps_per_eval_all_images)
        recorded = config.is_tensorboard_enabled() or config.is_wandb_enabled() or config.is_comet_enabled()
        return recorded and any(step_check(step, interval) for interval in intervals)

    def _end_profile(self, reason: str) -> None:
        if self.profiler is not None:
            self.profiler.close("finished" if self.training_state == "completed" else reason)
            self.profiler = None


def _publisher(folder: Path) -> Callable[[dict[str, float], int], None]:
    """Returns what passes scalars on: to the writers that the run has, or to a TensorBoard file if it has none."""
    if any(not isinstance(one, writer.LocalWriter) for one in writer.EVENT_WRITERS):
        return lambda scalars, step: writer.put_dict(TAG, scalars, step)
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(folder))

    def publish(scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            board.add_scalar(f"{TAG}/{name}", value, step)
        board.flush()

    return publish


def _entries(options: list[MemoryOption]) -> list[dict[str, str]]:
    return [
        {
            "option": option.name,
            "now": str(option.now),
            "lower": str(option.lower),
            "quality_impact": option.quality_impact.description,
        }
        for option in sorted(options, key=lambda option: option.quality_impact)
    ]


def _reason(error: BaseException) -> str:
    if is_out_of_memory(error):
        return "memory ran out"
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return "stopped"
    return f"failed with {type(error).__name__}"
