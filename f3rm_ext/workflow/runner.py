"""Runs the chain: skips what is done, goes on where it stopped, and does again what options or inputs have changed."""

import math
import re
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.atomic_files import FolderLock, remove_temporaries
from f3rm_ext.utils.output_file import replacing
from f3rm_ext.workflow.commands import Command, Progress, progress_of, run_command
from f3rm_ext.workflow.defaults import choose_defaults, describe_defaults, with_defaults
from f3rm_ext.workflow.estimate import estimate_minutes
from f3rm_ext.workflow.manifest import Manifest, Record, identify, identify_photos
from f3rm_ext.workflow.options import STAGES, ChainOptions, Words, words_of
from f3rm_ext.workflow.page import REPORT, write_report
from f3rm_ext.workflow.records import newest_checkpoint, steps_of
from f3rm_ext.workflow.requirements import check_requirements
from f3rm_ext.workflow.stages import TITLES, Chain, Stage

if TYPE_CHECKING:
    from rich.console import Console

_STEP = re.compile(r"^\s*(\d+) \(\s*([\d.]+)%\)")
_PROGRESS = re.compile(r"^progress: (\d+)/(\d+) (.+)")
_NOTES = re.compile(
    r"^(The surface has fewer vertices .*|No photo sees .*|Left out: .*|Without a pose: .*|A second pass .*"
    r"|Dense points: .*)"
)
_SAVE_EVERY_S = 10.0


class ChainRun:
    """One call of the chain.

    Args:
        options: of the chain.
        console: shows progress.
    """

    def __init__(self, options: ChainOptions, console: "Console") -> None:
        self.options, self.console = options, console
        self.folder = options.output.absolute()
        self.done_before: set[str] = set()
        """Stages that an earlier call has finished."""
        self._is_ready = False
        """Whether what the stages need later was looked for."""

    def run(self) -> Path:
        """Runs all stages that are not finished, and writes the report.

        Returns:
            Path of the report.

        Raises:
            UserError: the folder or an option cannot be used, or a command failed.
            KeyboardInterrupt: the user pressed Ctrl-C.
        """
        images = self.options.images
        source = identify_photos(images) if images is not None else identify(self.options.capture)
        Manifest.open(self.folder, source)
        lock = FolderLock(self.folder / ".lock")
        if lock.is_held():
            raise ConfigError(
                f"Another chain is running in {self.options.output}: wait for it, or choose another --output."
            )
        with lock.hold():
            remove_temporaries(self.folder)  # of stages that were killed; none runs now
            self.manifest = Manifest.open(self.folder, source)
            self._take_defaults()
            self._check_texture()
            self._require_stages_before()
            self._check_trainings()
            finished: dict[str, Record] = {}
            chain = Chain(self.options, self.folder, finished)
            for stage in chain.stages():
                finished[stage.name] = self._do(stage)
                if stage.name == self.options.until_stage:
                    break
            page = write_report(self.options, self.folder, identify(self.options.capture), finished, self.done_before)
            path = self.folder / REPORT
            with replacing(path, "--output") as stream:
                stream.write(page.encode(errors="backslashreplace"))
        return path

    def _do(self, stage: Stage) -> Record:
        """Runs a stage unless it is done. Returns its record."""
        title, decided = TITLES[stage.name], stage.decided
        why = self.manifest.why_again(stage.name, decided, stage.inputs)
        forced = self._is_forced(stage)
        if why is None and not forced:
            self.console.print(f"  [green]kept[/] {title}: done before", highlight=False)
            self.done_before.add(stage.name)
            return self.manifest.records[stage.name]
        self._check_requirements()
        if forced and stage.name == "sfm":  # a training begins anew by its run folder, a mesh by its command
            stage = replace(stage, places=(*stage.places, "--start-over"))
        record = self._begin(stage, why == "it was interrupted" and not forced)
        goes_on = stage.is_training and newest_checkpoint(stage.run_folder(self.folder, record))
        if why or forced:
            how = f"goes on after {steps_of(goes_on)} steps" if goes_on else "is done again"
            self._say(f"The stage {stage.name} {how}, because {why or f'--from-stage is {self.options.from_stage}'}.")
        if stage.name == "coarse" and not goes_on and compat.default_device_type() == "cpu":
            self._tell_time(stage)
        self._run(stage, record)
        record.outputs = {name: self.manifest.output(path) for name, path in stage.written(self.folder, record).items()}
        record.state = "finished"
        self.manifest.save()
        for note in record.notes:
            self._say(f"  {note}")
        return record

    def _take_defaults(self) -> None:
        """Takes what an earlier call has chosen, or chooses by this machine, and says so."""
        if not self.manifest.defaults:
            self.manifest.defaults = choose_defaults(self.options)
        given, self.options = self.options, with_defaults(self.options, self.manifest.defaults)
        self._say(describe_defaults(given, self.options))

    def _check_requirements(self) -> None:
        """Looks, before the first stage that is run, for what later ones need."""
        if self._is_ready:
            return
        self._is_ready = True
        training = None if self.options.skip_coarse and self.options.skip_refine else "splats"
        for note in check_requirements(self.folder, training=training, meshes=True, scores=not self.options.skip_eval):
            self._say(note)

    def _tell_time(self, stage: Stage) -> None:
        """Says how long the trainings will take, before the first one."""
        log = self.folder / "logs" / "estimate.log"
        minutes = estimate_minutes(stage, self.options, Path.cwd(), log, self.console)
        if minutes is None:
            self._say(f"How long the trainings take cannot be told beforehand; {log} says why.")
            return
        parts = [
            f"{one:.0f} for the {name}"
            for one, name in zip(minutes, ("coarse splats", "refinement"), strict=True)
            if one
        ]
        self._say(f"The trainings take about {max(1, sum(minutes)):.0f} minutes here: {' and '.join(parts)}.")

    def _say(self, sentence: str | None) -> None:
        if sentence:
            self.console.print(f"  {sentence}", highlight=False, markup=False, soft_wrap=True)

    def _begin(self, stage: Stage, continues: bool) -> Record:
        """Writes into the manifest that a stage begins, so that a kill leaves a trace of it."""
        old = self.manifest.records.get(stage.name)
        record = Record(options=stage.decided, inputs=dict(stage.inputs))
        if old is not None and (old.options, old.inputs) == (record.options, record.inputs):
            record.attempt = old.attempt
            if continues:
                record.seconds, record.peak_mib, record.runs = old.seconds, old.peak_mib, old.runs
            elif stage.is_training:
                record.attempt += 1
        record.runs += 1
        record.command = Command("", stage.command(self.folder, record), Path()).text
        self.manifest.records[stage.name] = record
        self.manifest.save()
        return record

    def _run(self, stage: Stage, record: Record) -> None:
        """Runs the command of a stage; keeps time and memory also if it is stopped or killed."""
        began_s, before_s = time.monotonic(), record.seconds
        saved_s = began_s

        def note_time() -> None:
            nonlocal saved_s
            record.seconds = before_s + time.monotonic() - began_s
            if time.monotonic() - saved_s > _SAVE_EVERY_S:
                saved_s = time.monotonic()
                self.manifest.save()

        def on_line(line: str) -> Progress | None:
            note_time()
            if match := _STEP.match(line):
                return float(match[2]), 100.0, f"step {match[1]}"
            if match := _PROGRESS.match(line):
                return int(match[1]), int(match[2]), match[3]
            if match := _NOTES.match(line):
                record.notes.append(match[1])
            return progress_of(line)

        def on_poll() -> Progress | None:
            note_time()
            count = len(list(stage.pictures.glob("*.png"))) if stage.pictures is not None else 0
            return (count, float("inf"), f"{count} pictures") if count else None

        log = self.folder / "logs" / f"{stage.name}.log"
        words = stage.command(self.folder, record)
        written = stage.outputs.values()
        for path in (*written, *([stage.pictures] if stage.pictures else [])):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            outcome = run_command(
                Command(TITLES[stage.name], words, log, on_line, on_poll, is_forked=True), Path.cwd(), self.console
            )
        finally:
            record.seconds = before_s + time.monotonic() - began_s
            self.manifest.save()
        record.peak_mib = max(record.peak_mib, outcome.peak_mib)

    def _is_forced(self, stage: Stage) -> bool:
        first = self.options.from_stage
        return first is not None and STAGES.index(stage.name) >= STAGES.index(first)

    def _require_stages_before(self) -> None:
        """Raises ConfigError unless all stages before --from-stage are finished."""
        first = self.options.from_stage
        if first is None:
            return
        left_out = {"sfm"} if self.options.images is None else set()
        left_out |= {"coarse", "eval-coarse"} if self.options.skip_coarse else set()
        left_out |= {"refine", "refined-mesh", "eval-refined"} if self.options.skip_refine else set()
        needed = [name for name in STAGES[: STAGES.index(first)] if not name.startswith("eval-")]
        records = self.manifest.records
        for name in needed:
            if name not in left_out and (name not in records or records[name].state != "finished"):
                raise ConfigError(
                    f"--from-stage {first} needs the stage {name}, which is not finished: leave --from-stage out."
                )

    def _check_texture(self) -> None:
        """Raises ConfigError where the texture is too small for the mesh, which its command would find out last."""
        options = self.options
        given = options.of_stage("texture", {"texture-size": (str(options.texture_size or 0),)})["texture-size"]
        size = int(" ".join(given))
        vertices = int(" ".join(options.of_stage("mesh", {"vertices": (str(options.vertices or 0),)})["vertices"]))
        if 0 < size**2 < vertices:
            least = 1 << math.ceil(math.log2(vertices) / 2)
            raise ConfigError(
                f"--texture-size {size} gives {size**2:,} texels for the {vertices:,} --vertices of the "
                f"mesh, less than one for each: use {least} or more, or fewer --vertices."
            )

    def _check_trainings(self) -> None:
        """Lets trainings that do not begin at once say now what is wrong with their options."""
        options, checks = self.options, list[Words]()
        time_given = {"refinement-time": (options.refinement_time,)} if options.refinement_time else {}
        if options.images is not None and "coarse" in options.passed_on and not options.skip_coarse:
            words = words_of(options.of_stage("coarse", options.of_trainings()))
            checks.append((str(options.coarse_method), *words))
        if "refine" in options.passed_on and not options.skip_refine:
            words = words_of(options.of_stage("refine", options.of_trainings() | time_given))
            checks.append(("sugar-ext-refine", *words))
        checked = "; ".join(map(shlex.join, checks))
        if not checks or self.manifest.checked == checked:
            return
        for words in checks:
            check = [sys.executable, "-m", "f3rm_ext.workflow.check", *words]
            log = self.folder / "logs" / "check.log"
            run_command(Command(f"Options of {words[0]}", check, log, is_forked=True), Path.cwd(), self.console)
        self.manifest.checked = checked
        self.manifest.save()
