"""Nerfstudio's trainer with checkpoints that survive a kill and from which a run resumes exactly."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from nerfstudio.engine.trainer import Trainer
from nerfstudio.utils import comms
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext.engine import checkpoint, random_state
from f3rm_ext.engine.protocols import GathersStatistics, HasCycle, ShardsParameters
from f3rm_ext.engine.ranks import Ranks
from f3rm_ext.engine.stopping import StoppableTrainer
from f3rm_ext.engine.synchronization import named_parameters
from f3rm_ext.errors import CheckpointError

EXTRA_KEY, EXTRA_FORMAT = "f3rm_ext", 1


class ResumableTrainer(StoppableTrainer, Trainer):
    """Saves and restores all that decides how a run goes on: parameters, optimisers, random numbers, image cycles."""

    _completed_step: int | None = None
    _saved_step: int | None = None
    _random_state: dict[str, Any] | None = None
    """State of the random generators in the checkpoint, until the first step begins."""
    _random_state_rank = 0
    """Rank that saved it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._save_lock = threading.RLock()

    @property
    def _sharded(self) -> bool:
        model = self.pipeline.model
        return self.ranks is not None and isinstance(model, ShardsParameters) and model.sharded

    def _load_checkpoint(self) -> None:
        path = self.config.resume_path()
        if path is None:
            CONSOLE.print("No checkpoint to load: training from scratch.")
            return
        state = checkpoint.load(path)
        self._check_fit(state, path)
        if self._sharded:
            self.pipeline.model.deal_out(state)  # type: ignore[operator]
        try:
            self.pipeline.load_pipeline(state["pipeline"], state["step"])
            self.optimizers.load_optimizers(state["optimizers"])
            if "schedulers" in state and self.config.load_scheduler:
                self.optimizers.load_schedulers(state["schedulers"])
            self.grad_scaler.load_state_dict(state.get("scalers", {}))
        except (KeyError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[-1].strip().rstrip(".")
            raise CheckpointError(
                f"The checkpoint {path} does not fit this model ({reason}): resume with the options of the run it is "
                "from, which are in its config.yml."
            ) from error
        self._start_step = state["step"] + 1
        self._completed_step = state["step"]
        extra = state.get(EXTRA_KEY, {})
        if self.ranks is not None and len(parts := extra.get("ranks", [])) == self.ranks.size:
            extra |= parts[self.ranks.rank]  # what it holds of this rank, unless their number has changed
        manager = self.pipeline.datamanager
        if "datamanager" in extra and isinstance(manager, HasCycle):
            manager.load_cycle_state(extra["datamanager"])
        self._random_state = extra.get("random")
        self._random_state_rank = extra.get("rank", 0)
        CONSOLE.print(f"Resuming after step {state['step']} from {path}", markup=False)

    def restore_random_state(self) -> None:
        """Restores the random numbers of the checkpoint that was loaded; does nothing the second time."""
        if self._random_state is not None:
            other = 0 if self._random_state_rank == comms.get_rank() else comms.get_rank()
            random_state.restore(self._random_state, torch.device(self.device), rank=other)
            self._random_state = None

    def _check_fit(self, state: dict[str, Any], path: Path) -> None:
        """Raises if the checkpoint lacks parameters, which nerfstudio would silently leave at their initial values."""
        # DDP wraps a model in a module of its own, which is in the names of the parameters.
        expected = {key.replace("_model.module.", "_model.") for key in self.pipeline.state_dict()}
        loaded = {key.removeprefix("module.").replace("_model.module.", "_model.") for key in state["pipeline"]}
        missing = sorted(key for key in expected - loaded if "lpips" not in key)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(
                f"The checkpoint {path} does not fit this model (it lacks {missing[0]}{more}): resume with the options "
                "of the run it is from, which are in its config.yml."
            )

    def save_checkpoint(self, step: int) -> None:
        """Writes ``step-*.ckpt`` of the last complete step, unless it is there already.

        Args:
            step: the step according to nerfstudio; one too many if it was stopped between two steps.

        Raises:
            CheckpointError: the disk refuses it; earlier checkpoints are untouched.
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._completed_step is None or (not comms.is_main_process() and self.ranks is None):
            return
        with self._save_lock:
            step = min(step, self._completed_step)
            if step in (self._saved_step, self._start_step - 1):  # nothing was trained since it was saved or loaded
                return
            # Saving must not change the run, even if it draws random numbers.
            random = random_state.capture(torch.device(self.device))
            extra = {"format": EXTRA_FORMAT, "random": random, "rank": comms.get_rank()}
            manager = self.pipeline.datamanager
            if isinstance(manager, HasCycle):
                extra["datamanager"] = manager.cycle_state()
            if self.ranks is not None and in_main_thread:  # the other ranks do not know of a button in the viewer
                extra["ranks"] = self._gather(self.ranks, step, extra)
            # Of parameters in parts, every rank has to give its own.
            state = self._state(step, extra) if comms.is_main_process() or self._sharded else {}
            if self._sharded:
                self.pipeline.model.collect(state, self.ranks)  # type: ignore[operator]
            with nullcontext() if self.lifeline is None else self.lifeline.busy:
                if comms.is_main_process():
                    if self._saved_step is None:
                        self._set_aside()
                    checkpoint.write(state, checkpoint.make_path(self.checkpoint_dir, step))
                    if self.config.save_only_latest_checkpoint:
                        checkpoint.prune(self.checkpoint_dir)
            self._saved_step = step
            if in_main_thread:
                random_state.restore(random, torch.device(self.device))

    def _set_aside(self) -> None:
        """Keeps the checkpoints of another training in this folder, which may have gone further."""
        if target := checkpoint.set_aside(self.checkpoint_dir, self._start_step):
            CONSOLE.print(
                f"{self.checkpoint_dir} held later checkpoints of another training; they are in {target} now.",
                markup=False,
            )

    def _gather(self, ranks: Ranks, step: int, own: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Returns on rank 0 what differs between ranks, after they have added up what each holds a part of."""
        if not self._sharded:
            ranks.require_same(named_parameters(self.optimizers), f"after step {step}")
            if isinstance(self.pipeline.model, GathersStatistics):
                self.pipeline.model.gather_statistics()
        return ranks.gather(own)

    def _state(self, step: int, extra: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": step,
            "pipeline": self.pipeline.state_dict(),
            "optimizers": {name: item.state_dict() for name, item in self.optimizers.optimizers.items()},
            "schedulers": {name: item.state_dict() for name, item in self.optimizers.schedulers.items()},
            "scalers": self.grad_scaler.state_dict(),
            EXTRA_KEY: extra,
        }
