"""A training from its options to its weights: tiles, checkpoints, progress, Ctrl-C."""

import math
import shlex
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from nerfstudio.configs.base_config import MachineConfig

from f3rm_ext.compat import default_device_type, open_device
from f3rm_ext.engine import checkpoint, launch
from f3rm_ext.engine.lifeline import Lifeline
from f3rm_ext.engine.ranks import is_first, rank, world_size
from f3rm_ext.errors import CheckpointError, ConfigError, MemoryShortageError
from f3rm_ext.memory.shortage import report_shortage, shortage_error
from f3rm_ext.moco.options import TrainConfig, make_plan
from f3rm_ext.moco.plan import MemoryPlan, memory_options, plan_memory, step_seconds
from f3rm_ext.moco.processes import start_processes
from f3rm_ext.moco.tiles import COMMAND, LIST, Tiles, find_files, prepare
from f3rm_ext.moco.training import StepResult, Training
from f3rm_ext.moco.views import load_batches, make_views
from f3rm_ext.moco.weights import export
from f3rm_ext.profiling.memory import MIB, peak_bytes, reset_peak, resident_bytes
from f3rm_ext.utils.console import image_progress, say
from f3rm_ext.utils.provenance import require_own_folder
from f3rm_ext.utils.signals import Interrupt, handle_signals

_STATE_KEYS = ("step", "plan", "fingerprint", "query", "key", "predictor", "queue", "optimizer")
COLLAPSED = 0.1
"""Spread below which the outputs are nearly the same for all images."""
_LOG_EVERY = 10
_MAX_NAMED = 5


@dataclass
class TrainingRun:
    """One call of ``f3rm-ext moco train``."""

    config: TrainConfig
    _warned: bool = field(default=False, init=False)

    def main(self) -> int:
        """Trains or resumes, and exports the weights. Returns 0, or 128 + the signal that stopped the training.

        Raises:
            ConfigError: The options do not fit the data or the device.
            CheckpointError: There is no checkpoint to resume, or it is that of another network.
            MemoryShortageError: Memory ran out.
        """
        config = self.config
        if config.multiprocessing_distributed:
            start_processes(config.world_size, config.rank, config.dist_url)
        is_cuda = _device_name(config.device).startswith("cuda")
        launch.join(MachineConfig(device_type="cuda" if is_cuda else "cpu"))
        try:
            if world_size() == 1:
                return self._run()
            lifeline = Lifeline(rank(), world_size(), lambda: f"resume with {self._resume_command()}")
            with lifeline.guard():
                code = self._run()
                lifeline.close()
            return code
        finally:
            launch.leave()

    def _print_plan(self) -> int:
        config = self.config
        images = len(find_files(config.data))
        device = _open_device(config.device) if config.memory_gib is None else torch.device(_device_name(config.device))
        memory = plan_memory(config, images, device, config.memory_gib)
        plan = memory.plan
        _say(*plan.announcement(), *plan.warnings(), *memory.sentences(), f"Device: {device}.")
        if config.probe:
            seconds = step_seconds(plan, _open_device(config.device))
            _say(
                f"A step takes {seconds:.2f} s on this {device.type} ({plan.pair.effective_batch / seconds:.1f} "
                f"images/s), so the training takes about {seconds * plan.steps / 3600:.2f} hours."
            )
        return 0

    def _run(self) -> int:
        config = self.config
        if config.plan:
            return self._print_plan()
        if config.probe:
            raise ConfigError("--probe only works with --plan: add --plan, or leave out --probe.")
        if checkpoint.newest_first(config.output / "checkpoints") and not config.resume:
            raise ConfigError(
                f"{config.output} already holds a run: continue it with --resume, or use another --output."
            )
        require_own_folder(config.output, LIST, COMMAND, ignored=("checkpoints",) if config.resume else ())
        device = _open_device(config.device)
        saved = self._load_checkpoint() if config.resume else None
        launch.first_only(self._decode)
        tiles = prepare(config.data, config.output, config.image_size, config.reading)
        memory = plan_memory(config, len(tiles), device, config.memory_gib)
        self.config = config = replace(memory.config, batch_size=launch.broadcast_first(memory.config.batch_size))
        plan = make_plan(config, len(tiles))
        training = Training(plan, tiles.fingerprint, device)
        _say(*plan.announcement(), *plan.warnings(), *memory.sentences(), f"Device: {device}.")
        if saved is not None:
            messages = training.restore(saved)
            _say(*messages, f"Resuming at step {training.step} of {plan.steps}.")
        return self._train(training, tiles, memory)

    def _train(self, training: Training, tiles: Tiles, memory: MemoryPlan) -> int:
        from torch.utils.tensorboard import SummaryWriter

        config, plan, interrupt = self.config, training.plan, Interrupt(alone=world_size() == 1)
        batches = load_batches(
            tiles,
            make_views(config.image_size, config.color_jitter, symmetric=config.algorithm == "v2"),
            training.device,
            batch_size=plan.pair.batch_size,
            seed=config.seed,
            first=training.first_batch,
            workers=config.workers,
        )
        events = SummaryWriter(str(config.output), purge_step=training.step) if is_first() else None
        reset_peak(training.device)
        before = resident_bytes() if training.device.type == "cpu" else 0
        images, started, first = plan.pair.effective_batch, time.monotonic(), training.step
        first_pass = first + max(1, plan.pair.images // images)
        try:
            signals = handle_signals(interrupt.on_signal, signal.SIGINT, signal.SIGTERM)
            with signals, image_progress(disable=not is_first()) as progress:
                pictures = training.step * images
                task = progress.add_task("Training", total=plan.steps * images, completed=pictures)
                stop = training.largest_over_ranks(interrupt.number)
                while training.step < plan.steps and not stop:
                    with report_shortage(lambda: self._shortage(training)):
                        result = training.train_step(batches)
                    progress.update(task, advance=images)
                    if training.step <= first_pass:
                        peak = peak_bytes(training.device) - before
                        if events is not None:
                            events.add_scalar("MoCo/peak_memory_mib", peak / MIB, training.step)
                        if training.step == first_pass:
                            _say(*memory.compare_first_pass(peak))
                    if training.step % _LOG_EVERY == 0 or training.step == plan.steps:
                        rate = (training.step - first) * images / (time.monotonic() - started)
                        self._log(events, training, result, rate)
                    if training.step % config.save_every == 0 and training.step < plan.steps:
                        self._save(training)
                    stop = training.largest_over_ranks(interrupt.number)
        finally:
            if events is not None:
                events.close()
        self._save(training)
        if stop:
            _say(f"Stopped at step {training.step} of {plan.steps}. Resume with: {self._resume_command()}")
            return 128 + stop
        seconds = time.monotonic() - started
        if training.step > first:
            rate = (training.step - first) * images / seconds
            _say(f"Trained {training.step - first} steps in {seconds:.0f} s, {rate:.0f} images/s.")
        facts = {**plan.record(), "step": training.step, "tiles": tiles.fingerprint}
        if is_first():
            _say(f"Weights are in {export(training.query.backbone, config.output, facts)}.")
        return 0

    def _shortage(self, training: Training) -> MemoryShortageError:
        saved = checkpoint.newest_first(self.config.output / "checkpoints")
        resume = self._resume_command() if saved else None
        return shortage_error(training.step, training.device, memory_options(training.plan), resume=resume)

    def _log(self, events: Any, training: Training, result: StepResult, images_per_s: float) -> None:
        scalars = result.scalars()
        if not math.isfinite(scalars["loss"]):
            raise self._divergence(f"loss is {scalars['loss']}", training.step)
        if events is None:
            return
        rates = {"learning_rate": training.learning_rate, "momentum": training.momentum, "images_per_s": images_per_s}
        for name, value in {**scalars, **rates}.items():
            events.add_scalar(f"MoCo/{name}", value, training.step)
        if scalars["output_spread"] < COLLAPSED and not self._warned:
            self._warned = True
            _say(
                f"Warning: the outputs of all images are nearly the same at step {training.step} (spread "
                f"{scalars['output_spread']:.3f}; 1 is even): the training may have collapsed, so try a smaller "
                "--learning-rate."
            )

    def _divergence(self, what: str, step: int) -> ConfigError:
        saved = checkpoint.newest_first(self.config.output / "checkpoints")
        again = "resume from the last checkpoint with --resume and" if saved else "start it again with"
        return ConfigError(
            f"The {what} at step {step}, so the training was stopped: {again} a smaller --learning-rate."
        )

    def _save(self, training: Training) -> None:
        training.require_same()
        # Otherwise the newest checkpoint, and in time all that are kept, would be ones that no run can go on from.
        if not torch.stack([value.isfinite().all() for value in training.query.parameters()]).all():
            raise self._divergence("weights are not finite", training.step)
        if not is_first():
            return
        folder = self.config.output / "checkpoints"
        checkpoint.write(training.state(), checkpoint.make_path(folder, training.step))
        checkpoint.prune(folder)

    def _load_checkpoint(self) -> dict[str, Any]:
        folder = self.config.output / "checkpoints"
        if not checkpoint.newest_first(folder):
            raise CheckpointError(f"There is no checkpoint in {self.config.output}: leave out --resume to start a run.")
        return checkpoint.load(checkpoint.newest_intact(folder, _say), _STATE_KEYS)

    def _decode(self) -> None:
        """Decodes the pictures with a progress bar and lists those that cannot be read."""
        config = self.config
        with image_progress() as progress:
            task = progress.add_task("Decoding", total=None)
            tiles = prepare(
                config.data,
                config.output,
                config.image_size,
                config.reading,
                lambda done, total: progress.update(task, completed=done, total=total),
            )
            progress.update(task, completed=len(tiles), total=len(tiles))
        if tiles.skipped:
            examples = "; ".join(f"{name} ({reason})" for name, reason in list(tiles.skipped.items())[:_MAX_NAMED])
            more = f"; {tiles.array.with_suffix('.json')} lists all" if len(tiles.skipped) > _MAX_NAMED else ""
            _say(f"Skipped {len(tiles.skipped)} files that cannot be read: {examples}{more}.")

    def _resume_command(self) -> str:
        """Returns the typed command line with --resume."""
        typed = [word for word in sys.argv[1:] if word != "--resume"]
        return launch.command_prefix() + shlex.join(["f3rm-ext", *typed, "--resume"])


def _say(*sentences: str) -> None:
    if is_first():
        say(*sentences)


def _device_name(device: str) -> str:
    return default_device_type() if device == "auto" else device


def _open_device(name: str) -> torch.device:
    name = _device_name(name)
    if name == "cuda" and (place := launch.place()) is not None:
        name = f"cuda:{place[0]}"
    device = open_device(name)
    if device.type == "cuda":  # calls without a device, such as NCCL's barriers, use the current one
        torch.cuda.set_device(device)
    return device
