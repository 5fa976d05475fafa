"""Running a benchmark: trainings and evaluations in processes of their own, in turn with those of a baseline."""

import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from f3rm_ext.errors import ConfigError, LedgerError
from f3rm_ext.ledger.ledger import Ledger
from f3rm_ext.ledger.worker import RESULT, EvalJob, TrainJob, write_job
from f3rm_ext.workflow.commands import Command, CommandError, run_command
from f3rm_ext.workflow.records import read_json

if TYPE_CHECKING:
    from rich.console import Console

# The folder that Python would put first is taken away, as it is not there for installed commands: a checkout in the
# working directory must not replace the package of another Python.
_PROGRAM = "import sys; sys.path.pop(0); from f3rm_ext.ledger.worker import main; main()"


@dataclass(frozen=True)
class Protocol:
    """How a benchmark is measured."""

    repeats: int
    """Number of runs."""
    steps: int
    """Steps of the window; 0 for all that are left of the run."""
    warm_up: int
    """Steps at its beginning that are not timed."""
    train_views: int
    """Training views to evaluate."""
    evaluate: bool = True
    """Whether to evaluate."""
    eval_step: int = 0
    """Step of the whole run after which to evaluate; 0 for the last one."""


@dataclass(frozen=True)
class Side:
    """One of the things that are measured in turn."""

    name: str
    """Name of its entry; empty for one made of the method's."""
    arguments: Sequence[str]
    """Arguments of ns-train."""
    python: str = sys.executable
    """Python with the package to measure."""
    note: str = ""
    """First note of the entry."""


class Bench:
    """Measures.

    Args:
        ledger: where the repeats go, each as soon as it is finished.
        console: shows progress.
        keep_runs: folder in which run folders are kept; None deletes them.
    """

    def __init__(self, ledger: Ledger, console: "Console", keep_runs: Path | None = None) -> None:
        self.ledger, self.console, self.keep_runs = ledger, console, keep_runs
        self.session = secrets.token_hex(6)

    def run(self, sides: Sequence[Side], protocol: Protocol) -> list[str]:
        """Measures sides in turn, every other time in the other order, so that none always has the warmer machine.

        Args:
            sides: what to measure.
            protocol: how.

        Returns:
            The names of their entries.

        Raises:
            CommandError: a run failed. What was finished is in the ledger, and so is the failure, with its sentence.
            LedgerError: the ledger cannot be written, or a name is taken; found out before anything runs.
        """
        for side in sides:
            self.ledger.require_new(side.name)
        names = {side: "" for side in map(id, sides)}
        with self._folder() as folder:
            for number in range(protocol.repeats):
                for side in sides if number % 2 == 0 else list(reversed(sides)):
                    what = f"{side.name or side.arguments[0]}, repeat {number + 1} of {protocol.repeats}"
                    work = folder / f"{sides.index(side)}-{number}"
                    try:
                        result = self._measure(side, protocol, number, work, what)
                    except CommandError as error:
                        if error.made_progress:  # what fails before is a mistake in the command
                            self._record_failure(side, names[id(side)], error)
                        raise
                    names[id(side)] = self._record(side, names[id(side)], result)
                    if self.keep_runs is None:
                        shutil.rmtree(work)
        return [names[id(side)] for side in sides]

    def evaluate(self, config: Path, train_views: int) -> dict[str, Any]:
        """Evaluates a finished run.

        Args:
            config: its config.yml.
            train_views: training views to evaluate too.

        Raises:
            CommandError: the evaluation failed.
        """
        with self._folder() as folder:
            return self._work(
                EvalJob(str(config.absolute()), str(folder), train_views), folder, sys.executable, "Evaluating"
            )

    def _measure(self, side: Side, protocol: Protocol, number: int, folder: Path, what: str) -> dict[str, Any]:
        job = TrainJob(list(side.arguments), str(folder), protocol.steps, protocol.warm_up, number, protocol.eval_step)
        result = self._work(job, folder, side.python, f"Training {what}")
        if protocol.evaluate:
            judged = EvalJob(result["config"], str(folder), protocol.train_views, protocol.eval_step)
            found = self._work(judged, folder, side.python, f"Evaluating {what}")
            for key in ("values", "conditions"):
                result[key] = found[key] | result[key]
        return result

    def _work(self, job: TrainJob | EvalJob, folder: Path, python: str, what: str) -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        path, result = folder / "job.json", folder / RESULT
        write_job(job, path)
        result.unlink(missing_ok=True)
        name = "train" if isinstance(job, TrainJob) else "eval"
        command = Command(what, [python, "-c", _PROGRAM, str(path)], folder / f"{name}.log")
        outcome = run_command(command, Path.cwd(), self.console)
        if not result.is_file():
            sentence = f"{what} ended without a result: its log is {command.log}."
            raise CommandError(sentence, made_progress=outcome.working_s > 0)
        return read_json(result)

    def _record(self, side: Side, name: str, result: dict[str, Any]) -> str:
        if not name:
            name = self.ledger.add(
                side.name,
                result["method"],
                command=side.arguments,
                conditions=result["conditions"],
                origin=result["origin"],
                note=side.note,
            )
        self.ledger.add_repeat(name, result["values"], session=self.session, seed=result["seed"])
        return name

    def _record_failure(self, side: Side, name: str, error: CommandError) -> None:
        sentence = str(error).splitlines()[0]
        if name:
            self.ledger.note(name, sentence, "failed")
        else:
            self.ledger.add(side.name, side.arguments[0], command=side.arguments, status="failed", note=sentence)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """A folder for runs and logs. It stays if something fails, since the error names a log in it."""
        if self.keep_runs is not None:
            folder = self.keep_runs.absolute() / self.session
            folder.mkdir(parents=True)
            yield folder
            return
        folder = Path(tempfile.mkdtemp(prefix="f3rm-ext-bench-"))
        try:
            yield folder
        except CommandError:
            raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def baseline_side(ledger: Ledger, against: str, name: str, python: str) -> Side:
    """Returns a side that measures an entry again.

    Args:
        ledger: that has it.
        against: name of the entry.
        name: of the entry with which it is measured in turn.
        python: Python with the package to measure.

    Raises:
        LedgerError: there is no such entry, or it has no command.
    """
    entry = ledger.entry(against)
    if not entry.command:
        raise LedgerError(
            f"The entry {against} is an idea or came from a finished run, so its command is not known and it cannot be "
            "run again: measure it with `f3rm-ext bench run`."
        )
    return Side(baseline_name(name), entry.command, python, f"{against}, measured again in turn with {name}.")


def baseline_name(name: str) -> str:
    """Returns the name of the entry of a baseline that was measured in turn with another.

    >>> baseline_name("fused")
    'fused-baseline'
    """
    return f"{name}-baseline"


def require_python(path: Path) -> str:
    """Returns the path of a Python.

    Raises:
        ConfigError: it is not there.
    """
    if not path.is_file():
        raise ConfigError(f"--against-python {path} is no file: give the python of the baseline's environment.")
    return str(path.absolute())
