"""Options of a training, and the values they resolve to for a data set."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from f3rm_ext.errors import ConfigError
from f3rm_ext.moco.pairs import PRESETS, Pair, advised_queue
from f3rm_ext.moco.pictures import PictureOptions
from f3rm_ext.utils.ranges import Count, Positive, Range, check_ranges

Architecture = Literal["resnet18", "resnet50", "vit_small", "vit_base"]
Algorithm = Literal["v2", "v3"]
OptimizerName = Literal["sgd", "lars", "adamw"]
PresetName = Literal["none", "auto", "low-vram", "optimized-16gb", "batch-80", "batch-128"]
_RATES: dict[OptimizerName, tuple[float, float]] = {"sgd": (0.03, 1e-4), "lars": (0.3, 1e-6), "adamw": (1.5e-4, 0.1)}
"""Learning rates for a batch of 256, and weight decays, of the papers."""
FEW_PICTURES = 10_000
"""Number of pictures below which v3 is advised; the advice was measured on 2800."""
_DEFAULTS = {"batch_size": 64, "epochs": 100, "gradient_accumulation_steps": 1, "use_amp": False}


@dataclass(kw_only=True)
class TrainConfig:
    """Options of ``f3rm-ext moco train``."""

    data: Path
    """Folder of pictures, searched with its subfolders. The names of subfolders are ignored."""
    output: Annotated[Path, tyro.conf.arg(aliases=["--out"])]
    """Folder of the run: checkpoints, weights, TensorBoard events and decoded tiles."""
    resume: bool = False
    """Continue the run in --output."""
    plan: bool = False
    """Print the number of steps, the queue and the memory, then exit. Files are counted but not read, so --tile-px
    makes more tiles than are counted. With --memory-gib, --device cuda needs no GPU."""
    probe: bool = False
    """With --plan, time three batches on --device and estimate the duration of the training."""
    preset: PresetName = "none"
    """Preset for the options below that are not given. The named presets are those of the VRAM guide; auto takes the
    largest batch that fits, with a queue that suits the batch and the data."""
    memory_gib: Positive | None = None
    """Memory to plan for, in GiB, above 0; by default that of the device. A training that needs more is refused."""
    algorithm: Algorithm = "v2"
    """Version of MoCo: v2 takes negatives from a queue of keys, v3 takes the other images of the batch."""
    architecture: Architecture = "resnet18"
    """Backbone, trained from random initialisation. ViTs have patches of 16 px."""
    batch_size: Annotated[int, Range(2)] | None = None
    """Images per forward pass, at least 2; 64 without a preset."""
    queue_size: Count | None = None
    """Keys in the queue, at least 1; by default images − effective batch, at most 65,536."""
    gradient_accumulation_steps: Count | None = None
    """Batches per optimiser step, at least 1; 1 without a preset. The queue and the key encoder are updated once per
    step."""
    epochs: Count | None = None
    """Passes over the pictures, at least 1; 100 without a preset."""
    use_amp: bool | None = None
    """Compute the forward pass in bfloat16; off without a preset."""
    use_grad_checkpointing: bool = False
    """Recompute residual or transformer blocks in the backward pass, which saves memory and takes more time."""
    reading: Annotated[PictureOptions, tyro.conf.arg(name="")] = field(default_factory=PictureOptions)
    """Bands, white level and size of the tiles that pictures are cut into."""
    image_size: Annotated[int, Range(32, 4096)] = 64
    """Width and height of the views, in px, 32 to 4096."""
    optimizer: OptimizerName | None = None
    """Optimiser; by default adamw with ViTs, otherwise lars with v3 and sgd with v2."""
    learning_rate: Positive | None = None
    """Peak learning rate, above 0; by default effective batch / 256 times 0.03 (sgd), 0.3 (lars) or 1.5e-4 (adamw)."""
    warmup_epochs: Annotated[int, Range(0)] | None = None
    """Passes during which the learning rate rises from 0, at least 0; by default 0, or a tenth of all with v3."""
    weight_decay: Annotated[float, Range(0)] | None = None
    """Weight decay, at least 0; by default 1e-4 (sgd), 1e-6 (lars) or 0.1 (adamw)."""
    momentum: Annotated[float, Range(0, 1, below=True)] | None = None
    """Momentum of the key encoder, 0 to below 1; by default 0.999, or 0.99 rising to 1 with v3."""
    temperature: Positive | None = None
    """Temperature of the contrastive loss, above 0; by default 0.2, or 1 with v3 and a ResNet."""
    mask_same_image: bool = True
    """Exclude queue keys that come from the query's own image."""
    batch_negatives: bool = True
    """With v2, also use the keys of the other images of the batch as negatives. Turn it off for the original loss."""
    color_jitter: bool = True
    """Jitter colours in the views. Turn it off where colours are measurements."""
    seed: int = 0
    """Random seed of weights, order and views."""
    workers: Annotated[int, Range(0, 1024)] = 0
    """Processes that prepare views, 0 to 1024; 0 prepares them in the training process."""
    save_every: Count = 500
    """Optimiser steps between checkpoints, at least 1."""
    multiprocessing_distributed: bool = False
    """Start one process per GPU of this machine, as the original MoCo does. torchrun and accelerate work, too."""
    world_size: int = 1
    """Number of machines, at least 1, for --multiprocessing-distributed."""
    rank: int = 0
    """Index of this machine, counted from 0, for --multiprocessing-distributed."""
    dist_url: str = "tcp://127.0.0.1:29400"
    """Address and free port of the first machine, for --multiprocessing-distributed."""
    device: str = "auto"
    """Device to train on: auto (CUDA if available), cpu, cuda, cuda:1 and so on."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.architecture.startswith("vit") and self.image_size % 16:
            raise ConfigError(
                f"--image-size is {self.image_size}, but a ViT has patches of 16 px: use {self.image_size // 16 * 16}."
            )
        if self.algorithm == "v3" and self.queue_size is not None:
            raise ConfigError("--queue-size is given, but v3 has no queue: leave it out, or use --algorithm v2.")


@dataclass(frozen=True)
class Plan:
    """All values of a training, resolved for a number of images."""

    config: TrainConfig
    """Options, with presets and defaults filled in."""
    pair: Pair
    """Batch and queue; with v3 the queue is the batch."""
    learning_rate: float
    momentum: float
    """Momentum of the key encoder at the first step, 0 to below 1."""
    temperature: float
    optimizer: OptimizerName
    weight_decay: float
    warmup_steps: int
    """Optimiser steps during which the learning rate rises."""

    @property
    def accumulation(self) -> int:
        """Batches per optimiser step."""
        return self.pair.gradient_accumulation_steps

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        return self.pair.optimizer_steps

    def record(self) -> dict[str, Any]:
        names = ("algorithm", "architecture", "use_amp", "image_size", "mask_same_image", "batch_negatives")
        options = {name: getattr(self.config, name) for name in (*names, "color_jitter", "seed")}
        own = {"learning_rate": self.learning_rate, "momentum": self.momentum, "temperature": self.temperature}
        own |= {"optimizer": self.optimizer, "weight_decay": self.weight_decay, "warmup_steps": self.warmup_steps}
        numbers = ("batch_size", "queue_size", "gradient_accumulation_steps", "epochs", "images", "processes")
        return {**options, **own, **{name: getattr(self.pair, name) for name in numbers}}

    def announcement(self) -> list[str]:
        """Returns the lines to print before the first step."""
        pair, config = self.pair, self.config
        lines = [
            f"MoCo {config.algorithm}, {config.architecture} at {config.image_size} px, {pair.images} images.",
            f"Effective batch: {pair.effective_batch} ({pair.batch_size} × {pair.processes} "
            f"process{'es' if pair.processes > 1 else ''} × {self.accumulation} accumulated). AMP: {config.use_amp}.",
            f"Optimiser steps: {self.steps}, {self.steps * (1 - self.momentum):.1f} time constants of the momentum "
            f"{self.momentum:g}. Pictures: {pair.views}, two views each.",
        ]
        if config.algorithm == "v3":
            lines.append(f"v3 has no queue: the {pair.gathered_batch - 1} other images of a batch are the negatives.")
        else:
            handled = "masked" if config.mask_same_image else "NOT masked"
            lines.append(
                f"Queue holds {pair.batches_in_queue:.1f} batches ({pair.queue_size} keys); "
                f"{pair.same_image_keys:.1f} of them ({100 * pair.same_image_share:.3f} %) come from the query's own "
                f"image and are {handled}."
            )
        return lines

    def warnings(self) -> list[str]:
        """Returns warnings about values that are likely to give poor results; none with v3."""
        pair, warnings = self.pair, []
        if self.config.algorithm == "v3":
            return warnings
        if pair.queue_size > pair.images:
            warnings.append(
                f"Warning: the queue ({pair.queue_size}) is longer than the data ({pair.images} images): use at most "
                f"{advised_queue(pair.images, pair.effective_batch)}."
            )
        if self.steps * (1 - self.momentum) < 3:
            warnings.append(
                f"Warning: {self.steps} steps are few for a momentum of {self.momentum:g}, which averages over "
                f"{1 / (1 - self.momentum):.0f}: use more epochs, a smaller batch or a smaller momentum."
            )
        if pair.images < FEW_PICTURES and not self.config.resume:
            warnings.append(
                f"{pair.images} pictures are few: on 2800, v3 learned more than v2 in the same time, with --algorithm "
                "v3 --optimizer sgd --temperature 0.2 --learning-rate 0.06 --momentum 0.99 --batch-size "
                f"{min(128, pair.images)}."
            )
        return warnings


def make_plan(config: TrainConfig, images: int) -> Plan:
    """Resolves the options that depend on the preset and on the number of readable pictures.

    Raises:
        ConfigError: The data is smaller than a batch or too small for one optimiser step.
    """
    from f3rm_ext.engine.ranks import world_size

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
        each, largest = f" of {processes} processes" if processes > 1 else "", images // processes
        raise ConfigError(
            f"There are {images} pictures, fewer than a batch of {batch * processes}{each}: "
            + (f"use --batch-size {largest}." if largest > 1 else f"give {2 * processes} or more.")
        )
    v3, vit = config.algorithm == "v3", config.architecture.startswith("vit")
    queue = config.queue_size or (
        preset.queue_size if preset else advised_queue(images, batch * processes * accumulation)
    )
    momentum = config.momentum if config.momentum is not None else (0.99 if v3 else 0.999)
    pair = Pair(batch, batch * processes if v3 else queue, images, processes, accumulation, epochs, momentum)
    if pair.optimizer_steps == 0:
        raise ConfigError(
            f"{epochs} passes over {images} pictures are not enough for one step of {accumulation} batches of {batch}: "
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
    """Returns the values that changed between a checkpoint's plan and this one, as ``name old → new``."""
    return [
        f"{name.replace('_', ' ')} {json.dumps(before.get(name))} → {json.dumps(value)}"
        for name, value in now.items()
        if before.get(name) != value
    ]
