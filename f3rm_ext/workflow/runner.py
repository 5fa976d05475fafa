"""Runs the stages of a workflow: skips what is finished, resumes what was interrupted, repeats what has changed."""

import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.markup import escape

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.atomic_files import FolderLock, remove_temporaries
from f3rm_ext.utils.output_file import require_writable, write_file
from f3rm_ext.workflow.commands import Command, run_command
from f3rm_ext.workflow.manifest import INTERRUPTED, NAME, Manifest, Record
from f3rm_ext.workflow.stages import Stage, hide_home

if TYPE_CHECKING:
    from rich.console import Console

REPORT = "report.html"
EXIT_INTERRUPTED = 130
LEAST_FREE_GIB, SMALL_GIB, LARGE_GIB = 0.25, 1.0, 8.0
"""Disk space: the minimum of a small training, the maximum of a run on a CPU, and that of two trainings of 3 million
Gaussians, whose checkpoints have 2 GiB; the old one stays until the new one is complete."""
_SAVE_EVERY_S = 10.0


class StageRunner(ABC):
    """One call of a workflow."""

    command = ""
    """The command that the user types, such as ``f3rm-ext demo``."""
    option = "--output"
    """Option of that command for the output folder."""

    def __init__(self, output: Path, console: "Console") -> None:
        self.output, self.console = output, console
        self.folder = output.absolute()
        self.records: dict[str, Record] = {}
        """Finished stages, in order."""
        self.kept: set[str] = set()
        """Stages that an earlier call has finished."""
        self._is_ready = False
        self._notes: set[str] = set()

    @abstractmethod
    def run(self) -> Path:
        """Runs all stages that are not finished, writes the report, and returns its path.

        Raises:
            UserError: the folder or an option cannot be used, or a command failed.
            KeyboardInterrupt: the user pressed Ctrl-C.
        """

    def main(self, how_to_resume: str) -> int:
        """Does :meth:`run` for a command that was typed, says after Ctrl-C how to resume, and returns the exit code."""
        place, logs = escape(str(self.output)), escape(str(self.output / "logs"))
        self.console.print(f"{self.command} in [bold]{place}[/]; logs in {logs}", highlight=False, soft_wrap=True)
        try:
            report = self.run()
        except KeyboardInterrupt:
            print(f"\nStopped; finished stages are kept. To resume: {how_to_resume}", file=sys.stderr)
            return EXIT_INTERRUPTED
        self.console.print(f"Report: [bold]{escape(str(report))}[/]", highlight=False, soft_wrap=True)
        return 0

    def check_requirements(self) -> list[str]:
        """Looks, before the first stage that runs, for what later ones need. Returns sentences on what is missing.

        Raises:
            ConfigError: a later stage would fail.
        """
        return []

    def prepare(self, stage: Stage, resumes: bool) -> None:  # noqa: B027  # a hook
        """Called before a stage runs; ``resumes`` says whether a training resumes from a checkpoint."""

    @contextmanager
    def open_folder(self, capture: Mapping[str, Any] | None) -> Iterator[None]:
        """Reads the manifest of the folder and keeps other calls away meanwhile.

        Raises:
            ConfigError: the folder cannot be used, or another call is running in it.
        """
        # First to refuse folders of others before the lock is put into them, then again for what a call that held it
        # has written.
        Manifest.open(self.folder, self.command, self.option, capture)
        require_writable(self.folder / NAME, self.option)

        def refuse(_waited_s: float) -> None:
            raise ConfigError(
                f"Another `{self.command}` is running in {self.output}: wait for it, or choose another {self.option}."
            )

        with FolderLock(self.folder / ".lock").hold(on_wait=refuse):
            remove_temporaries(self.folder)  # of stages that were killed; none runs now
            self.manifest = Manifest.open(self.folder, self.command, self.option, capture)
            yield

    def run_stage(self, stage: Stage, demand: str = "") -> Record:
        """Runs a stage unless it is finished, and returns its record.

        ``demand`` says why it has to be done again from nothing; empty if it need not.

        Raises:
            UserError: its command failed, or a later stage would.
            KeyboardInterrupt: the user pressed Ctrl-C.
        """
        reason = self.manifest.reason_to_run(stage.name, stage.decided, stage.inputs)
        resumes = not demand and (reason == INTERRUPTED or reason is None)
        if reason is None:
            reason = stage.remainder or None
        reason = demand or reason
        if reason is None:
            self.console.print(f"  [green]kept[/] {stage.title}: done before", highlight=False)
            self.kept.add(stage.name)
            record = self.manifest.stages[stage.name]
        else:
            record = self._start(stage, reason, resumes, is_demanded=bool(demand))
            self._run(stage, record)
        self.records[stage.name] = record
        return record

    def say(self, sentence: str | None) -> None:
        """Shows a sentence."""
        if sentence:
            self.console.print(f"  {sentence}", highlight=False, markup=False, soft_wrap=True)

    def write_report(self, page: str) -> Path:
        """Writes the report and returns its path."""
        path = self.folder / REPORT
        write_file(path, page.encode(errors="backslashreplace"), self.option)
        return path

    def _start(self, stage: Stage, reason: str, resumes: bool, is_demanded: bool) -> Record:
        """Says why a stage runs, and writes into the manifest that it does, so that a kill leaves a trace of it."""
        if not self._is_ready:
            self._is_ready = True
            for note in self.check_requirements():
                self.say(note)
        record = self.manifest.get_record(stage.name, stage.decided, stage.inputs)
        if not resumes:
            is_repeated = is_demanded or record.runs > 0
            record = Record(options=record.options, inputs=record.inputs, attempt=record.attempt)
            if stage.is_training:
                # Options that are set back find the last training with them. One that is repeated gets a folder of its
                # own: in the old one it would resume at a checkpoint.
                later = replace(record, attempt=record.attempt + 1)
                while stage.run_folder(self.folder, later).is_dir():
                    record, later = later, replace(later, attempt=later.attempt + 1)
                if is_repeated and stage.run_folder(self.folder, record).is_dir():
                    record = later
        steps = stage.steps_done(self.folder, record)
        if reason:
            how = f"resumes after {steps} steps" if steps else "is done again"
            self.say(f"The stage {stage.name} {how}, because {reason}.")
        self.prepare(stage, steps > 0)
        record.state, record.title = "running", stage.title
        record.runs += 1
        record.notes = []
        record.command = Command("", stage.command(self.folder, record), Path()).text
        self.manifest.stages[stage.name] = record
        self.manifest.save()
        return record

    def _run(self, stage: Stage, record: Record) -> None:
        """Runs the command of a stage; keeps its time also if it is stopped or killed."""
        start_s, previous_s = time.monotonic(), record.seconds
        saved_s = start_s

        def save_time() -> None:
            nonlocal saved_s
            record.seconds = previous_s + time.monotonic() - start_s
            if time.monotonic() - saved_s > _SAVE_EVERY_S:
                saved_s = time.monotonic()
                self.manifest.save()

        words = stage.command(self.folder, record)
        log = self.folder / "logs" / f"{stage.name}.log"
        for path in (*stage.outputs.values(), *([stage.pictures] if stage.pictures else [])):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            command = Command(stage.title, words, log, stage.limit_s, save_time)
            outcome = run_command(command, Path.cwd(), self.console)
        finally:
            record.seconds = previous_s + time.monotonic() - start_s
            self.manifest.save()
        record.working_s += outcome.working_s
        record.peak_mib = max(record.peak_mib, outcome.peak_mib)
        record.result = outcome.result
        record.notes = [hide_home(note) for note in outcome.notes]
        files = stage.files(self.folder, record)
        if lost := [str(path) for path in files.values() if not path.is_file()]:
            raise ConfigError(f"{stage.title} ended without an error but did not write {lost[0]}: see {log}.")
        record.outputs = {name: self.manifest.output(path) for name, path in files.items()}
        record.state = "finished"
        self.manifest.save()
        for note in record.notes:
            if note not in self._notes:
                self.say(f"  {note}")
        self._notes.update(record.notes)


def check_requirements(
    folder: Path, *, training: Literal["fields", "splats"] | None, meshes: bool, scores: bool
) -> list[str]:
    """Checks that later stages will find what they need. Returns sentences on what is missing but dispensable.

    Raises:
        ConfigError: a stage would fail.
    """
    notes: list[str] = []
    if meshes:
        from f3rm_ext.utils.open3d_library import open3d

        open3d()
    on_gpu = training == "splats" and compat.has_cuda()
    if on_gpu:
        works, state, advice = compat.describe_gsplat()
        if not works:
            raise ConfigError(f"Splats cannot be trained on this GPU: gsplat is {state}. {advice}")
    free_gib = shutil.disk_usage(folder).free / (1 << 30)
    if training and free_gib < LEAST_FREE_GIB:
        raise ConfigError(
            f"Only {free_gib:.2f} GiB are free where {folder} is, and a training needs {LEAST_FREE_GIB:g}: make room, "
            "or choose a folder elsewhere."
        )
    wanted_gib = LARGE_GIB if on_gpu else SMALL_GIB
    if free_gib < wanted_gib:
        notes.append(f"{free_gib:.2f} GiB are free where {folder} is; up to {wanted_gib:g} may be needed.")
    if scores:
        from f3rm_ext.model_components.image_metrics import find_alexnet

        path = find_alexnet()
        if not path.is_file():
            notes.append(f"LPIPS needs AlexNet's weights, which are not at {path}: off-line it is left out.")
    return notes
