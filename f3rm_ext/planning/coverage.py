"""What training will have seen when it ends: counted with the classes with which a run counts."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from f3rm_ext.data.coverage import Coverage
from f3rm_ext.data.datamanager import F3rmDataManagerConfig
from f3rm_ext.data.image_cycle import ImageCycle, ImageTurns
from f3rm_ext.data.image_datamanager import FULL_SIZE, ImageDataManagerConfig
from f3rm_ext.data.undistort import shrunk_size
from f3rm_ext.engine.trainer import F3rmTrainerConfig
from f3rm_ext.errors import ConfigError
from f3rm_ext.planning.request import ImageSizes
from f3rm_ext.planning.traced_run import kept_bytes
from f3rm_ext.splat.initialization import FEWEST_POINTS
from f3rm_ext.splat.model import SplatModelConfig


@dataclass(frozen=True)
class PlannedCoverage:
    """Steps, rays and images of a run. Rays of splats are pixels."""

    steps: int
    images_per_step: int
    """Images per step over all devices, for splats; 0 for fields, whose rays come from the whole window."""
    rays_per_step_device: float
    """Rays per step of the first device, on average."""
    rays_per_step: float
    """Rays per step of all devices, on average."""
    pixels: int
    """Pixels of all training images together."""
    images: int
    images_seen: int
    """Training images that are used at all."""
    appearances_min: int
    """Windows that the image with the fewest is in."""
    appearances_max: int
    """Windows that the image with the most is in."""
    rays: float
    epochs: float
    """Rays of the run per pixel of the training images, ``effective_epochs`` of coverage.json."""
    window: int
    """Images in memory at a time, per device."""
    repeat: int | None
    """Steps for which a window is used; None: all."""
    windows: int
    """Windows dealt to each device."""
    repeat_for_one_pass: int | None
    """Steps per window with which windows show every image once; None if all are in memory."""
    pixel_stride: int = 1
    """Distance of the rows and columns of pixels that are kept of each image."""

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which as many rays are drawn as there are pixels, at the mean rate of the run."""
        return self.pixels / self.rays_per_step

    @property
    def coverage(self) -> float:
        """Fraction of the training images that are used at all."""
        return self.images_seen / self.images

    def epochs_to_steps(self, epochs: float | int) -> int:
        """Returns the steps of a number of epochs, at the mean rate of the run."""
        # Rounding errors must not make a step more of a product that is a whole number.
        return int(np.ceil(epochs * self.steps_per_epoch - 1e-9))


def plan_coverage(config: F3rmTrainerConfig, sizes: ImageSizes, processes: int = 1) -> PlannedCoverage:
    """Returns what a run from scratch will have seen when it ends.

    Numbers of steps, windows, appearances and rays equal those in the run's coverage.json. Which pixels of a window are
    drawn is random, so a field's rays are counted as evenly spread over the images of a window.

    Args:
        processes: number of devices over all machines.

    Raises:
        ConfigError: an option cannot work, or the method draws neither rays nor images.
    """
    manager = config.pipeline.datamanager
    if not isinstance(manager, F3rmDataManagerConfig | ImageDataManagerConfig):
        raise ConfigError(f"How {config.method_name} goes through its images is not known here.")
    capture, local = sizes.summary(), config.machine.num_devices
    size = kept_bytes(manager, capture)
    place = {"seed": config.machine.seed, "shards": processes, "shard": 0}
    cycle = manager.image_cycle("train", len(sizes.pixels), size, local, **place)
    steps = config.max_num_iterations
    if isinstance(manager, ImageDataManagerConfig):
        coverage, windows = _image_coverage(manager, cycle, sizes, steps, _small_start(config, sizes))
    else:
        rays = manager.rays_of_process(processes, 0)
        coverage, windows = _ray_coverage(rays, cycle, sizes, steps)
    summary = coverage.summary()
    total = float(coverage.rays.sum())
    all_rays = total * processes
    if isinstance(manager, F3rmDataManagerConfig) and manager.ray_batch_scope == "global":
        all_rays = steps * manager.train_num_rays_per_batch
    one_pass = None if cycle.window_size == cycle.num_images else steps // -(-cycle.num_images // cycle.window_size)
    return PlannedCoverage(
        steps=steps,
        images_per_step=processes if coverage.whole_images else 0,
        rays_per_step_device=total / steps,
        rays_per_step=all_rays / steps,
        pixels=int(coverage.pixels.sum()),
        images=int(summary["images"]),
        images_seen=int(summary["images_seen"]),
        appearances_min=int(summary["appearances_min"]),
        appearances_max=int(summary["appearances_max"]),
        rays=summary["rays"],
        epochs=summary["effective_epochs"],
        window=cycle.window_size,
        repeat=cycle.repeat,
        windows=windows,
        repeat_for_one_pass=one_pass,
        pixel_stride=manager.pixel_stride("train", len(sizes.pixels), size, local),
    )


def _cycle_steps(cycle: ImageCycle, steps: int) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Images of each step, and whether a window begins there."""
    for _ in range(steps):
        begins = cycle.ends
        yield cycle.step(), begins


def _ray_coverage(rays: int, cycle: ImageCycle, sizes: ImageSizes, steps: int) -> tuple[Coverage, int]:
    coverage = Coverage(sizes.pixels, cycle.shards)
    windows = 0
    images: tuple[int, ...] = ()
    drawn = 0

    def count() -> None:
        if images:
            # As even as whole numbers can be, and their sum is exact.
            coverage.add_rays(images, np.diff(np.linspace(0, drawn, len(images) + 1).astype(np.int64)))

    for window, begins in _cycle_steps(cycle, steps):
        if begins:
            count()
            images, drawn, windows = window, 0, windows + 1
            coverage.add_windows(cycle.round)
        drawn += rays
    count()
    return coverage, windows


def _image_coverage(
    manager: ImageDataManagerConfig, cycle: ImageCycle, sizes: ImageSizes, steps: int, small: tuple[int, int]
) -> tuple[Coverage, int]:
    coverage = Coverage(sizes.pixels, cycle.shards, whole_images=True)
    turns, windows = ImageTurns(cycle, "train"), 0
    shrunk_pixels = functools.cache(functools.partial(_shrunk_pixels, sizes))
    for step, (window, begins) in enumerate(_cycle_steps(cycle, steps)):
        if begins:
            turns.begin_window()
            coverage.add_windows(cycle.round)
            windows += 1
        image = turns.draw(window)
        coverage.rays[image] += shrunk_pixels(manager.halvings(step, small))[image]
    return coverage, windows


def _small_start(config: F3rmTrainerConfig, sizes: ImageSizes) -> tuple[int, int]:
    """Returns the sizes with which a run begins: splats at random places begin with tiny images."""
    model, manager = config.pipeline.model, config.pipeline.datamanager
    if not isinstance(model, SplatModelConfig) or model.start_from is not None or sizes.points >= FEWEST_POINTS:
        return FULL_SIZE
    assert isinstance(manager, ImageDataManagerConfig)
    longest_px = int(max(sizes.heights_px.max(), sizes.widths_px.max()))
    return manager.small_start(longest_px, config.max_num_iterations)


def _shrunk_pixels(sizes: ImageSizes, halvings: int) -> list[int]:
    pairs: Any = zip(sizes.heights_px.tolist(), sizes.widths_px.tolist(), strict=True)
    return [int(np.prod(shrunk_size(height, width, 0.5**halvings))) for height, width in pairs]
