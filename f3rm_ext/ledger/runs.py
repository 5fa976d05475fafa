"""Measurement of runs: trainings and evaluations in processes of their own, and finished runs."""

import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from f3rm_ext.errors import ConfigError, LedgerError
from f3rm_ext.ledger.conditions import hardware
from f3rm_ext.ledger.entry import Protocol
from f3rm_ext.ledger.ledger import Ledger
from f3rm_ext.ledger.worker import RESULT, EvalJob, TrainJob, write_job
from f3rm_ext.workflow.commands import Command, CommandError, run_command
from f3rm_ext.workflow.records import read_json, read_scalars

if TYPE_CHECKING:
    from rich.console import Console

LAST_LOSSES = 5
"""Number of values at the end of TensorBoard's curve over which the loss of a finished run is averaged."""
# `python -c` puts the working directory first on the path, unlike installed commands: a checkout there must not replace
# the package of another Python.
_PROGRAM = "import sys; sys.path.pop(0); from f3rm_ext.ledger.worker import main; main()"


@dataclass(frozen=True)
class Variant:
    """A run to measure, in turn with others."""

    name: str
    """Name of its entry; if empty, the method's with a number."""
    arguments: Sequence[str]
    """Arguments of ns-train."""
    python: str = sys.executable
    """Python of the environment with the package to measure."""
    note: str = ""
    """First note of the entry."""


class Bench:
    """Measures runs and records each repeat as soon as it is finished; run folders go unless ``keep_runs`` is given."""

    def __init__(self, ledger: Ledger, console: "Console", keep_runs: Path | None = None) -> None:
        self.ledger, self.console, self.keep_runs = ledger, console, keep_runs
        self.session = secrets.token_hex(6)

    def run(self, variants: Sequence[Variant], protocol: Protocol) -> list[str]:
        """Measures variants in turn, every other time in reverse order, so that none always has the warmer machine.

        Returns the names of their entries.

        Raises:
            CommandError: a run failed. The ledger has the repeats that were finished, also of a training whose
                evaluation failed, and the failure as a note.
            ConfigError: the folder of the runs cannot be made.
            LedgerError: a name is taken, which is checked before anything runs, or the ledger cannot be written.
        """
        for variant in variants:
            self.ledger.require_new(variant.name)
        names = [""] * len(variants)
        with self._folder() as folder:
            for number in range(protocol.repeats):
                for index in range(len(variants)) if number % 2 == 0 else reversed(range(len(variants))):
                    variant, run_folder = variants[index], folder / f"{index}-{number}"
                    title = f"{variant.name or variant.arguments[0]}, repeat {number + 1} of {protocol.repeats}"
                    try:
                        result, failure = self._measure(variant, protocol, number, run_folder, title)
                    except CommandError as error:
                        if error.made_progress:  # a failure before is a mistake in the command
                            self._record_failure(variant, names[index], error)
                        raise
                    names[index] = self._record(variant, names[index], result)
                    if failure is not None:
                        first, *rest = str(failure).splitlines()
                        self.ledger.note(names[index], first)
                        first += f" The ledger has the training as {names[index]}; --no-evaluate measures it alone."
                        raise CommandError("\n".join([first, *rest]), exit_code=failure.exit_code) from failure
                    if self.keep_runs is None:
                        shutil.rmtree(run_folder)
        return names

    def evaluate(self, config: Path, train_views: int) -> dict[str, Any]:
        """Evaluates a finished run, and some of its training views.

        Raises:
            CommandError: the evaluation failed.
        """
        with self._folder() as folder:
            job = EvalJob(str(config.absolute()), str(folder), train_views)
            return self._run_job(job, folder, sys.executable, "Evaluating")

    def _measure(
        self, variant: Variant, protocol: Protocol, number: int, folder: Path, title: str
    ) -> tuple[dict[str, Any], CommandError | None]:
        """Returns the result of a training with its evaluation, and why the latter failed; None if it did not."""
        arguments = list(variant.arguments)
        training = TrainJob(arguments, str(folder), protocol.steps, protocol.warm_up, number, protocol.eval_step)
        result = self._run_job(training, folder, variant.python, f"Training {title}")
        if protocol.evaluate:
            evaluation = EvalJob(result["config"], str(folder), protocol.train_views, protocol.eval_step)
            try:
                scores = self._run_job(evaluation, folder, variant.python, f"Evaluating {title}")
            except CommandError as error:
                return result, error
            for key in ("values", "conditions"):
                result[key] = scores[key] | result[key]
        return result, None

    def _run_job(self, job: TrainJob | EvalJob, folder: Path, python: str, title: str) -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        path, result = folder / "job.json", folder / RESULT
        write_job(job, path)
        result.unlink(missing_ok=True)
        name = "train" if isinstance(job, TrainJob) else "eval"
        command = Command(title, [python, "-c", _PROGRAM, str(path)], folder / f"{name}.log")
        outcome = run_command(command, Path.cwd(), self.console)
        if not result.is_file():
            sentence = f"{title} ended without a result: see its log {command.log}."
            raise CommandError(sentence, made_progress=outcome.working_s > 0)
        return read_json(result)

    def _record(self, variant: Variant, name: str, result: dict[str, Any]) -> str:
        if not name:
            name = self.ledger.add(
                variant.name,
                result["method"],
                command=variant.arguments,
                conditions=result["conditions"],
                origin=result["origin"],
                note=variant.note,
            )
        self.ledger.add_repeat(name, result["values"], session=self.session, seed=result["seed"])
        return name

    def _record_failure(self, variant: Variant, name: str, error: CommandError) -> None:
        sentence = str(error).splitlines()[0]
        if name:
            self.ledger.note(name, sentence, "failed")
        else:
            self.ledger.add(
                variant.name, variant.arguments[0], command=variant.arguments, status="failed", note=sentence
            )

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """A folder for runs and logs. It is kept if a command fails, because the error names a log in it."""
        if self.keep_runs is not None:
            folder = self.keep_runs.absolute() / self.session
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise ConfigError(
                    f"The folder for --keep-runs cannot be made in {self.keep_runs} ({error.strerror}): choose another."
                ) from error
            yield folder
            return
        folder = Path(tempfile.mkdtemp(prefix="f3rm-ext-bench-"))
        failed = False
        try:
            yield folder
        except CommandError:
            failed = True
            raise
        finally:
            if not failed:
                shutil.rmtree(folder, ignore_errors=True)


def baseline_variant(ledger: Ledger, against: str, name: str, python: str) -> Variant:
    """Returns a variant that measures the entry ``against`` again, in turn with the entry ``name``.

    Raises:
        LedgerError: there is no such entry, or it has no command.
    """
    entry = ledger.entry(against)
    if not entry.command:
        raise LedgerError(
            f"The entry {against} is an idea or came from a finished run, so its command is not known and it cannot be "
            "run again: measure it with `f3rm-ext bench run`."
        )
    return Variant(baseline_name(name), entry.command, python, f"{against}, measured again in turn with {name}.")


def baseline_name(name: str) -> str:
    """Returns the name of the entry of the baseline that is measured in turn with an entry.

    >>> baseline_name("fused")
    'fused-baseline'
    """
    return f"{name}-baseline"


def require_python(path: Path) -> str:
    """Returns the absolute path of a Python; raises ConfigError if it is not there."""
    if not path.is_file():
        raise ConfigError(f"--against-python {path} is no file: give the python of the baseline's environment.")
    return str(path.absolute())


def add_runs(
    bench: Bench,
    runs: Sequence[Path],
    *,
    name: str = "",
    train_views: int,
    trained_here: bool = False,
    note: str = "",
) -> str:
    """Adds finished runs as repeats of a new entry: what their files say and an evaluation shows, and nothing else.

    Args:
        runs: run folders, or their config.yml, alike in method, options and steps.

    Returns:
        The entry's name; that of the method with a number if none is given.

    Raises:
        ConfigError: there is no such run, or they are not alike.
        CommandError: a run cannot be evaluated.
        LedgerError: the ledger cannot be written, or the name is taken.
    """
    configs = [_config_path(run) for run in runs]
    bench.ledger.require_new(name)
    results = [bench.evaluate(config, train_views) for config in configs]
    if trained_here:
        for result in results:
            result["conditions"]["hardware"] = hardware(result["conditions"]["device"])
    method, conditions, origin = first = _identity(results[0])
    for config, result in zip(configs, results, strict=True):
        if _identity(result) != first:
            raise ConfigError(
                f"{config} was not trained and evaluated like {configs[0]} (method, options, steps or capture differ), "
                "so they are not repeats of one benchmark: add them one by one."
            )
    name = bench.ledger.add(name, method, conditions=conditions, origin=origin, note=note)
    for config, result in zip(configs, results, strict=True):
        values = result["values"] | training_figures(result["cost"], read_scalars(config.parent))
        bench.ledger.add_repeat(name, values, session=bench.session, seed=result["seed"])
    return name


def _config_path(run: Path) -> Path:
    path = run / "config.yml" if run.is_dir() else run
    if not path.is_file():
        raise ConfigError(f"There is no file {path}: give the config.yml that ns-train wrote for a run, or its folder.")
    return path


def _identity(result: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Method, conditions and origin, which repeats of an entry share."""
    return result["method"], result["conditions"], result["origin"]


def training_figures(
    cost: Mapping[str, float], curves: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, float]:
    """Returns the figures of a training that was not a benchmark, as far as it recorded them.

    Args:
        cost: ``train_it_per_s`` and ``train_peak_memory_mib`` as our models report them; empty for others.
    """
    figures = {}
    for key, name in (("train_it_per_s", "it_per_s"), ("train_peak_memory_mib", "train_peak_mib")):
        if cost.get(key, 0.0) > 0:  # 0 means that it was not measured
            figures[name] = cost[key]
    durations = [value for _, value in curves.get("Train Iter (time)", ()) if value > 0]
    if "it_per_s" not in figures and durations:
        figures["it_per_s"] = 1 / median(durations)
    speeds = [value for _, value in curves.get("Train Rays / Sec", ()) if value > 0]
    if speeds:
        figures["rays_per_s"] = median(speeds)
    losses = [value for _, value in curves.get("Train Loss", ())][-LAST_LOSSES:]
    if losses:
        figures["loss"] = fmean(losses)
    return figures
