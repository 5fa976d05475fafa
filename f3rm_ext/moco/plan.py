"""Plans a pre-training: its memory, fixed + image·batch, the largest batch that fits, and the time of a step."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from f3rm_ext.engine.cost import device_time
from f3rm_ext.engine.ranks import world_size
from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.devices import GIB, Device, this_device
from f3rm_ext.memory.estimate import CONTEXT_BYTES, add_overhead, tensor_budget
from f3rm_ext.memory.options import MemoryOption, QualityImpact
from f3rm_ext.memory.trace import tracing
from f3rm_ext.moco.options import Architecture, Plan, TrainConfig, make_plan
from f3rm_ext.moco.pairs import Pair, advised_queue
from f3rm_ext.moco.tiles import Tiles
from f3rm_ext.moco.training import Training
from f3rm_ext.moco.views import load_batches, make_views

BATCHES = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 4, 2)
"""Batches that `auto` chooses from. Those above 256 would leave few steps on small data."""
_TRACED, _TRACED_QUEUES = (64, 128), (4096, 65_536)
_LEAST_STEPS = 20
"""Least steps per pass with `auto`, so that small data is not used up in few large steps."""
_TIMED = 2
"""Batches over which the time of a step is measured, after a first one."""


@dataclass(frozen=True)
class MemoryLine:
    """Memory of a training step as a line over the batch."""

    fixed_bytes: float
    """Memory that does not depend on the batch: weights, gradients, optimiser, queue."""
    image_bytes: float

    def largest_batch(self, limit_bytes: float) -> int:
        """Returns the most images that fit; 0 if none do."""
        return max(0, int((limit_bytes - self.fixed_bytes) / self.image_bytes))

    def __str__(self) -> str:
        return f"{self.fixed_bytes / GIB:.2f} GiB + {self.image_bytes / 2**20:.1f} MiB per image"


@dataclass(frozen=True)
class MemoryPlan:
    """A training with its memory."""

    config: TrainConfig
    """Its options; with the preset auto they include the chosen batch."""
    plan: Plan
    """The values that they resolve to."""
    peak_bytes: int
    """Memory of a device at the peak of a step, with an allowance."""
    limit_bytes: int
    line: MemoryLine | None
    """Memory of tensors by batch, where the preset is auto."""
    context_bytes: int = 0
    """Memory of the device that a training cannot measure itself."""

    def sentences(self) -> list[str]:
        share = 100 * self.peak_bytes / self.limit_bytes
        left = (self.limit_bytes - self.peak_bytes) / GIB
        lines = [
            f"Memory planned: {self.peak_bytes / GIB:.2f} of {self.limit_bytes / GIB:.1f} GiB ({share:.0f} %), "
            f"{left:.2f} GiB left."
        ]
        if self.line is not None:
            queue = "" if self.config.algorithm == "v3" else f" and queue {self.plan.pair.queue_size}"
            lines.append(f"Tensors take {self.line}: auto takes batch {self.plan.pair.batch_size}{queue}.")
        return lines

    def compare_first_pass(self, live_bytes: int) -> list[str]:
        """Returns sentences that compare the plan with the memory that the first pass took."""
        lines = [f"Memory of the first pass: {live_bytes / GIB:.2f} GiB, planned {self.peak_bytes / GIB:.2f} GiB."]
        total = live_bytes + self.context_bytes
        if total > self.limit_bytes:
            room = int(self.plan.pair.batch_size * self.limit_bytes / total)
            lines.append(
                f"Warning: that is above {self.limit_bytes / GIB:.1f} GiB: use {smaller_options(self.plan, room)}."
            )
        return lines


def step_bytes(plan: Plan, device_type: str = "cpu") -> int:
    """Returns the bytes of tensors at the peak of a training step of one process, with a full queue.

    Two steps of the real training run on tensors without values; in the second one the optimiser has its moments.

    Args:
        device_type: Type of its device; convolutions on CPUs take more.
    """
    few = min(2, plan.accumulation)  # from the second batch on, gradients are there beside activations
    plan = replace(plan, pair=replace(plan.pair, gradient_accumulation_steps=few))
    batch, size = plan.pair.batch_size, plan.config.image_size
    with tracing(device_type) as tracker:
        training = Training(plan, "", torch.device("cpu"), alone=True)
        if training.queue is not None:
            training.queue._filled = training.queue.size
        tracker.label([*training.query.parameters(), *training.key.parameters()], "parameters")

        def views() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            one, two = (torch.empty(batch, 3, size, size) for _ in range(2))
            return one, two, torch.zeros(batch, dtype=torch.int64)

        for _ in range(2):
            tracker.reset_peak()
            training.train_step(iter([views() for _ in range(plan.accumulation)]))
        return sum(tracker.peak.values())


def memory_line(config: TrainConfig, images: int, device_type: str = "cpu") -> MemoryLine:
    """Returns the line through the memory of two batches.

    Args:
        images: Number of pictures; the queue's length may depend on it.
    """
    small, large = _TRACED
    # Enough that neither of the two batches is refused as larger than the data.
    images = max(images, 2 * large * world_size() * (config.gradient_accumulation_steps or 1))
    queue = None if config.algorithm == "v3" else make_plan(replace(config, batch_size=small), images).pair.queue_size
    one, two = (
        step_bytes(make_plan(replace(config, batch_size=batch, queue_size=queue), images), device_type)
        for batch in _TRACED
    )
    image = (two - one) / (large - small)
    return MemoryLine(one - image * small, image)


def memory_of_pairs(pairs: Sequence[Pair], architecture: Architecture, image_size: int, device_type: str) -> list[int]:
    """Returns the memory of a device for pairs of batch and queue, bytes, as :func:`plan_memory` does; with AMP."""
    config = TrainConfig(
        data=Path(),
        output=Path(),
        architecture=architecture,
        image_size=image_size,
        gradient_accumulation_steps=2,
        use_amp=True,
    )
    # Logits grow with batch times queue.
    short, long = _TRACED_QUEUES
    lines = [memory_line(replace(config, queue_size=size), 2 * size, device_type) for size in _TRACED_QUEUES]
    held = []
    for pair in pairs:
        low, high = (line.fixed_bytes + pair.batch_size * line.image_bytes for line in lines)
        tensors = low + (high - low) * (pair.queue_size - short) / (long - short)
        held.append(_add_allowance(round(tensors), device_type))
    return held


def plan_memory(config: TrainConfig, images: int, device: torch.device, limit_gib: float | None = None) -> MemoryPlan:
    """Plans the memory of a training, and chooses batch and queue where its preset is `auto`.

    The batch of `auto` is the largest of :data:`BATCHES` that fits and leaves 20 steps per pass; its queue is the
    longest that is advised, images − effective batch.

    Raises:
        ConfigError: It does not fit in the device, or in `limit_gib`.
    """
    limit = this_device(device.type) if limit_gib is None else Device(device.type, int(limit_gib * GIB))
    line = None
    if config.preset == "auto" and config.batch_size is None:
        line = memory_line(config, images, limit.type)
        per_pass = _LEAST_STEPS * (config.gradient_accumulation_steps or 1) * world_size()
        allowed = min(_room(line, limit), max(2, images // per_pass))
        config = replace(config, batch_size=next((number for number in BATCHES if number <= allowed), 2))
    plan = make_plan(config, images)
    peak = _add_allowance(step_bytes(plan, limit.type), limit.type)
    if peak > limit.memory_bytes:
        line = line or memory_line(config, images, limit.type)
        raise ConfigError(
            f"A batch of {plan.pair.batch_size} needs {peak / GIB:.2f} GiB, and there are "
            f"{limit.memory_bytes / GIB:.2f} (tensors take {line}): use {smaller_options(plan, _room(line, limit))}."
        )
    context = CONTEXT_BYTES if limit.type == "cuda" else 0
    return MemoryPlan(config, plan, peak, limit.memory_bytes, line, context)


def smaller_options(plan: Plan, room: int) -> str:
    """Returns options that fit, as typed: batch and queue."""
    batch = next((number for number in BATCHES if number <= min(room, plan.pair.batch_size - 1)), None)
    if batch is None:
        return "a smaller --image-size, or --use-grad-checkpointing"
    if plan.config.algorithm == "v3":
        return f"--batch-size {batch}"
    queue = advised_queue(plan.pair.images, batch * plan.pair.processes * plan.accumulation)
    return f"--batch-size {batch} --queue-size {min(queue, plan.pair.queue_size)}"


def memory_options(plan: Plan) -> list[MemoryOption]:
    """Returns the options that can still be changed to lower the memory of a step."""
    config, batch = plan.config, plan.pair.batch_size
    options = [MemoryOption(QualityImpact.PRECISION, "use-amp", False, True)] * (not config.use_amp)
    if not config.use_grad_checkpointing:
        options.append(MemoryOption(QualityImpact.NONE, "use-grad-checkpointing", False, True))
    if batch > 3:
        options.append(MemoryOption(QualityImpact.NOISE, "batch-size", batch, batch // 2))
    return options


def step_seconds(plan: Plan, device: torch.device) -> float:
    """Returns the seconds of an optimiser step with the views of its batches, measured on pictures of noise.

    Raises:
        ConfigError: There are several processes.
    """
    if world_size() > 1:
        raise ConfigError("A probe runs in one process: leave out --probe, or start one process.")
    config, batch = plan.config, plan.pair.batch_size
    one = replace(plan, pair=replace(plan.pair, gradient_accumulation_steps=1))
    with tempfile.TemporaryDirectory(prefix="f3rm-ext-probe-") as folder:
        side = 3 * config.image_size // 2  # decoded pictures have between one and two sides of the views
        noise = np.random.default_rng(0).integers(0, 256, (batch, side, side, 3), np.uint8)
        tiles = Tiles(Path(folder) / "tiles.npy", tuple(map(str, range(batch))), {}, "")
        np.save(tiles.array, noise)
        training = Training(one, "", device, alone=True)
        views = make_views(config.image_size, config.color_jitter, symmetric=config.algorithm == "v2")
        batches = load_batches(tiles, views, device, batch_size=batch, seed=0, first=0, workers=config.workers)
        training.train_step(batches)
        began = device_time(device)
        for _ in range(_TIMED):
            training.train_step(batches)
        return (device_time(device) - began) / _TIMED * plan.accumulation


def _room(line: MemoryLine, device: Device) -> int:
    return line.largest_batch(tensor_budget(device.memory_bytes, device.type))


def _add_allowance(tensors: int, device_type: str) -> int:
    return sum(add_overhead({"workspace": tensors}, device_type).values())
