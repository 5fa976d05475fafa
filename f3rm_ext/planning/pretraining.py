"""The memory of a pre-training: a + b·batch, measured on tensors without values, and the largest batch that fits."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from f3rm_ext.engine.ranks import world_size
from f3rm_ext.errors import ConfigError
from f3rm_ext.moco.options import Architecture, Plan, TrainConfig, make_plan
from f3rm_ext.moco.pairs import Pair, advised_queue
from f3rm_ext.moco.queue import KeyQueue
from f3rm_ext.moco.training import DIM, Training
from f3rm_ext.planning.allowances import CONTEXT_BYTES, CPU_FRAGMENTATION, FRAGMENTATION, PROCESS_BYTES
from f3rm_ext.planning.convolutions import BlockedConvolutions
from f3rm_ext.planning.devices import GIB, this_device
from f3rm_ext.planning.request import Device
from f3rm_ext.planning.shapes import shapes_only
from f3rm_ext.planning.tracker import AllocationTracker

BATCHES = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 4, 2)
"""What `auto` chooses from. Those above 256 would leave few steps on small data."""
_MEASURED = (64, 128)
_LEAST_STEPS = 20
"""Steps per pass that `auto` keeps, so that small data is not spent in few large steps."""


@dataclass(frozen=True)
class MemoryLine:
    """Memory of a training step as a line over the batch."""

    fixed_bytes: float
    """What a step takes whatever its batch: weights, gradients, optimiser, queue."""
    image_bytes: float
    """What each image of the batch adds."""

    def largest_batch(self, limit_bytes: float) -> int:
        """Returns the most images that fit; 0 if none do."""
        return max(0, int((limit_bytes - self.fixed_bytes) / self.image_bytes))

    def __str__(self) -> str:
        return f"{self.fixed_bytes / GIB:.2f} GiB + {self.image_bytes / 2**20:.1f} MiB per image"


@dataclass(frozen=True)
class MemoryPlan:
    """A training with its memory."""

    config: TrainConfig
    """Its options; of the preset auto, with the batch that was chosen."""
    plan: Plan
    """What they come to."""
    peak_bytes: int
    """What a device holds at the peak of a step, with an allowance."""
    limit_bytes: int
    """Memory of the device."""
    line: MemoryLine | None
    """Tensors by batch, where the preset is auto."""
    context_bytes: int = 0
    """What the device holds beside what a training can measure of itself."""

    def sentences(self) -> list[str]:
        """Returns what is printed before the first step."""
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

    def after_first_pass(self, live_bytes: int) -> list[str]:
        """Returns what the memory that was really taken says about the plan."""
        lines = [f"Memory of the first pass: {live_bytes / GIB:.2f} GiB, planned {self.peak_bytes / GIB:.2f} GiB."]
        held = live_bytes + self.context_bytes
        if held > self.limit_bytes:
            room = int(self.plan.pair.batch_size * self.limit_bytes / held)
            lines.append(f"Warning: that is above {self.limit_bytes / GIB:.1f} GiB: use {smaller(self.plan, room)}.")
        return lines


def step_bytes(plan: Plan, device_type: str = "cpu") -> int:
    """Returns the bytes of tensors at the peak of a training step, of one process and with a full queue.

    The second of two steps of the real training runs on tensors without values: the optimiser has its moments then.

    Args:
        plan: The training.
        device_type: Of its device; convolutions on CPUs take more.
    """
    few = min(2, plan.accumulation)  # from the second batch on, gradients are there beside activations
    plan = replace(plan, pair=replace(plan.pair, gradient_accumulation_steps=few))
    batch, size = plan.pair.batch_size, plan.config.image_size
    blocked = BlockedConvolutions() if device_type == "cpu" else nullcontext()
    with shapes_only(), AllocationTracker() as tracker, blocked:
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
        config: The options.
        images: Pictures; the queue's length may depend on them.
        device_type: Of its device.
    """
    small, large = _MEASURED
    images = max(images, 2 * large * world_size() * (config.gradient_accumulation_steps or 1))
    queue = None if config.algorithm == "v3" else make_plan(replace(config, batch_size=small), images).pair.queue_size
    one, two = (
        step_bytes(make_plan(replace(config, batch_size=batch, queue_size=queue), images), device_type)
        for batch in _MEASURED
    )
    image = (two - one) / (large - small)
    return MemoryLine(one - image * small, image)


def memory_of_pairs(pairs: Sequence[Pair], architecture: Architecture, image_size: int, device_type: str) -> list[int]:
    """Returns what a device holds with pairs of batch and queue, bytes, as :func:`plan_memory` does; with AMP.

    Args:
        pairs: Of algorithm v2.
        architecture: The network.
        image_size: Side of the views, px.
        device_type: Of the device.

    Raises:
        ConfigError: The size does not suit the network.
    """
    config = TrainConfig(
        data=Path(),
        output=Path(),
        architecture=architecture,
        image_size=image_size,
        queue_size=1,
        gradient_accumulation_steps=2,
        use_amp=True,
    )
    line, key = memory_line(config, 1, device_type), KeyQueue(1, DIM["v2"])
    key_bytes = sum(values.numel() * values.element_size() for values in key.buffers())
    tensors = (line.fixed_bytes + pair.batch_size * line.image_bytes + pair.queue_size * key_bytes for pair in pairs)
    return [_with_allowance(round(each), device_type) for each in tensors]


def plan_memory(config: TrainConfig, images: int, device: torch.device, limit_gib: float | None = None) -> MemoryPlan:
    """Plans a training, and chooses batch and queue where its preset is `auto`.

    The batch of `auto` is the largest of :data:`BATCHES` that fits and leaves 20 steps per pass; its queue is the
    longest that is advised, images − effective batch.

    Args:
        config: The options.
        images: Readable pictures.
        device: Where it will be trained.
        limit_gib: Memory to plan for; by default the device's.

    Raises:
        ConfigError: It does not fit.
    """
    limit = this_device(device.type) if limit_gib is None else Device(device.type, int(limit_gib * GIB))
    line = None
    if config.preset == "auto" and config.batch_size is None:
        line = memory_line(config, images, limit.type)
        per_pass = _LEAST_STEPS * (config.gradient_accumulation_steps or 1) * world_size()
        allowed = min(_room(line, limit), max(2, images // per_pass))
        config = replace(config, batch_size=next((number for number in BATCHES if number <= allowed), 2))
    plan = make_plan(config, images)
    peak = _with_allowance(step_bytes(plan, limit.type), limit.type)
    if peak > limit.memory_bytes:
        line = line or memory_line(config, images, limit.type)
        raise ConfigError(
            f"A batch of {plan.pair.batch_size} needs {peak / GIB:.2f} GiB, and there are "
            f"{limit.memory_bytes / GIB:.2f} (tensors take {line}): use {smaller(plan, _room(line, limit))}."
        )
    context = CONTEXT_BYTES if limit.type == "cuda" else 0
    return MemoryPlan(config, plan, peak, limit.memory_bytes, line, context)


def smaller(plan: Plan, room: int) -> str:
    """Returns options that fit, in words: batch and queue.

    Args:
        plan: That does not fit.
        room: Images per batch that do.
    """
    batch = next((number for number in BATCHES if number <= min(room, plan.pair.batch_size - 1)), None)
    if batch is None:
        return "a smaller --image-size, or --use-grad-checkpointing"
    if plan.config.algorithm == "v3":
        return f"--batch-size {batch}"
    queue = advised_queue(plan.pair.images, batch * plan.pair.processes * plan.accumulation)
    return f"--batch-size {batch} --queue-size {min(queue, plan.pair.queue_size)}"


def _room(line: MemoryLine, device: Device) -> int:
    """Returns the largest batch for a device."""
    fixed = _with_allowance(0, device.type)
    gaps = FRAGMENTATION if device.type == "cuda" else CPU_FRAGMENTATION
    return line.largest_batch((device.memory_bytes - fixed) / (1 + gaps))


def _with_allowance(tensors: int, device_type: str) -> int:
    cuda = device_type == "cuda"
    gaps = FRAGMENTATION if cuda else CPU_FRAGMENTATION
    return round(tensors * (1 + gaps)) + (CONTEXT_BYTES if cuda else PROCESS_BYTES)
