"""Nerfstudio's trainer with safe checkpoints, exact resume and clean interruption; nerfstudio still runs the loop."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import tyro
import yaml
from nerfstudio.configs.base_config import MachineConfig, ViewerConfig
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation
from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.utils import comms
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext import compat, events
from f3rm_ext.engine import checkpoint, launch
from f3rm_ext.engine.arguments import find_option
from f3rm_ext.engine.config_file import read_config
from f3rm_ext.engine.ns_export import export_command
from f3rm_ext.engine.optimizers import fit_optimizers, scale_rates
from f3rm_ext.engine.options import LocalViewerConfig, OwnModelConfig
from f3rm_ext.engine.profiled import ProfiledTrainer
from f3rm_ext.engine.protocols import ChecksExport, FitsTrainer, HasChoices, ScalesRates
from f3rm_ext.engine.ranks import CHECK_EVERY, is_first
from f3rm_ext.engine.resumable import ResumableTrainer
from f3rm_ext.engine.synchronization import SynchronizedOptimizers, named_parameters
from f3rm_ext.errors import CheckpointError, ConfigError
from f3rm_ext.memory.shortage import is_out_of_memory, shortage_error
from f3rm_ext.utils import threads
from f3rm_ext.utils.atomic_files import write_atomic
from f3rm_ext.utils.ranges import Count, Range, check_ranges

MOST_STEPS = 10_000_000
"""Steps of the longest training: weeks on any card."""


@dataclass
class F3rmTrainerConfig(TrainerConfig):
    """Nerfstudio's training options, with defaults that suit this machine and keep the viewer on it.

    With `save_only_latest_checkpoint` one checkpoint before the newest is kept as well, so that a damaged newest one
    costs `steps_per_save` steps instead of the run.
    """

    _target: type = field(default_factory=lambda: F3rmTrainer)
    machine: MachineConfig = field(
        default_factory=lambda: MachineConfig(device_type=compat.default_device_type())  # type: ignore[arg-type]
    )
    """Machine configuration. The device is cuda if there is one, otherwise cpu."""
    viewer: ViewerConfig = field(default_factory=LocalViewerConfig)
    """Viewer configuration. It listens on this machine only, unless --viewer.websocket-host says otherwise."""
    # Nerfstudio's alias for a model option that our models do not have.
    prompt: tyro.conf.Suppress[str | None] = None

    steps_per_save: Count = 1000
    """Number of steps between saves, 1 or more."""
    max_num_iterations: Annotated[int, Range(1, MOST_STEPS)] = 1_000_000
    """Number of steps of the run, including those before a resume: 1 to 10,000,000."""
    schedule_steps: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Length of the schedule (stages, growth, decays) if --max-num-iterations ends earlier, as in 4000 of 15000 steps.
    At least --max-num-iterations; 0 means equal to it."""
    profile_tensors: bool = False
    """Record what the memory is made of, in the run folder and in TensorBoard; f3rm-ext profile latest explains it."""
    profile_tensors_every: Count = 1000
    """Steps between two records of the tensors, 1 or more. Peaks are recorded at every step."""

    # Set on the instance while a trainer is built. Not a field, so never in config.yml.
    _is_building: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.load_config is not None:
            read_config(self.load_config)  # ns-train runs what this file names: another's is refused before that

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "viewer" and name in self.__dict__ and isinstance(value, ViewerConfig):
            value = compat.local_viewer_host(value)  # only `ns-viewer` replaces the viewer options of a finished config
        super().__setattr__(name, value)

    def check(self) -> None:
        """Checks the options before anything is written or loaded, and resolves the checkpoint to resume from.

        Raises:
            ConfigError: the machine lacks the device or something the model needs, or a number of steps cannot work.
            CheckpointError: the checkpoint to resume from does not exist.
        """
        launch.check_machines(self.machine)
        self.fit_model()
        self.check_steps()
        if self.load_dir is not None:
            self.load_dir = checkpoint.find_folder(self.load_dir, self.relative_model_dir)
            path = self.resume_path()
            self.load_step = checkpoint.parse_step(path) if path else None
        elif self.load_checkpoint is not None and not self.load_checkpoint.is_file():
            raise CheckpointError(f"The checkpoint {self.load_checkpoint} given by --load-checkpoint does not exist.")

    def check_steps(self) -> None:
        """Raises ConfigError if a number of steps cannot work."""
        check_ranges(self)
        if self.load_step is not None and self.load_dir is None:
            raise ConfigError(f"--load-step {self.load_step} names a step of the run in --load-dir: give both.")
        if 0 < self.schedule_steps < self.max_num_iterations:
            raise ConfigError(
                f"--schedule-steps is {self.schedule_steps}, but --max-num-iterations is {self.max_num_iterations}: "
                f"give at least {self.max_num_iterations}, or 0 for a schedule as long as the run."
            )

    def fit_model(self) -> None:
        """Lets the model's options check and adapt these options; see :class:`FitsTrainer`."""
        model = getattr(self.pipeline, "model", None)
        if isinstance(model, FitsTrainer):
            model.fit_trainer(self)

    def resume_path(self) -> Path | None:
        """Returns the checkpoint to continue from; None to train from scratch.

        Raises:
            CheckpointError: the checkpoint is missing or damaged.
        """
        if self.load_dir is None:
            return self.load_checkpoint
        folder = checkpoint.find_folder(self.load_dir, self.relative_model_dir)
        if self.load_step is None:
            return checkpoint.newest_intact(folder, _warn)
        path = checkpoint.make_path(folder, self.load_step)
        if not checkpoint.is_intact(path, read_all=False):
            there = ", ".join(str(step) for step, _ in checkpoint.newest_first(folder)) or "none"
            state = "is damaged" if path.exists() else "does not exist"
            raise CheckpointError(f"The checkpoint {path} {state}: choose --load-step from the steps there ({there}).")
        return path

    def set_timestamp(self) -> None:
        """Sets the time stamp of the run folder. Processes that torchrun has started meet here and take one stamp.

        Raises:
            ConfigError: there are options beside --load-config that nerfstudio drops.
        """
        if find_option(sys.argv, "--load-config"):
            self._restore_options()
        super().set_timestamp()
        launch.join(self.machine)
        self.timestamp = launch.broadcast_first(self.timestamp)

    def _restore_options(self) -> None:
        """Takes from the command line what to resume from: nerfstudio has replaced all options by those of
        --load-config. A run that does not resume gets a folder of its own."""
        given = {word.partition("=")[0].replace("_", "-") for word in sys.argv[1:] if word.startswith("--")}
        if others := sorted(given - {"--load-config", "--load-dir", "--load-step", "--load-checkpoint", "--timestamp"}):
            raise ConfigError(
                f"--load-config takes all options from a file, so {', '.join(others)} would be ignored: change the "
                "file, or give the method and its options instead."
            )
        folder, file = (find_option(sys.argv, option) for option in ("--load-dir", "--load-checkpoint"))
        step = find_option(sys.argv, "--load-step")
        if folder or file:
            self.load_dir, self.load_checkpoint = (Path(path) if path else None for path in (folder, file))
            self.load_step = int(step) if step.isdigit() else None
        if not folder:
            self.timestamp = find_option(sys.argv, "--timestamp", "{timestamp}")

    def print_to_terminal(self) -> None:
        if is_first():
            super().print_to_terminal()

    def setup(self, local_rank: int = 0, world_size: int = 1, **kwargs: Any) -> Any:
        """Builds the trainer.

        Args:
            world_size: number of processes. Nerfstudio knows of 1 where torchrun has started this one.
        """
        place = launch.place()
        if place is not None:
            local_rank, world_size = place
            launch.seed(self.machine.seed)
        return super().setup(local_rank=local_rank, world_size=world_size, **kwargs)

    def save_config(self) -> None:
        """Checks the options, then writes ``config.yml``, so that a command that cannot work leaves no run folder.

        Raises:
            ConfigError: the options cannot work, or the run's folder cannot be written to.
            SystemExit: with code 0, if the run to resume is finished already.
        """
        launch.first_only(self._save_config)

    def _save_config(self) -> None:
        self.check()
        path = self.resume_path()
        step = checkpoint.parse_step(path) if path else None
        if path and step is not None and step + 1 >= self.max_num_iterations:
            CONSOLE.print(self.nothing_left(step + 1, path), markup=False)
            raise SystemExit(0)
        try:
            super().save_config()
        except OSError as error:
            raise ConfigError(
                f"The run's folder {self.get_base_dir()} cannot be written to ({error.strerror or error}): choose "
                "another place with --output-dir."
            ) from error
        if launch.processes(self.machine) > 1 and not launch.is_torchrun():
            launch.remember_interruption()  # nerfstudio starts the others next

    def nothing_left(self, steps: int, path: Path) -> str:
        """Returns a sentence for the user whose run is finished already."""
        return (
            f"Nothing left to do: {path} has {steps} steps and --max-num-iterations is {self.max_num_iterations}; "
            "give a larger number to continue."
        )

    def get_checkpoint_dir(self) -> Path:
        """Returns the checkpoint folder of this run: beside ``--load-config``, even if the run was moved or renamed.

        Nerfstudio's ``eval_setup`` calls it just before it loads the newest file by name. Choosing ``load_step`` here
        makes it load the newest *intact* file instead.

        Raises:
            CheckpointError: the run is about to be loaded, but none of its checkpoints is intact.
            ConfigError: the run is about to be exported by a command of ns-export that cannot do it.
        """
        folder = super().get_checkpoint_dir()
        if self._is_building:
            return folder
        command = export_command(sys.argv)
        if command is not None and isinstance(self.pipeline.model, ChecksExport):
            self.pipeline.model.check_export(command, sys.argv)
        load_config = find_option(sys.argv, "--load-config")
        if load_config and (beside := checkpoint.folder_of(Path(load_config), folder.name)).is_dir():
            folder = beside
        if not checkpoint.newest_first(folder):
            raise CheckpointError(
                f"There is no checkpoint in {folder}: the run was stopped before its first one, or the command was "
                "started in another folder than the training, to which paths in config.yml are relative."
            )
        newest = checkpoint.newest_intact(folder, _warn)
        self.load_step = checkpoint.parse_step(newest)
        model = getattr(self.pipeline, "model", None)
        if isinstance(model, OwnModelConfig):
            model.opened = folder / newest.name  # type: ignore[misc]
        return folder

    @contextmanager
    def _build_trainer(self) -> Iterator[None]:
        """While a trainer is built, makes :meth:`get_checkpoint_dir` return the folder without looking for a file."""
        self._is_building = True  # type: ignore[misc]
        try:
            yield
        finally:
            del self._is_building  # type: ignore[misc]


def _warn(text: str) -> None:
    CONSOLE.print(f"Warning: {text}", style="bold yellow", markup=False)


class F3rmTrainer(ProfiledTrainer, ResumableTrainer):
    """Nerfstudio's trainer with checkpoints that survive a kill, exact resume and clean interruption.

    A resumed run sees the same images, pixels and random numbers as one that was never interrupted, and stops at
    `max_num_iterations`. Ctrl-C finishes the current step, saves, prints how to resume and exits with code 130.

    What parts of a run may have for the trainer to use is in :mod:`f3rm_ext.engine.protocols`.

    With several processes (ranks), rank 0 evaluates, saves and speaks. What differs between ranks, their random numbers
    and image cycles, is gathered for the checkpoint. All end together, whichever of them is interrupted or fails.
    """

    config: F3rmTrainerConfig

    def __init__(self, config: F3rmTrainerConfig, local_rank: int = 0, world_size: int = 1) -> None:
        compat.check_device(config.machine.device_type)
        if config.machine.device_type != "cuda":
            # Half precision is for CUDA; on other devices a gradient scaler only brings warnings.
            config.mixed_precision = config.use_grad_scaler = False
        config.fit_model()
        if config.machine.device_type == "cuda":
            # Some libraries allocate on the current device, whatever the device of the tensors they are given. This
            # starts CUDA, so settings that must precede CUDA (fit_model) come first.
            torch.cuda.set_device(local_rank)
        with config._build_trainer(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.cuda.amp.GradScaler.*", category=FutureWarning)
            super().__init__(config, local_rank=local_rank, world_size=world_size)
        self._step_at_work: int | None = None
        self.prepare_stopping()

    # --- set-up ------------------------------------------------------------------------------------------------------

    def setup(self, test_mode: Literal["test", "val", "inference"] = "val") -> None:
        """Builds pipeline, optimizers, viewer and writers.

        Raises:
            CheckpointError: the checkpoint to resume from is missing or does not fit.
        """
        with self._together():
            self._setup(test_mode)

    def _setup(self, test_mode: Literal["test", "val", "inference"]) -> None:
        self.config.check()
        threads.settle(numba=self.config.machine.device_type == "cpu")
        try:
            super().setup(test_mode)
        except KeyboardInterrupt:
            self._leave("Stopped before training began: the same command continues the preparation.", 130)
        self.callbacks = [
            TrainingCallback([TrainingCallbackLocation.BEFORE_TRAIN_ITERATION], self._step_pre_backward),
            *self.callbacks,
            TrainingCallback([TrainingCallbackLocation.AFTER_TRAIN_ITERATION], self._step_post_backward),
        ]
        self.prepare_profile()
        if comms.is_main_process():
            self._keep_choices()

    def _keep_choices(self) -> None:
        """Writes into config.yml what options that are ``auto`` became, so that every later command has the same."""
        path = self.base_dir / "config.yml"
        choices: dict[str, str | float] = {}
        for part in (self.pipeline.datamanager, self.pipeline.model):
            choices |= part.choices if isinstance(part, HasChoices) else {}
        if choices and path.is_file():
            text = path.read_text("utf8")
            for option, value in choices.items():
                text = text.replace(f" {option}: auto\n", f" {yaml.safe_dump({option: value})}")
            write_atomic(path, text.encode(errors="backslashreplace"))

    def setup_optimizers(self) -> Optimizers:
        """Builds the optimizers, after decays over the whole run got its length and the model its learning rates."""
        fit_optimizers(self.config.optimizers, self.config)
        model, groups = self.pipeline.model, self.pipeline.get_param_groups()
        configs = scale_rates(self.config.optimizers, model.rate_factors if isinstance(model, ScalesRates) else {})
        if self.ranks is None:
            return Optimizers(configs, groups)
        return SynchronizedOptimizers(configs, groups, self.ranks, lambda: self._stop_signal or 0, self._sharded)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Trains up to `max_num_iterations`, counted from the start of the first run, not from where it resumes.

        Raises:
            MemoryShortageError: memory ran out in a step; saved checkpoints are untouched.
        """
        end = self.config.max_num_iterations
        if self._start_step >= end:
            path = self.config.resume_path() or self.base_dir
            CONSOLE.print(self.config.nothing_left(self._start_step, path), markup=False)
            self.shutdown()
            return
        # Nerfstudio counts max_num_iterations from the step it starts at, and reads it once, before the first step.
        # _step_pre_backward restores the true number as soon as that step begins.
        self.config.max_num_iterations = end - self._start_step
        self._end_step = end
        with self._together(), self._catch_signals():
            try:
                super().train()
                self._part()
            except Exception as error:
                # Between steps, in saving and evaluation, other options would help.
                if self._step_at_work is None or not is_out_of_memory(error):
                    raise
                raise shortage_error(
                    self._step_at_work, self.device, self.memory_options(), resume=self._resume_command()
                ) from error
            finally:
                self.config.max_num_iterations = end

    def _step_pre_backward(self, step: int) -> None:
        """Runs before all other callbacks of a step: the safe point between two steps."""
        self.config.max_num_iterations = self._end_step
        self.restore_random_state()  # not earlier, because setting up the viewer and the writers may draw numbers
        if self._shared_signal():
            self._stop(self._shared_signal())
        self._step_at_work = step

    def _step_post_backward(self, step: int) -> None:
        self._step_at_work = None
        if is_first():
            events.progress(events.STEPS, step + 1, self._end_step)
        if self.ranks is not None and not self._sharded and (step + 1) % CHECK_EVERY == 0:
            self.ranks.require_same(named_parameters(self.optimizers), f"after step {step}")

    def _train_complete_viewer(self) -> None:
        if self._stop_signal is None:  # otherwise Ctrl-C came in the last step, and nobody waits for the viewer
            super()._train_complete_viewer()

    def train_iteration(self, step: int) -> Any:
        """Runs one optimisation step and records that it is done.

        Returns:
            Loss, losses and metrics, for logging; detached, so that the graph's memory is freed.
        """
        loss, losses, metrics = super().train_iteration(step)
        self._completed_step = step
        return loss.detach(), _detach(losses), _detach(metrics)

    def eval_iteration(self, step: int) -> None:
        """Runs nerfstudio's evaluation at a step without gradients, for which it would build a graph.

        Rank 0 does it, or all ranks where it takes all to draw a picture; rank 0 writes.
        """
        if is_first() or self._sharded:
            with torch.no_grad():
                super().eval_iteration(step)


def _detach(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
