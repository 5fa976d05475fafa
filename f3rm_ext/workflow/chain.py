"""``f3rm-ext sugar run``: from photos or a capture to a textured mesh, in stages."""

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError
from f3rm_ext.html.page import plural
from f3rm_ext.workflow.chain_stages import ChainStages
from f3rm_ext.workflow.commands import Command, CommandError, run_command
from f3rm_ext.workflow.defaults import apply_defaults, choose_defaults, describe_defaults
from f3rm_ext.workflow.manifest import identify, identify_photos
from f3rm_ext.workflow.options import STAGES, ChainOptions, StageOptions, Words, option_words
from f3rm_ext.workflow.page import write_page
from f3rm_ext.workflow.runner import StageRunner, check_requirements
from f3rm_ext.workflow.stages import Stage

if TYPE_CHECKING:
    from rich.console import Console

REFINING_COST = 1.5
"""Time of a refining step over that of a coarse step on a CPU: 1.3 to 1.7 with the defaults for four captures."""
_ESTIMATE_LIMIT_S = 120.0


class ChainRun(StageRunner):
    """One call of ``f3rm-ext sugar run``."""

    command = "f3rm-ext sugar run"

    def __init__(self, options: ChainOptions, console: "Console") -> None:
        super().__init__(options.output, console)
        self.options = options

    def run(self) -> Path:
        """See :meth:`StageRunner.run`."""
        images = self.options.images
        with self.open_folder(identify_photos(images) if images is not None else identify(self.options.capture)):
            self._take_defaults()
            self._check_texture()
            self._require_earlier_stages()
            self._check_trainings()
            first = self.options.from_stage
            for stage in ChainStages(self.options, self.folder, self.records).build():
                is_demanded = first is not None and STAGES.index(stage.name) >= STAGES.index(first)  # type: ignore[arg-type]
                self.run_stage(stage, f"--from-stage is {first}" if is_demanded else "")
            if not self.records:
                raise ConfigError(
                    f"All stages up to --until-stage {self.options.until_stage} are left out, so there is nothing to "
                    "do: name a later one."
                )
            capture = identify(self.options.capture)
            return self.write_report(write_page(self.options, self.folder, capture, self.records, self.kept))

    def check_requirements(self) -> list[str]:
        """See :meth:`StageRunner.check_requirements`."""
        training = None if self.options.skip_coarse and self.options.skip_refine else "splats"
        return check_requirements(self.folder, training=training, meshes=True, scores=not self.options.skip_eval)

    def prepare(self, stage: Stage, resumes: bool) -> None:
        """Says on a CPU, before the first training, how long the trainings will take."""
        if stage.name != "coarse" or resumes or compat.default_device_type() != "cpu":
            return
        log = self.folder / "logs" / "estimate.log"
        minutes = self._estimate_minutes(stage, log)
        if minutes is None:
            self.say(f"The time of the trainings cannot be estimated; {log} says why.")
            return
        parts = [
            f"{one:.0f} for the {name}"
            for one, name in zip(minutes, ("coarse splats", "refinement"), strict=True)
            if one
        ]
        total = plural(round(max(1, sum(minutes))), "minute")
        self.say(f"The trainings take about {total} here: {' and '.join(parts)}.")

    def _estimate_minutes(self, stage: Stage, log: Path) -> tuple[float, float] | None:
        """Times a few coarse steps, which are thrown away. Returns the minutes of both trainings; None if unknown."""
        words = (*stage.program[1:], *stage.arguments, *option_words(stage.options))
        words = (sys.executable, "-m", "f3rm_ext.planning.throughput", *words)
        try:
            command = Command("Estimate of the time", words, log, _ESTIMATE_LIMIT_S)
            timing = run_command(command, Path.cwd(), self.console).result
        except CommandError:
            return None
        # One that was stopped at its time limit has told no more than what the capture holds.
        if "seconds" not in timing:
            return None
        step_s = timing["seconds"] / timing["steps"]
        return timing["seconds"] / 60, self._refining_steps() * REFINING_COST * step_s / 60

    def _refining_steps(self) -> int:
        options = self.options
        if options.skip_refine or STAGES.index(options.until_stage or STAGES[-1]) < STAGES.index("refine"):
            return 0
        from f3rm_ext.mesh.bound.model import STEPS

        steps = _whole_number(options.passed_on.get("refine", {}), "max-num-iterations")
        return STEPS[options.refinement_time or "long"] if steps is None else steps

    def _take_defaults(self) -> None:
        """Takes what an earlier call has chosen, or chooses for this machine, and says so."""
        if not self.manifest.defaults:
            self.manifest.defaults = choose_defaults(self.options)  # type: ignore[assignment]
        previous, self.options = self.options, apply_defaults(self.options, self.manifest.defaults)
        self.say(describe_defaults(previous, self.options))

    def _require_earlier_stages(self) -> None:
        """Raises ConfigError unless all stages before --from-stage are finished."""
        first = self.options.from_stage
        if first is None:
            return
        omitted = self.options.left_out() | {"page"}  # nothing is made of it
        records = self.manifest.stages
        for name in STAGES[: STAGES.index(first)]:
            if name.startswith("eval-") or name in omitted:
                continue
            if name not in records or records[name].state != "finished":
                raise ConfigError(
                    f"--from-stage {first} needs the stage {name}, which is not finished: leave --from-stage out."
                )

    def _check_texture(self) -> None:
        """Raises ConfigError where the texture is too small for the mesh, which its command would find out last."""
        options = self.options
        size = _whole_number(options.stage_options("texture"), "texture-size") or 0
        vertices = _whole_number(options.stage_options("mesh"), "vertices") or 0
        if 0 < size**2 < vertices:
            least = 1 << math.ceil(math.log2(vertices) / 2)
            raise ConfigError(
                f"--texture-size {size} gives {size**2:,} texels for the {vertices:,} --vertices of the "
                f"mesh, less than one for each: use {least} or more, or fewer --vertices."
            )

    def _check_trainings(self) -> None:
        """Checks the options of trainings that do not begin at once."""
        options, checks = self.options, list[Words]()
        is_given = "coarse" in options.passed_on or options.regularization is not None
        if options.images is not None and is_given and not options.skip_coarse:
            checks.append((str(options.coarse_method), *option_words(options.stage_options("coarse"))))
        if "refine" in options.passed_on and not options.skip_refine:
            checks.append(("sugar-ext-refine", *option_words(options.stage_options("refine"))))
        checked = "; ".join(map(shlex.join, checks))
        if not checks or self.manifest.checked == checked:
            return
        for words in checks:
            check = [sys.executable, "-m", "f3rm_ext.workflow.check", *words]
            log = self.folder / "logs" / "check.log"
            run_command(Command(f"Options of {words[0]}", check, log), Path.cwd(), self.console)
        self.manifest.checked = checked
        self.manifest.save()


def _whole_number(options: StageOptions, name: str) -> int | None:
    """Returns the value of an option; None if it has none, or that is no whole number."""
    text = " ".join(options.get(name, ()))
    return int(text) if text.isdigit() else None
