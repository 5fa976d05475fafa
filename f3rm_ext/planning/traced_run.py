"""Runs training steps, pictures and queries of a real model without data, and traces the memory that they take."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.models.base_model import Model
from torch import Tensor

from f3rm_ext.data.cycling_config import CyclingConfig, ImageBytes
from f3rm_ext.data.datamanager import F3rmDataManagerConfig
from f3rm_ext.data.pixel_sampler import CHANNELS
from f3rm_ext.data.placement import fits
from f3rm_ext.engine.optimizers import fit_optimizers
from f3rm_ext.engine.protocols import GathersGradients
from f3rm_ext.engine.ranks import Ranks
from f3rm_ext.features.base import FeatureSize
from f3rm_ext.features.extractors.registry import feature_size
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.features.source import head_names
from f3rm_ext.features.spec import DisplayBasis, FeatureSpec
from f3rm_ext.memory.estimate import CONTEXT_BYTES
from f3rm_ext.memory.trace import AllocationTracker, Bytes, tracing
from f3rm_ext.mesh.bound import layout
from f3rm_ext.planning.request import CaptureSizes
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.queryable import Scorer
from f3rm_ext.splat import losses
from f3rm_ext.splat.densify import mcmc
from f3rm_ext.utils import colormaps

QUERY_PX = (1920, 1080)
"""Width and height of the viewer's picture of a query."""
HALF = 2
"""Bytes of a number of a stored feature."""
NEGATIVES = 4
"""Canonical negatives of a query."""


class TracedRun:
    """A model and its optimisers without values, as they are in training.

    Args:
        tracker: counts the memory; it is entered.
        foreach: whether Adam updates all parameters at once, as it does on CUDA by default.
        processes: number of ranks; more than one gather their packed gradients.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model: Model,
        tracker: AllocationTracker,
        *,
        mixed: bool,
        foreach: bool,
        processes: int = 1,
    ) -> None:
        self.model, self.tracker, self.mixed, self.processes = model, tracker, mixed, processes
        tracker.label(model.buffers(), "buffers")
        tracker.label(model.parameters(), "parameters")
        self.optimizers = make_optimizers(config, model, foreach=foreach)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._label_gradient)

    def train(self, batch: Callable[[], tuple[Any, dict[str, Any]]], after: Callable[[], None] = lambda: None) -> Bytes:
        """Takes two steps, the first of which allocates the optimisers' moments.

        Args:
            batch: returns the inputs of the model and the batch of its losses.

        Returns:
            Bytes at the peak of the second step.
        """
        self.model.train()
        self._step(batch)
        after()
        self.tracker.label(self._moments(), "optimizer")
        self.tracker.reset_peak()
        self._step(batch)
        after()
        return self.tracker.peak

    def draw(self, draw: Callable[[], object]) -> Bytes:
        """Returns the bytes at the peak of drawing a picture between two steps."""
        self.model.eval()
        self.tracker.reset_peak()
        with torch.no_grad():
            draw()
        return self.tracker.peak

    def _step(self, batch: Callable[[], tuple[Any, dict[str, Any]]]) -> None:
        self.optimizers.zero_grad_all()
        # Tensors without values are on the CPU, whatever the device; they take as much there in this precision.
        with self.tracker.saving(), torch.autocast("cpu", torch.float16, enabled=self.mixed):
            inputs, targets = batch()
            # Nerfstudio's trainer holds them all until the end of the step.
            outputs: Any = self.model(inputs)
            metrics = self.model.get_metrics_dict(outputs, targets)
            losses: Mapping[str, Tensor] = self.model.get_loss_dict(outputs, targets, metrics)  # type: ignore[assignment]
            loss = functools.reduce(torch.add, losses.values())
        loss.backward()
        if self.processes > 1:
            ranks = _EqualRanks(self.processes)
            for optimizer in self.optimizers.optimizers.values():
                if isinstance(optimizer, GathersGradients):
                    for group in optimizer.param_groups:  # type: ignore[attr-defined]
                        for parameter in group["params"]:
                            optimizer.gather_gradients(parameter, ranks)
        self.optimizers.optimizer_step_all()

    def _label_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.tracker.label([parameter.grad], "gradients")

    def _moments(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers.optimizers.values():
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


class _EqualRanks(Ranks):
    """Ranks that all have what this one has."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def share(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers) for _ in range(self.size)]

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        own = rows.clone()
        return [torch.empty_like(own) for _ in range(self.size)]


@contextmanager
def tracing_run(device_type: str, *, arrays: bool = True) -> Iterator[AllocationTracker]:
    """Enters :func:`~f3rm_ext.memory.trace.tracing`, and afterwards clears caches that hold tensors without values."""
    try:
        with tracing(device_type, arrays=arrays) as tracker:
            yield tracker
    finally:
        caches = (losses.ssim_window, colormaps._color_table, mcmc.relocation_table, layout.barycentric_weights)
        for cache in caches:
            cache.cache_clear()


def make_optimizers(config: TrainerConfig, model: Model, *, foreach: bool) -> Optimizers:
    """Returns the optimisers of a run, without schedules, which take no memory."""
    groups: dict[str, Any] = copy.deepcopy(config.optimizers)
    fit_optimizers(groups, config)
    optimizers = Optimizers(groups, model.get_param_groups())
    for optimizer in optimizers.optimizers.values():
        for group in optimizer.param_groups:
            if foreach and group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True
    return optimizers


def make_cameras(width_px: int, height_px: int, count: int = 1) -> Cameras:
    """Returns cameras with values, side by side; call it outside :func:`tracing_run`."""
    pose = torch.eye(4)[:3].repeat(max(1, count), 1, 1)
    pose[:, 0, 3] = torch.arange(len(pose)) / len(pose)
    focal_px = float(width_px)
    return Cameras(pose, focal_px, focal_px, width_px / 2, height_px / 2, width_px, height_px)


def draw_query(model: Any, view: Cameras) -> object:
    """Draws a picture as the viewer does, with the scores of a query where the model has features."""
    heads = model.query_heads()
    if not heads:
        return model.render_camera(view, {})
    name, head = next(iter(heads.items()))
    positives = Embeddings(torch.empty(1, head.dim), ("query",))
    negatives = Embeddings(torch.empty(NEGATIVES, head.dim), ("",) * NEGATIVES)
    scorer = Scorer.from_model(model, [Query(name="query", positives=positives, negatives=negatives, head=name)])
    return model.render_camera(view, {"scores": lambda _, rendered_of: scorer(rendered_of)})


# --- cached images ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CachedImages:
    """Images of one process that are in memory at a time, with their features."""

    images: int
    """Bytes of their pixels."""
    features: int
    """Bytes of their features."""
    changes: bool
    """Whether other images will follow, which are loaded while these are used."""

    @classmethod
    def from_split(
        cls,
        manager: Any,
        split: str,
        num_images: int,
        capture: CaptureSizes,
        features: Sequence[FeatureSize] = (),
        processes: int = 1,
    ) -> "CachedImages":
        """Computes what a datamanager caches of a split, with some number of processes on each machine.

        Raises:
            ConfigError: an option of the cache is out of range.
        """
        size, total = image_bytes(capture, features), max(1, num_images)
        cycle = manager.image_cycle(split, total, size, processes)
        count = cycle.window_size if num_images else 0
        stride = manager.pixel_stride(split, total, size, processes)
        held = count + (cycle.start[0] if cycle.start else 0)  # the first are used until all are there
        return cls(held * size.pixels // stride**2, held * size.features, cycle.changes)

    def on_device(self, wanted: bool, device_type: str, memory_bytes: int, tensor_bytes: int) -> bool:
        """Returns whether a GPU keeps them, as :class:`~f3rm_ext.data.placement.Placement` decides.

        Args:
            tensor_bytes: bytes of tensors there when the first batch is made.
        """
        if device_type != "cuda" or not wanted:
            return False
        return fits(self.images + self.features, memory_bytes - CONTEXT_BYTES - tensor_bytes)

    def allocate(self, tracker: AllocationTracker, copies: int = 1) -> tuple[Tensor, Tensor]:
        """Returns tensors of these sizes, labelled in the trace, for a number of windows."""
        with tracker.allocating("images"):
            images = torch.empty(copies * self.images, dtype=torch.uint8)
        with tracker.allocating("features"):
            return images, torch.empty(copies * self.features, dtype=torch.uint8)


def image_bytes(capture: CaptureSizes, features: Sequence[FeatureSize] = ()) -> ImageBytes:
    """Returns the memory of the largest image and of its features."""
    pixels = capture.width_px * capture.height_px * CHANNELS
    return ImageBytes(pixels, HALF * sum(size.numbers for size in features))


def kept_bytes(manager: CyclingConfig, capture: CaptureSizes) -> ImageBytes:
    """Returns what a datamanager keeps of the largest image: its pixels, and for fields its features."""
    features = manager.features if isinstance(manager, F3rmDataManagerConfig) else None
    return image_bytes(capture, () if features is None else feature_sizes(features, capture))


def feature_sizes(options: FeatureOptions, capture: CaptureSizes) -> list[FeatureSize]:
    """Returns the size of an image's features by extractor, with PCA codes if there are any.

    Raises:
        ExtractorError: an extractor is unknown, or one of its options is wrong.
    """
    sizes = [feature_size(text, capture.height_px, capture.width_px) for text in options.extractors]
    return [FeatureSize(size.rows, size.cols, options.codes or size.dim) for size in sizes]


def feature_specs(options: FeatureOptions, sizes: Sequence[FeatureSize]) -> tuple[FeatureSpec, ...]:
    """Returns the feature specs from which a model is built; their values are placeholders."""
    specs: list[FeatureSpec] = []
    for text, name, size in zip(options.extractors, head_names(options.extractors), sizes, strict=True):
        basis = DisplayBasis(torch.zeros(size.dim), torch.eye(3, size.dim), -torch.ones(3), torch.ones(3))
        specs.append(FeatureSpec(name=name, dim=size.dim, extractor=text, identity={}, display=basis))
    return tuple(specs)
