"""Options of a training, and what they come to for a data set."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from f3rm_ext.engine.ranks import world_size
from f3rm_ext.errors import ConfigError
from f3rm_ext.moco.pairs import PRESETS, Pair, advised_queue
from f3rm_ext.moco.pictures import Reading
from f3rm_ext.utils.ranges import Count, Positive, Range, check_ranges

Architecture = Literal["resnet18", "resnet50", "vit_small", "vit_base"]
Algorithm = Literal["v2", "v3"]
OptimizerName = Literal["sgd", "lars", "adamw"]
PresetName = Literal["none", "auto", "low-vram", "optimized-16gb", "batch-80", "batch-128"]
_RATES: dict[OptimizerName, tuple[float, float]] = {"sgd": (0.03, 1e-4), "lars": (0.3, 1e-6), "adamw": (1.5e-4, 0.1)}
"""Learning rates for a batch of 256, and weight decays, of the papers."""
FEW_PICTURES = 10_000
"""Below this, v3 is advised. It was measured on 2800."""
_DEFAULTS = {"batch_size": 64, "epochs": 100, "gradient_accumulation_steps": 1, "use_amp": False}


@dataclass(kw_only=True)
class TrainConfig:
    """Options of ``f3rm-ext moco train``."""

    data: Path
    """Folder of pictures; subfolders are read too, their names are not used."""
    output: Path
    """Folder of the run: checkpoints, weights, TensorBoard events, decoded tiles."""
    resume: bool = False
    """Go on with the run in --output."""
    plan: bool = False
    """Print steps, queue and memory, and end. Files are counted, not read; with --tile-px there are more tiles. With
    --memory-gib, --device cuda needs no GPU."""
    probe: bool = False
    """With --plan: time three batches on --device and tell how long the training takes."""
    preset: PresetName = "none"
    """Values for the options below that are not given: those of the VRAM guide, by name. auto: the largest batch that
    fits, with the queue that suits it and the data."""
    memory_gib: Positive | None = None
    """Memory to plan for, GiB, above 0; by default the device's. A training that would take more is refused."""
    algorithm: Algorithm = "v2"
    """v2: a queue of keys. v3: the other images of the batch are the negatives, and there is no queue."""
    architecture: Architecture = "resnet18"
    """Backbone, trained from random initialisation; ViTs have patches of 16 px."""
    batch_size: Annotated[int, Range(2)] | None = None
    """Images per forward pass, 2 or more; 64 without a preset."""
    queue_size: Count | None = None
    """Keys in the queue, 1 or more; by default images − effective batch, at most 65 536."""
    gradient_accumulation_steps: Count | None = None
    """Batches per optimiser step, 1 or more; 1 without a preset. The queue and the key encoder change once per step."""
    epochs: Count | None = None
    """Passes over the pictures, 1 or more; 100 without a preset."""
    use_amp: bool | None = None
    """Compute the forward pass in bfloat16; off without a preset."""
    use_grad_checkpointing: bool = False
    """Recompute the inside of residual blocks in the backward pass: less memory, more time."""
    bands: tuple[int, int, int] | None = None
    """Bands of TIFF files that become red, green and blue, from 1, such as 4 3 2 for Sentinel-2."""
    white: int | None = None
    """Value of 16-bit pictures that becomes white, 1 or more, such as 3000 for Sentinel-2; 65535 by default."""
    tile_px: int | None = None
    """Cut pictures into tiles of this side, px, 32 or more; by default the square in the middle of each is used."""
    image_size: Annotated[int, Range(32, 4096)] = 64
    """Side of the views, px, 32 to 4096."""
    optimizer: OptimizerName | None = None
    """By default adamw with ViTs, else lars with v3 and sgd with v2."""
    learning_rate: Positive | None = None
    """At the start of its cosine, above 0; by default effective batch / 256 times 0.03 (sgd), 0.3 (lars) or 1.5e-4
    (adamw)."""
    warmup_epochs: Annotated[int, Range(0)] | None = None
    """Passes in which the learning rate rises from 0, 0 or more; by default none, or a tenth of all with v3."""
    weight_decay: Annotated[float, Range(0)] | None = None
    """0 or more; by default 1e-4 (sgd), 1e-6 (lars) or 0.1 (adamw)."""
    momentum: Annotated[float, Range(0, 1, below=True)] | None = None
    """Of the key encoder, 0 to below 1; by default 0.999, or 0.99 rising to 1 with v3."""
    temperature: Positive | None = None
    """Of the loss, above 0; by default 0.2, or 1 with v3 and a ResNet."""
    mask_same_image: bool = True
    """Keys of the query's own image in the queue are no negatives."""
    batch_negatives: bool = True
    """With v2, the keys of the other images of the batch are negatives, too; leave it off for the original's loss."""
    color_jitter: bool = True
    """Change colours in the views; leave it off where colours are measurements."""
    seed: int = 0
    """Of weights, order and views."""
    workers: Annotated[int, Range(0, 1024)] = 0
    """Processes that make views, 0 or more; 0 makes them in the training process."""
    save_every: Count = 500
    """Optimiser steps between checkpoints, 1 or more."""
    multiprocessing_distributed: bool = False
    """Start one process per GPU of this machine, as the original MoCo does. torchrun and accelerate do it too."""
    world_size: int = 1
    """Machines, with --multiprocessing-distributed."""
    rank: int = 0
    """This machine, from 0, with --multiprocessing-distributed."""
    dist_url: str = "tcp://127.0.0.1:29400"
    """Address and free port of the first machine, with --multiprocessing-distributed."""
    device: str = "auto"
    """Where to train: auto (CUDA if available), cpu, cuda, cuda:1 and so on."""

    @property
    def reading(self) -> Reading:
        """How pictures become tiles."""
        return Reading(self.bands, self.white, self.tile_px)

    def __post_init__(self) -> None:
        _ = self.reading  # which checks its values
        check_ranges(self)
        if self.architecture.startswith("vit") and self.image_size % 16:
            raise ConfigError(
                f"--image-size is {self.image_size}, but a ViT has patches of 16 px: use {self.image_size // 16 * 16}."
            )
        if self.algorithm == "v3" and self.queue_size is not None:
            raise ConfigError("--queue-size is given, but v3 has no queue: leave it out, or use --algorithm v2.")


@dataclass(frozen=True)
class Plan:
    """Every value of a training, for a number of images."""

    config: TrainConfig
    """With no value left open that a preset or a default fills."""
    pair: Pair
    """Batch and queue; with v3 the queue is the batch."""
    learning_rate: float
    """Of the first step."""
    momentum: float
    """Of the key encoder at the first step."""
    temperature: float
    """Of the loss."""
    optimizer: OptimizerName
    """Which."""
    weight_decay: float
    """Of the optimiser."""
    warmup_steps: int
    """Optimiser steps in which the learning rate rises."""

    @property
    def accumulation(self) -> int:
        """Batches per optimiser step."""
        return self.pair.gradient_accumulation_steps

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        return self.pair.optimizer_steps

    def record(self) -> dict[str, Any]:
        """Returns what a checkpoint has to agree with, or differences to tell: plain values."""
        names = ("algorithm", "architecture", "use_amp", "image_size", "mask_same_image", "batch_negatives")
        given = {name: getattr(self.config, name) for name in (*names, "color_jitter", "seed")}
        own = {"learning_rate": self.learning_rate, "momentum": self.momentum, "temperature": self.temperature}
        own |= {"optimizer": self.optimizer, "weight_decay": self.weight_decay, "warmup_steps": self.warmup_steps}
        numbers = ("batch_size", "queue_size", "gradient_accumulation_steps", "epochs", "images", "processes")
        return {**given, **own, **{name: getattr(self.pair, name) for name in numbers}}

    def announcement(self) -> list[str]:
        """Returns what is printed before the first step."""
        pair, config = self.pair, self.config
        lines = [
            f"MoCo {config.algorithm}, {config.architecture} at {config.image_size} px, {pair.images} images.",
            f"Effective batch: {pair.effective_batch} ({pair.batch_size} × {pair.processes} "
            f"process{'es' if pair.processes > 1 else ''} × {self.accumulation} accumulated). AMP: {config.use_amp}.",
            f"Optimiser steps: {self.steps}, {self.steps * (1 - self.momentum):.1f} time constants of the momentum "
            f"{self.momentum:g}. Pictures seen: {pair.views}, in two views each.",
        ]
        if config.algorithm == "v3":
            lines.append(f"v3 has no queue: the {pair.gathered_batch - 1} other images of a batch are the negatives.")
        else:
            handled = "masked" if config.mask_same_image else "NOT masked"
            lines.append(
                f"Queue holds {pair.batches_in_queue:.1f} batches ({pair.queue_size} keys); "
                f"{pair.same_image_keys:.1f} of them ({100 * pair.same_image_share:.3f} %) are of the query's own "
                f"image, {handled}."
            )
        return lines

    def warnings(self) -> list[str]:
        """Returns what is likely to disappoint."""
        pair, found = self.pair, []
        if self.config.algorithm == "v2" and pair.queue_size > pair.images:
            found.append(
                f"Warning: the queue ({pair.queue_size}) is longer than the data ({pair.images} images): "
                f"{advised_queue(pair.images, pair.effective_batch)} or less is advised."
            )
        if self.config.algorithm == "v2" and self.steps * (1 - self.momentum) < 3:
            found.append(
                f"Warning: {self.steps} steps are few for a momentum of {self.momentum:g}, which averages over "
                f"{1 / (1 - self.momentum):.0f}: use more epochs, a smaller batch or a smaller momentum."
            )
        if self.config.algorithm == "v2" and pair.images < FEW_PICTURES and not self.config.resume:
            found.append(
                f"{pair.images} pictures are few: on 2800, v3 learned more than v2 in the same time, with --algorithm "
                "v3 --optimizer sgd --temperature 0.2 --learning-rate 0.06 --momentum 0.99 --batch-size "
                f"{min(128, pair.images)}."
            )
        return found


def make_plan(config: TrainConfig, images: int) -> Plan:
    """Fills in what presets and data decide.

    Args:
        config: The options.
        images: Readable pictures.

    Raises:
        ConfigError: The data is smaller than a batch or too small for one optimiser step.
    """
    preset = PRESETS.get(config.preset)
    filled = {
        name: getattr(preset, name) if preset else default
        for name, default in _DEFAULTS.items()
        if getattr(config, name) is None
    }
    config = replace(config, **filled)
    batch, accumulation, epochs = config.batch_size, config.gradient_accumulation_steps, config.epochs
    assert batch is not None and accumulation is not None and epochs is not None
    processes = world_size()
    if images < batch * processes:
        each = f" of {processes} processes" if processes > 1 else ""
        raise ConfigError(
            f"There are {images} pictures, fewer than a batch of {batch * processes}{each}: use --batch-size "
            f"{images // processes}."
        )
    v3, vit = config.algorithm == "v3", config.architecture.startswith("vit")
    queue = config.queue_size or (
        preset.queue_size if preset else advised_queue(images, batch * processes * accumulation)
    )
    momentum = config.momentum if config.momentum is not None else (0.99 if v3 else 0.999)
    pair = Pair(batch, batch * processes if v3 else queue, images, processes, accumulation, epochs, momentum)
    if pair.optimizer_steps == 0:
        raise ConfigError(
            f"{epochs} passes over {images} pictures are not one step of {accumulation} batches of {batch}: "
            "use more --epochs or a smaller --gradient-accumulation-steps."
        )
    optimizer = config.optimizer or ("adamw" if vit else "lars" if v3 else "sgd")
    base_rate, decay = _RATES[optimizer]
    warmup = config.warmup_epochs if config.warmup_epochs is not None else (epochs // 10 if v3 else 0)
    return Plan(
        config,
        pair,
        learning_rate=config.learning_rate or base_rate * pair.effective_batch / 256,
        momentum=momentum,
        temperature=config.temperature or (1.0 if v3 and not vit else 0.2),
        optimizer=optimizer,
        weight_decay=decay if config.weight_decay is None else config.weight_decay,
        warmup_steps=warmup * pair.optimizer_steps // epochs,
    )


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns what has changed between a checkpoint's plan and this one, as ``name old → new``."""
    return [
        f"{name.replace('_', ' ')} {json.dumps(before.get(name))} → {json.dumps(value)}"
        for name, value in now.items()
        if before.get(name) != value
    ]
