"""The memory of a pre-training: a + b·batch, measured on tensors without values, and the largest batch that fits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.moco.options import Plan, TrainConfig, make_plan
from f3rm_ext.moco.training import Training
from f3rm_ext.planning.allowances import CONTEXT_BYTES, CPU_FRAGMENTATION, FRAGMENTATION, PROCESS_BYTES
from f3rm_ext.planning.devices import GIB, this_device
from f3rm_ext.planning.request import Device
from f3rm_ext.planning.steps import tracing

BATCHES = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 4, 2)
"""What `auto` chooses from. Those above 256 would leave few steps on small data."""
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
    peak_bytes: int
    """What a device holds at the peak of a step, with an allowance."""
    limit_bytes: int
    """Memory of the device."""
    line: MemoryLine
    """The same by batch, without allowances."""
    fits: str
    """A pair of batch and queue that fits, in words."""

    def sentences(self) -> list[str]:
        """Returns what is printed before the first step."""
        share = 100 * self.peak_bytes / self.limit_bytes
        left = (self.limit_bytes - self.peak_bytes) / GIB
        return [
            f"Memory planned: {self.peak_bytes / GIB:.2f} of {self.limit_bytes / GIB:.1f} GiB ({share:.0f} %), "
            f"{left:.2f} GiB left; tensors take {self.line}."
        ]

    def after_first_pass(self, live_bytes: int) -> list[str]:
        """Returns what the memory that was really taken says about the plan."""
        lines = [f"Memory of the first pass: {live_bytes / GIB:.2f} GiB, planned {self.peak_bytes / GIB:.2f} GiB."]
        if live_bytes > self.limit_bytes:
            lines.append(f"Warning: that is above {self.limit_bytes / GIB:.1f} GiB: use {self.fits}.")
        return lines


def step_bytes(plan: Plan) -> int:
    """Returns the bytes of tensors at the peak of a training step, of one process and with a full queue.

    The second of two steps of the real training runs on tensors without values: the optimiser has its moments then.
    """
    few = min(2, plan.accumulation)  # from the second batch on, gradients are there beside activations
    plan = replace(plan, pair=replace(plan.pair, gradient_accumulation_steps=few))
    batch, size = plan.pair.batch_size, plan.config.image_size
    with tracing("cpu") as tracker:
        training = Training(plan, "", torch.device("cpu"))
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


def memory_line(config: TrainConfig, images: int, batches: Sequence[int] = (16, 48)) -> MemoryLine:
    """Returns the line through the memory of two batches.

    Args:
        config: The options.
        images: Pictures; the queue's length may depend on them.
        batches: The two batches.
    """
    small, large = batches
    queue = make_plan(_with_batch(config, 2), max(2, images)).pair.queue_size if config.algorithm == "v2" else None
    one, two = (
        step_bytes(make_plan(replace(_with_batch(config, batch), queue_size=queue), max(images, large)))
        for batch in batches
    )
    image = (two - one) / (large - small)
    return MemoryLine(one - image * small, image)


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
    limit = _limit(device, limit_gib)
    line = memory_line(config, images)
    room = line.largest_batch(_without_allowance(limit))
    batch, accumulation = config.batch_size, config.gradient_accumulation_steps or 1
    if config.preset == "auto" and batch is None:
        allowed = min(room, max(2, images // (_LEAST_STEPS * accumulation)))
        batch = next((number for number in BATCHES if number <= allowed), 2)
        config = _with_batch(config, batch)
    plan = make_plan(config, images)
    peak = _with_allowance(step_bytes(plan), limit.type)
    smaller = next((number for number in BATCHES if number <= room and number < plan.pair.batch_size), None)
    words = _advice(config, images, smaller)
    if peak > limit.memory_bytes:
        raise ConfigError(
            f"A batch of {plan.pair.batch_size} needs {peak / GIB:.2f} GiB, and there are "
            f"{limit.memory_bytes / GIB:.1f} ({line}): use {words}."
        )
    return MemoryPlan(config, peak, limit.memory_bytes, line, words)


def _with_batch(config: TrainConfig, batch: int) -> TrainConfig:
    return replace(config, batch_size=batch)


def _advice(config: TrainConfig, images: int, batch: int | None) -> str:
    if batch is None:
        return "a smaller --image-size, or --use-grad-checkpointing"
    if config.algorithm == "v3":
        return f"--batch-size {batch}"
    queue = make_plan(replace(config, batch_size=batch, preset="none"), max(images, batch)).pair.queue_size
    return f"--batch-size {batch} --queue-size {queue}"


def _limit(device: torch.device, limit_gib: float | None) -> Device:
    if limit_gib is not None:
        return Device(device.type, int(limit_gib * GIB))
    return this_device(device.type)


def _with_allowance(tensors: int, device_type: str) -> int:
    cuda = device_type == "cuda"
    gaps = FRAGMENTATION if cuda else CPU_FRAGMENTATION
    return round(tensors * (1 + gaps)) + (CONTEXT_BYTES if cuda else PROCESS_BYTES)


def _without_allowance(device: Device) -> float:
    """Returns the bytes of tensors that fill a device: the inverse of :func:`_with_allowance`."""
    fixed = _with_allowance(0, device.type)
    return (device.memory_bytes - fixed) / (1 + (FRAGMENTATION if device.type == "cuda" else CPU_FRAGMENTATION))
