"""How a run ends before its time: by Ctrl-C, or because another process of it has ended."""

import shlex
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, NoReturn

from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation
from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.utils import writer
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext.engine import checkpoint, launch
from f3rm_ext.engine.arguments import remove_options
from f3rm_ext.engine.lifeline import Lifeline
from f3rm_ext.engine.ranks import Ranks, world_size
from f3rm_ext.engine.synchronization import SynchronizedOptimizers
from f3rm_ext.utils.signals import handle_signals

_ONE_CTRL_C_S = 2.0
"""With several processes, one Ctrl-C comes several times: from the terminal and from the program that started them."""


class StoppableTrainer(ABC):
    """Mixin of the trainer: stops between two steps, saves and says how to go on; all ranks stop at the same step."""

    config: Any
    base_dir: Path
    checkpoint_dir: Path
    optimizers: Optimizers
    callbacks: list[TrainingCallback]
    training_state: Literal["training", "paused", "completed"]
    _completed_step: int | None
    _saved_step: int | None
    _start_step: int
    ranks: Ranks | None = None
    """The other processes of the run, if there are any."""
    lifeline: Lifeline | None = None

    def prepare_stopping(self) -> None:
        """Joins the other processes of the run, if there are any. Nothing else may be built before."""
        self._stop_signal: int | None = None
        self._stop_s = 0.0
        if world_size() == 1:
            return
        self.ranks = Ranks()
        self.lifeline = Lifeline(self.ranks.rank, self.ranks.size, self._resume_clause)
        # The other processes, and their GPUs, would wait for a viewer that stays open.
        self.config.viewer.quit_on_train_completion = True
        CONSOLE.quiet = self.ranks.rank > 0
        self.base_dir.mkdir(parents=True, exist_ok=True)  # on a machine that has not started the run

    @abstractmethod
    def save_checkpoint(self, step: int) -> None: ...

    def _together(self) -> AbstractContextManager[None]:
        """Ends this process with a sentence if another one of the run ends."""
        return nullcontext() if self.lifeline is None else self.lifeline.guard()

    def _part(self) -> None:
        """Takes leave of the other ranks, once all have come to the end."""
        if self.lifeline is not None:
            self.lifeline.close()
            launch.leave()

    @contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Makes the first Ctrl-C (or SIGTERM) stop between two steps; a second Ctrl-C stops at once."""
        try:
            with handle_signals(self._on_signal, signal.SIGINT, signal.SIGTERM):
                yield
        except KeyboardInterrupt:
            self._leave(f"Stopped within a step, which is lost. {self._resume_sentence()}", 130)

    def _on_signal(self, number: int, _frame: Any) -> None:
        is_completed = self.training_state == "completed"
        if is_completed and self._completed_step in (None, self._saved_step, self._start_step - 1):
            self._leave("Training was finished and saved.", 0)  # only the viewer is still running
        if self._stop_signal is not None:
            if self.ranks is None or (number == signal.SIGINT and time.monotonic() - self._stop_s > _ONE_CTRL_C_S):
                raise KeyboardInterrupt
            return
        self._stop_signal, self._stop_s = number, time.monotonic()
        if is_completed:
            return  # the last checkpoint is being written
        self.training_state = "training"  # a paused run would wait before the next step, where it has to stop
        if self._speaks():
            print("\nStopping after this step ... (Ctrl-C again stops at once)", file=sys.stderr, flush=True)

    def _shared_signal(self) -> int:
        """Returns the signal after which to stop, the same on all ranks; 0 for none."""
        if isinstance(getattr(self, "optimizers", None), SynchronizedOptimizers):
            return self.optimizers.heard  # type: ignore[attr-defined]
        return self._stop_signal or 0

    def _stop(self, number: int) -> NoReturn:
        if self._completed_step is not None:
            self.save_checkpoint(self._completed_step)
            for callback in self.callbacks:
                callback.run_callback_at_location(self._completed_step, TrainingCallbackLocation.AFTER_TRAIN)
        writer.write_out_storage()
        self._part()
        self._leave(f"Stopped. {self._resume_sentence()}", 128 + number)

    def _speaks(self) -> bool:
        return self.ranks is None or self.ranks.rank == 0

    def _leave(self, message: str, code: int) -> NoReturn:
        if self._speaks():
            print(f"\n{message}", file=sys.stderr, flush=True)
        raise SystemExit(code)

    def _resume_clause(self) -> str:
        """Returns how to go on after another process has ended, as the rest of a sentence."""
        if (command := self._resume_command()) is None:
            return "nothing was saved yet, so the same command starts again"
        return f"saved up to step {self._saved()[0][0]}, continue with `{command}`"

    def _resume_sentence(self) -> str:
        if (command := self._resume_command()) is None:
            return "Nothing was saved yet: the same command starts again."
        return f"Saved up to step {self._saved()[0][0]}; continue with: {command}"

    def _resume_command(self) -> str | None:
        """Returns the command that continues from the last checkpoint of this run; None if there is none."""
        if not self._saved():
            return None
        return launch.command_prefix() + resume_command(sys.argv, self.checkpoint_dir)

    def _saved(self) -> list[tuple[int, Path]]:
        return checkpoint.newest_first(self.checkpoint_dir)


def resume_command(argv: list[str], folder: Path) -> str:
    """Returns the command line that continues a run.

    >>> resume_command(["/env/bin/ns-train", "f3rm-ext", "--vis", "viewer", "--load-dir", "old"], Path("new"))
    'ns-train f3rm-ext --load-dir new --vis viewer'
    """
    program, *arguments = [Path(argv[0]).name, *argv[1:]] if argv else ["ns-train"]
    if program != "ns-train" or not arguments or arguments[0].startswith("-"):
        return f"the same command and --load-dir {shlex.quote(str(folder))}"
    kept = remove_options(arguments[1:], ("load-dir", "load-step", "load-checkpoint"))
    return shlex.join(["ns-train", arguments[0], "--load-dir", str(folder), *kept])
