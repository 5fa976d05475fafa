"""How long a step takes on this machine: a few steps on pictures of noise."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from f3rm_ext.engine.cost import device_time
from f3rm_ext.engine.ranks import world_size
from f3rm_ext.errors import ConfigError
from f3rm_ext.moco.options import Plan
from f3rm_ext.moco.tiles import Tiles
from f3rm_ext.moco.training import Training
from f3rm_ext.moco.views import load_batches, make_views

_TIMED = 2


def step_seconds(plan: Plan, device: torch.device) -> float:
    """Returns the seconds of an optimiser step, with the views of its batches, from two batches after a first one.

    Args:
        plan: The training.
        device: Of the training.

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
        batches = load_batches(tiles, views, batch_size=batch, seed=0, first=0, workers=config.workers)
        training.train_step(batches)
        began = device_time(device)
        for _ in range(_TIMED):
            training.train_step(batches)
        return (device_time(device) - began) / _TIMED * plan.accumulation
