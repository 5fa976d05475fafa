"""``f3rm-ext sfm train`` and ``f3rm-ext sfm prepare``: DiffusionSfM's training and its data."""

import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from f3rm_ext.errors import ConfigError, reason_of
from f3rm_ext.sfm.diffusion.settings import (
    Preset,
    Settings,
    check_folder,
    check_weights,
    parse_settings,
    scale_steps,
)
from f3rm_ext.utils.console import image_progress, say
from f3rm_ext.utils.signals import handle_signals

_LAUNCHED = "LOCAL_RANK"
"""Set by accelerate in each process that it starts."""
_EVERY = 10
"""Steps between two lines of progress."""


@dataclass
class Train:
    """Train DiffusionSfM, which predicts the camera rays of a few images of a scene by diffusion.

    Settings are key=value words with the names of the published code, such as training.batch_size=8. You can paste a
    command from its documentation after `f3rm-ext sfm train --`; accelerate then starts the processes.

    The sparse stage predicts 16 × 16 rays per image. The dense stage starts from a sparse model
    (training.pretrain_path) and predicts 256 × 256 rays. The batch size is per process: 8 GPUs with 8 scenes each train
    on 64.

    If the loss becomes NaN, turn mixed precision off (training.mixed_precision=False, which needs about twice the
    memory for activations) and resume (training.resume=True with the same hydra.run.dir).

    Typical calls:
      f3rm-ext sfm train --preset sparse --plan dataset.path=co3d_data
      f3rm-ext sfm train model.size=tiny training.batch_size=4 dataset.category=room debug.wandb=False \\
        hydra.run.dir=output_debug
      f3rm-ext sfm train -- accelerate launch --multi_gpu --gpu_ids 0,1 --num_processes 2 train.py training.batch_size=8
    """

    words: tyro.conf.Positional[tuple[str, ...]] = ()
    """Settings as key=value, or a whole command of accelerate after `--`."""
    preset: Preset = "none"
    """The published stages for 8 processes: sparse (8 scenes each, 400,000 steps) or dense (4, 800,000)."""
    plan: bool = False
    """Print the plan of the training, then exit."""

    def main(self) -> int:
        launcher, words = split_launcher(self.words)
        settings = parse_settings(words, self.preset)
        if _LAUNCHED in os.environ:
            launcher = None
        if self.plan:
            given = int(os.environ.get("WORLD_SIZE", "1"))
            return self._show_plan(settings, given if launcher is None else count_processes(launcher))
        check_weights(settings)
        check_folder(settings)
        return _train(settings) if launcher is None else _launch(launcher, self.preset, words)

    def _show_plan(self, settings: Settings, processes: int) -> int:
        from f3rm_ext.sfm.diffusion.plan import memory_lines, plan_lines

        settings = scale_steps(settings, processes)
        say(*plan_lines(settings, processes), *memory_lines(settings, processes))
        return 0


@dataclass
class Prepare:
    """Prepare the data that `f3rm-ext sfm train` reads.

    For a download of CO3D v2, the command writes the lists of frames: those of the few-view set, of sequences of good
    quality, with boxes from the masks. For nerfstudio captures with depth maps, it writes images, depth maps and lists
    in CO3D's format; held-out images go to the test list.

    Typical calls:
      f3rm-ext sfm prepare --output co3d_data --category apple cup
      f3rm-ext sfm prepare --output co3d_data --category all
      f3rm-ext sfm prepare --output room_data --category room --captures room1 room2
    """

    output: Annotated[Path, tyro.conf.arg(aliases=["--out"])]
    """Folder to give as dataset.path. Without --captures, its subfolder co3d/ must hold the downloaded categories."""
    category: tuple[str, ...]
    """Categories of CO3D to list, or `all` downloaded ones; with --captures, the name of their category."""
    captures: tuple[Path, ...] = ()
    """Captures to convert to one sequence each."""

    def main(self) -> int:
        from f3rm_ext.sfm.diffusion.co3d_lists import FrameLists, convert_captures, find_downloads, list_co3d

        first, *others = self.category or ("",)
        every = first == "all" and not others
        if not first or (self.captures and (every or others)):
            raise ConfigError(
                "--category must name one category with --captures, and at least one category of CO3D otherwise."
            )
        lists: list[FrameLists] = []
        with image_progress("images") as progress:
            task = progress.add_task("Images", total=None)

            def show(done: int) -> None:
                progress.update(task, completed=done)

            if self.captures:
                lists.append(FrameLists(convert_captures(self.captures, self.output, first, show), {}))
            else:
                for category in find_downloads(self.output) if every else self.category:
                    progress.update(task, description=category)
                    lists.append(list_co3d(self.output, category, show))
        missing = {name: path for each in lists for name, path in each.missing.items()}
        if missing:
            names = ", ".join(list(missing)[:3]) + (" …" if len(missing) > 3 else "")
            say(
                f"Files of {len(missing)} sequences are missing ({names}), such as {next(iter(missing.values()))}. "
                "Frames without files are left out: download these sequences to use them."
            )
        wanted = "all_train" if every else ",".join(self.category)
        say(
            f"{sum(each.counts['train'] for each in lists)} images to train with and "
            f"{sum(each.counts['test'] for each in lists)} to test with are in {self.output}.",
            f"To train: f3rm-ext sfm train {shlex.quote(f'dataset.path={self.output}')} dataset.category={wanted}",
        )
        return 0


def split_launcher(words: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """Splits a pasted command into what accelerate gets, up to the script, and the settings.

    >>> split_launcher(["accelerate", "launch", "--num_processes", "8", "train.py", "training.batch_size=8"])
    (['--num_processes', '8'], ['training.batch_size=8'])
    >>> split_launcher(["training.batch_size=8"])
    (None, ['training.batch_size=8'])

    Raises:
        ConfigError: the command names no script.
    """
    if list(words[:2]) != ["accelerate", "launch"]:
        return None, list(words)
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if script is None:
        raise ConfigError("The command of accelerate names no script: put train.py before the settings.")
    return list(words[2:script]), list(words[script + 1 :])


def count_processes(launcher: Sequence[str]) -> int:
    """Returns the number of processes that options of accelerate ask for, 1 by default.

    >>> count_processes(["--multi_gpu", "--num_processes", "8"]), count_processes([])
    (8, 1)
    """
    for place, word in enumerate(launcher):
        name, _, value = word.partition("=")
        if name in ("--num_processes", "--num-processes"):
            number = value or (launcher[place + 1] if place + 1 < len(launcher) else "")
            if number.isdigit():
                return int(number)
            raise ConfigError(f"--num_processes is {number or 'empty'}, but must be a number of processes.")
    return 1


def _launch(launcher: list[str], preset: Preset, words: list[str]) -> int:
    """Lets accelerate start the processes; each runs this command without accelerate's part."""
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("The package accelerate is not installed: `pip install 'f3rm-ext[sfm]'`.")
    import subprocess

    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "-m", "f3rm_ext.scripts.sfm_train"]
    # In a session of its own it hears of Ctrl-C once; it passes it on, and waits until the processes have saved.
    process = subprocess.Popen([*command, "--preset", preset, *words], start_new_session=True)
    stopped: list[int] = []

    def stop(number: int, _frame: object) -> None:
        stopped.append(number)
        process.send_signal(number)

    with handle_signals(stop, signal.SIGINT, signal.SIGTERM):
        code = process.wait()
    return 128 + stopped[0] if stopped else code


def _train(settings: Settings) -> int:
    from f3rm_ext.sfm.diffusion.plan import plan_lines
    from f3rm_ext.sfm.diffusion.training import Training, make_accelerator

    accelerator, warning = make_accelerator()
    settings = scale_steps(settings, accelerator.num_processes)
    if accelerator.is_main_process:
        if warning:
            say(f"Warning: {warning}")
        say(*plan_lines(settings, accelerator.num_processes))
    training = Training(settings, accelerator)
    if accelerator.is_main_process and training.notice:
        say(training.notice)
    if accelerator.is_main_process and training.iteration:
        say(f"Resuming at step {training.iteration:,}.")
    log = _start_wandb(settings) if settings.debug.wandb and accelerator.is_main_process else None

    def report(iteration: int, loss: float) -> None:
        if log is not None:
            log.log({"loss": loss}, step=iteration)
        if iteration % _EVERY == 0 or iteration == settings.training.max_iterations:
            say(f"step {iteration:,} of {settings.training.max_iterations:,}: loss {loss:.5f}")

    def report_metrics(iteration: int, metrics: dict[str, float]) -> None:
        if log is not None:
            log.log(metrics, step=iteration)
        say(f"step {iteration:,}, held-out sets: " + ", ".join(f"{name} {v:.3f}" for name, v in metrics.items()))

    stop = training.run(report, report_metrics)
    if stop:
        if accelerator.is_main_process:
            say(
                f"Stopped at step {training.iteration:,} of {settings.training.max_iterations:,}, which is saved: to "
                "go on, repeat the command with training.resume=True."
            )
        return 128 + stop
    if accelerator.is_main_process:
        say(f"Checkpoints are in {settings.folder / 'checkpoints'}.")
    return 0


def _start_wandb(settings: Settings) -> Any:
    import wandb

    from f3rm_ext.sfm.diffusion.settings import flatten

    try:
        return wandb.init(
            project=settings.debug.project_name, name=settings.debug.run_name, config=dict(flatten(settings))
        )
    except Exception as error:  # no login, no network …
        raise ConfigError(
            f"Weights & Biases cannot be used ({reason_of(error)}): run `wandb login`, or set debug.wandb=False."
        ) from error


if __name__ == "__main__":  # in each process that accelerate starts
    from f3rm_ext.scripts.cli import main

    sys.exit(main(["sfm", "train", *sys.argv[1:]]))
