"""Measures how fast this machine trains a run.

``python -m f3rm_ext.planning.throughput METHOD OPTIONS``, with the arguments of ``ns-train``, prints how long a
training takes here; in a process of its own, since it trains a few steps.
"""

import contextlib
import copy
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackLocation
from nerfstudio.utils import writer

from f3rm_ext import events
from f3rm_ext.data.image_datamanager import FULL_SIZE, ImageDataManagerConfig
from f3rm_ext.engine.cost import device_time
from f3rm_ext.engine.optimizers import schedule_length
from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.errors import ConfigError, LedgerError, install_excepthook
from f3rm_ext.planning.request import ImageSizes
from f3rm_ext.splat.model import SplatModelConfig
from f3rm_ext.utils.console import messages_to_stderr

PROBE_STEPS, FEW_STEPS = 20, 5
"""Timed steps of each stage, for a plan and for an answer within seconds."""
WARM_UP_STEPS = 5
"""Steps before those that are timed: they compile kernels and fill caches."""


@dataclass(frozen=True)
class Throughput:
    """Speed of training, measured on this machine."""

    steps_per_s: float
    source: str
    """How the speed was measured, as the plan prints it."""

    def duration_s(self, steps: int) -> float:
        """Returns how long a number of steps takes at this speed, seconds."""
        return steps / self.steps_per_s


class _Enough(Exception):
    """Ends training after the last timed step, before anything is saved."""


def read_throughput(config: F3rmTrainerConfig, sizes: ImageSizes) -> Throughput | None:
    """Returns the speed of this method on this machine in the ledger, with as many rays per step; None if it has none.
    A ledger that cannot be read is named in a line. Only whole runs tell that of splats, whose steps get slower.

    Args:
        sizes: sizes of its images; the rays of splats are the pixels of the first one.
    """
    from f3rm_ext.ledger.conditions import hardware
    from f3rm_ext.ledger.ledger import throughput

    rays = getattr(config.pipeline.datamanager, "train_num_rays_per_batch", None)
    if config.machine.num_devices * config.machine.num_machines > 1:
        return None
    device = hardware(config.machine.device_type)
    try:
        record = throughput(
            config.method_name or "",
            hardware=device,
            rays_per_step=int(sizes.pixels[0]) if rays is None else rays,
            whole=rays is None,
        )
    except LedgerError as error:
        print(f"The ledger tells no speed. {error}", file=sys.stderr)
        return None
    if record is None:
        return None
    names = ", ".join(record.entries)
    return Throughput(record.it_per_s.middle, f"the median of {record.samples} trainings in the ledger ({names})")


def probe(config: F3rmTrainerConfig, steps: int = PROBE_STEPS) -> Throughput:
    """Trains a few steps of each stage of a run, times them and discards the result.

    Features that the store lacks are extracted, as by the run itself, and kept. Splats do not grow from stage to stage.

    Raises:
        UserError: the run cannot begin.
    """
    config = copy.deepcopy(config)
    config.vis = "tensorboard"
    config.logging.local_writer.enable = False
    config.steps_per_eval_batch = config.steps_per_eval_image = config.steps_per_eval_all_images = 0
    if config.machine.num_devices * config.machine.num_machines > 1:
        raise ConfigError("A probe runs on one device: leave out --probe, or --machine.num-devices.")
    total = config.max_num_iterations
    moments: list[float] = []

    def after(step: int) -> None:
        moments.append(device_time(torch.device(trainer.device)))
        if len(moments) > WARM_UP_STEPS + steps:
            raise _Enough

    with tempfile.TemporaryDirectory(prefix="f3rm-ext-probe-") as folder, messages_to_stderr():
        config.output_dir, config.experiment_name, config.timestamp = Path(folder), "probe", "now"
        torch.manual_seed(config.machine.seed)
        trainer: Any = config.setup()
        trainer.setup()
        trainer.callbacks.append(TrainingCallback([TrainingCallbackLocation.AFTER_TRAIN_ITERATION], after, 1))
        starts = stage_starts(config, getattr(trainer.pipeline.datamanager, "small_start", FULL_SIZE))
        lengths = [end - begin for begin, end in itertools.pairwise([*starts, total])]
        took_s = 0.0
        try:
            for start, length in zip(starts, lengths, strict=True):
                # A stage that begins within the last steps is timed from a little earlier, so that there are enough.
                trainer._start_step = max(0, min(start, total - steps - WARM_UP_STEPS - 1))
                moments.clear()
                with contextlib.suppress(_Enough):
                    trainer.train()
                durations = [end - begin for begin, end in itertools.pairwise(moments)][-steps:]
                if len(durations) < min(steps, 2):
                    raise ConfigError(f"--max-num-iterations is {total}, too few steps to measure: leave out --probe.")
                took_s += length * statistics.fmean(durations)  # the mean, as some steps do more than others
        finally:
            trainer.pipeline.datamanager.close()
            _close_writers()
    of_each = "" if len(starts) == 1 else f" of each of {len(starts)} stages"
    return Throughput(total / took_s, f"measured here in {len(durations)} steps{of_each}")


def stage_starts(config: F3rmTrainerConfig, small: tuple[int, int] = FULL_SIZE) -> list[int]:
    """Returns the steps at which the cost of a step changes: 0, and the first of each stage and image size.

    Args:
        small: the sizes with which it begins, ``small_start`` of the datamanager.
    """
    model, manager, total = config.pipeline.model, config.pipeline.datamanager, config.max_num_iterations
    starts = {0}
    if isinstance(model, SplatModelConfig) and model.regularization != "none":
        schedule = model.schedule(schedule_length(config))
        surface = schedule.surface(model.regularization_options)
        starts |= {surface.first_loss - schedule.offset, surface.first_surface_loss - schedule.offset}
    if isinstance(manager, ImageDataManagerConfig):
        larger = {(1 + number) * manager.resolution_schedule for number in range(manager.num_downscales)}
        larger |= {(1 + number) * small[1] for number in range(small[0])}
        starts |= {step for step in larger if manager.halvings(step, small) < manager.halvings(step - 1, small)}
    return sorted(start for start in starts if 0 <= start < total)


def _close_writers() -> None:
    """Closes nerfstudio's event writers, which are global: the next run of this process must not write to them."""
    for one in writer.EVENT_WRITERS:
        if isinstance(one, writer.TensorboardWriter):
            one.tb_writer.close()
    writer.EVENT_WRITERS.clear()


def main(words: Sequence[str]) -> None:
    """Prints the steps and the seconds of a training, and tells them as its result.

    Raises:
        UserError: the training cannot begin.
    """
    from f3rm_ext.planning.question import parse

    config = parse(words[0], words[1:])
    events.progress(events.STEPS, 0, 1)
    steps = config.max_num_iterations
    seconds = probe(config, FEW_STEPS).duration_s(steps)
    events.result(steps=steps, seconds=seconds)
    print(f"Steps: {steps}, seconds: {seconds:.1f}", flush=True)


if __name__ == "__main__":
    install_excepthook()
    main(sys.argv[1:])
