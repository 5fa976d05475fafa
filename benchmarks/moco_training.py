"""Step time and memory of MoCo pre-training with the four presets, beside its plan.

    python benchmarks/moco_training.py --device cuda          # one GPU; writes results/moco_training.json
    python benchmarks/moco_training.py --batch 8 --steps 2    # fits a CPU with 8 GiB

The real trainer of `f3rm-ext moco train` takes its steps: ResNet-50 at 224 px, MoCo v2, batch, queue, accumulation and
AMP of each preset, on one process, with 2000 images. Views are noise in pinned memory, and the queue is full. Making
views from pictures is measured beside it: images per second of one process, which `--workers` multiplies.

A plan that does not fit is refused as the command refuses it; the report says so, and half of the batch is tried.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import training_steps
from training_steps import Row, TensorMemory, count_step, halved_until_it_fits, shortage_sentence, time_steps

PRESETS = ("low-vram", "optimized-16gb", "batch-80", "batch-128")
IMAGES = 2000
"""Images of the guide's data set."""
VIEWS = 16
"""Images whose views are timed."""


def make_config(name: str, options: argparse.Namespace) -> Any:
    """Returns the options of a row."""
    from f3rm_ext.moco.options import TrainConfig

    config = TrainConfig(data=Path("data"), output=Path("out"), preset=name, device=options.device)  # type: ignore[arg-type]
    config = replace(config, architecture="resnet50", image_size=224)
    if options.tiny:
        config = replace(config, architecture="resnet18", image_size=64, batch_size=8, queue_size=256)
    return replace(config, batch_size=options.batch) if options.batch else config


def batches(plan: Any, device: torch.device) -> Iterator[Any]:
    """Yields batches of views, without end; the noise of two of them in turn."""
    batch, size = plan.pair.batch_size, plan.config.image_size
    dice = torch.Generator().manual_seed(0)
    kept = []
    for first in (0, batch):
        views = [torch.randn(batch, 3, size, size, generator=dice) for _ in range(2)]
        numbers = (torch.arange(batch) + first) % plan.pair.images
        kept.append([part.pin_memory() if device.type == "cuda" else part for part in (*views, numbers)])
    while True:
        yield from kept


def fill(queue: Any, images: int) -> None:
    """Fills a queue with random keys of random images."""
    device = queue.keys.device
    keys = torch.nn.functional.normalize(torch.randn(queue.size, queue.keys.shape[1], device=device), dim=1)
    queue.enqueue(keys, torch.randint(images, (queue.size,), device=device))


def measure(config: Any, options: argparse.Namespace) -> Row:
    """Plans the training, builds its trainer, and measures its steps.

    Raises:
        ConfigError: the plan does not fit.
    """
    from f3rm_ext.moco.plan import plan_memory, step_bytes
    from f3rm_ext.moco.training import Training

    device = torch.device(options.device)
    begin = time.perf_counter()
    fits = plan_memory(config, IMAGES, device)
    plan_s, plan = time.perf_counter() - begin, fits.plan
    with TensorMemory(device) as memory:
        training, views = Training(plan, "", device), batches(plan, device)
        assert training.queue is not None
        fill(training.queue, IMAGES)

        def step() -> float:
            training.train_step(views)
            return plan.pair.effective_batch

        step()  # makes the moments
        with memory.measured():
            step()
    found = memory.result(step_bytes(plan, device.type), fits.peak_bytes)
    found |= time_steps(step, device, options.warm_up, options.steps, options.seconds)
    found |= count_step(step, device)
    return {
        "architecture": plan.config.architecture,
        "image_size": plan.config.image_size,
        "batch": plan.pair.batch_size,
        "accumulation": plan.accumulation,
        "queue": plan.pair.queue_size,
        "precision": "bfloat16" if plan.config.use_amp else "float32",
        "plan_s": round(plan_s, 2),
        **found,
        "epochs": plan.pair.epochs,
        "run_steps": plan.steps,
        "run_hours": round(plan.steps / found["steps_per_s"] / 3600, 3),
        "views_images_per_s": round(views_per_s(config), 1),
    }


def views_per_s(config: Any) -> float:
    """Returns for how many images per second this process makes both views."""
    from f3rm_ext.moco.views import make_views

    tiles = torch.randint(256, (VIEWS, 3, config.image_size, config.image_size), dtype=torch.uint8)
    times = []
    for repeat in range(4):
        begin = time.perf_counter()
        for views in make_views(config.image_size, config.color_jitter, symmetric=True):
            views(tiles, [torch.Generator().manual_seed(VIEWS * repeat + place) for place in range(VIEWS)])
        times.append(time.perf_counter() - begin)
    return VIEWS / sorted(times[1:])[1]


def run_one(name: str, options: argparse.Namespace) -> Row:
    """Returns a row: of the preset's batch, or of the largest half of it that fits."""
    from f3rm_ext.errors import ConfigError
    from f3rm_ext.moco.options import make_plan

    config = make_config(name, options)
    found, refused = halved_until_it_fits(
        make_plan(config, IMAGES).pair.batch_size,
        lambda batch: measure(replace(config, batch_size=batch), options),
        lambda error: str(error) if isinstance(error, ConfigError) else shortage_sentence(error),
    )
    return {**found, "refused": refused}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = training_steps.make_parser(__doc__, PRESETS, "moco_training.json", seconds=8.0)
    parser.add_argument("--batch", type=int, help="images per forward pass; by default that of the preset")
    parser.add_argument("--tiny", action="store_true", help="ResNet-18, small views and a short queue, for a rehearsal")
    return parser


if __name__ == "__main__":
    training_steps.run_rows(make_parser(), run_one, ("label", "batch", "queue"))
