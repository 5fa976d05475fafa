"""``f3rm-ext plan``: whether a run fits, how long it takes and which options to use, before it begins."""

import gc
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import tyro

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError, MemoryShortageError
from f3rm_ext.planning.options import PlanOptions
from f3rm_ext.utils.console import console
from f3rm_ext.utils.ranges import Range

if TYPE_CHECKING:
    from f3rm_ext.engine.trainer import F3rmTrainerConfig
    from f3rm_ext.planning.request import ImageSizes
    from f3rm_ext.planning.throughput import Throughput


@dataclass(kw_only=True)
class Plan(PlanOptions):
    """Predicts whether a run fits into memory, how often it sees its images and how long it takes.

    Type the arguments of ns-train, the method first; the options below may stand anywhere among them. The memory is
    that of a real training step that runs without data and without values, so no GPU is needed. If the run does not
    fit, the planner searches for options that make it fit, least harmful first, and prints the command. Without
    --data and without sizes, 100 images of 1024 x 1024 pixels are assumed.

    Typical calls:
      f3rm-ext plan f3rm-ext --data capture --gpu 4090
      f3rm-ext plan sugar-ext --gaussians 6000000 --sh-degree 3 --vram-gib 16
      f3rm-ext plan f3rm-ext-lite --data capture --probe --apply
      f3rm-ext plan f3rm-ext --images 100 --width-px 1024 --height-px 1024 --epochs 10 --json
    """

    words: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Words for ns-train: the method and its arguments."""
    epochs: Annotated[float, Range(0, 10**9, above=True)] | None = None
    """Also print the number of steps for this many epochs, above 0."""
    probe: bool = False
    """Train 25 steps of each stage on this machine, and extrapolate the time of the run from the last 20."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the plan as JSON."""
    apply: bool = False
    """Start the training with the advised options."""

    @classmethod
    def parse(cls, arguments: Sequence[str], prog: str) -> "Plan":
        """Reads a command line without the program's name: own options, and everything else for ns-train.

        Raises:
            ConfigError: an option is wrong or the method is missing.
            SystemExit: from tyro, after help (0) or wrong options (2).
        """
        if not arguments or {"-h", "--help"} & {*arguments}:
            tyro.cli(cls, prog=prog, args=["--help"])
        compat.shorten_imports()
        gc.disable()  # modules stay, so looking for garbage among them takes a tenth of the time and finds none
        from f3rm_ext.planning.question import split_arguments
        from f3rm_ext.scripts.switches import plain_switches

        gc.freeze()
        gc.enable()

        takes_value = {
            field.name.replace("_", "-"): field.default is not False for field in fields(cls) if field.name != "words"
        }
        flags = {f"no-{name}": False for name, value in takes_value.items() if not value}
        own, words = split_arguments(plain_switches(cls, arguments), takes_value | flags)
        plan = tyro.cli(cls, prog=prog, args=own if words else ["--help"])
        plan.words = tuple(words)
        return plan

    def main(self) -> int:
        from f3rm_ext.planning.estimator import cached, estimate_memory
        from f3rm_ext.planning.plan import make_plan
        from f3rm_ext.planning.question import Question
        from f3rm_ext.planning.table import show
        from f3rm_ext.planning.throughput import probe, read_throughput

        options = {option.name: getattr(self, option.name) for option in fields(PlanOptions)}
        question = Question(self.words[0], self.words[1:], **options)
        if self.probe and question.device_is_given:
            raise ConfigError("--probe measures this machine, not another card: leave out --gpu and --vram-gib.")

        def measure(config: "F3rmTrainerConfig", sizes: "ImageSizes") -> "Throughput | None":
            if self.probe:
                return probe(config)
            return None if question.device_is_given else read_throughput(config, sizes)

        estimate = cached(estimate_memory, lambda text: print(text, file=sys.stderr, flush=True))
        plan = make_plan(question, estimate, measure=measure, wanted_epochs=self.epochs)
        if self.json:
            print(json.dumps(plan.to_dict(), indent=1))
        else:
            console().print(show(plan), soft_wrap=True)
        if self.apply:
            if not plan.advice.fits:
                raise MemoryShortageError(
                    "The run does not fit with any options and was not started: use a smaller preset, fewer Gaussians "
                    "or a larger card."
                )
            self._start(question.command(plan.advice.options))
        return 0

    def _start(self, command: Sequence[str]) -> None:
        """Replaces this process by ns-train's.

        Raises:
            ConfigError: there is none beside this Python, nor on the path.
        """
        from f3rm_ext.workflow.commands import program

        sys.stdout.flush()
        path = shutil.which(program(command[0]))
        if path is None:
            raise ConfigError(f"There is no {command[0]}: install nerfstudio in this environment.")
        os.execv(path, [path, *command[1:]])
