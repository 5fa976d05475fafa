"""What a feature field holds in training, in an evaluation picture and in a query."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import SceneBox
from torch import Tensor

from f3rm_ext.data.datamanager import F3rmDataManagerConfig
from f3rm_ext.data.pixel_sampler import colors_of
from f3rm_ext.data.ray_generators import TableRayGenerator
from f3rm_ext.features.base import FeatureSize
from f3rm_ext.features.sampling import interpolate
from f3rm_ext.model_components.chunked_rendering import DEFAULT_CHUNK_CUDA, ChunkedRenderer, default_chunk
from f3rm_ext.nerf.model import F3rmModel
from f3rm_ext.planning.allowances import QUERY_PX, on_the_device
from f3rm_ext.planning.estimate import Category, MemoryEstimate, Phase
from f3rm_ext.planning.grid_stand_in import grid_stand_in
from f3rm_ext.planning.request import PlanRequest
from f3rm_ext.planning.steps import TracedRun, cameras, lpips_stand_in, tracing
from f3rm_ext.planning.tracker import AllocationTracker
from f3rm_ext.planning.windows import Window, feature_sizes, feature_specs, stays_on_device, window_of
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.queryable import Scorer

NEGATIVES = 4
"""Canonical negatives of a query."""


def estimate_field(request: PlanRequest) -> MemoryEstimate:
    """Returns the peaks of a feature field; see :func:`f3rm_ext.planning.memory.estimate_memory`."""
    config: Any = request.config
    manager: F3rmDataManagerConfig = config.pipeline.datamanager
    capture, kind = request.capture, request.device.type
    sizes = feature_sizes(manager.features, capture)
    specs = feature_specs(manager.features, sizes)
    train = window_of(manager, "train", capture.train_images, capture, sizes)
    # Nerfstudio evaluates during training for its writers only, and batches of rays only if asked to.
    written = config.is_wandb_enabled() or config.is_tensorboard_enabled() or config.is_comet_enabled()
    held_out = capture.eval_images if written and config.steps_per_eval_batch else 0
    evaluated = window_of(manager, "eval", held_out, capture, sizes)
    view, queried = cameras(capture.width_px, capture.height_px), cameras(*QUERY_PX)
    trained = cameras(capture.width_px, capture.height_px, capture.train_images)
    device: dict[Phase, dict[Category, int]] = {}
    with grid_stand_in(kind), tracing(kind) as tracker:
        scene_box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
        metadata = {"feature_specs": specs, "feature_ray_fraction": manager.feature_ray_fraction}
        model: F3rmModel = config.pipeline.model.setup(
            scene_box=scene_box, num_train_data=capture.train_images, metadata=metadata, device="cpu", grad_scaler=None
        )
        model.image_metrics._lpips = lpips_stand_in  # type: ignore[method-assign]
        # Nerfstudio computes these in numpy, which needs values.
        model.camera_optimizer.get_metrics_dict = lambda metrics: None  # type: ignore[method-assign]
        if kind == "cuda":
            model.chunked.chunk = model.chunked.chunk or DEFAULT_CHUNK_CUDA
        run = TracedRun(config, model, tracker, mixed=config.mixed_precision and kind == "cuda", foreach=kind == "cuda")
        with tracker.allocating("buffers"):
            rays = TableRayGenerator(trained)
        free = request.device.memory_bytes - on_the_device(kind, tracker.total)
        kept = stays_on_device(train, manager.images_on_gpu, kind, free)
        windows = _windows(train if kept or kind == "cpu" else None, evaluated if kind == "cpu" else None, tracker)
        batch = _Batches(request, sizes, rays)
        device["train"], _ = run.train(batch)
        if request.pictures:
            with _two_chunks():
                device["evaluation"] = run.draw(lambda: _evaluate(model, view))
                device["query"] = run.draw(lambda: _query(model, queried))
        del windows
    return MemoryEstimate(device, {} if kind == "cpu" else _host(train, evaluated, kept))


def _windows(train: Window | None, evaluated: Window | None, tracker: AllocationTracker) -> list[Tensor]:
    """Allocates what the training device keeps of the windows."""
    found: list[Tensor] = []
    for window in (train, evaluated):
        if window is not None:
            for category, size in (("images", window.images), ("features", window.features)):
                with tracker.allocating(category):  # type: ignore[arg-type]
                    found.append(torch.empty(size, dtype=torch.uint8))
    return found


def _host(train: Window, evaluated: Window, kept: bool) -> dict[Category, int]:
    """Returns what stays in main memory; the window on the device leaves it, and the next one waits there."""
    copies = (not kept) + train.changes
    return {
        "images": copies * train.images + evaluated.images,
        "features": copies * train.features + evaluated.features,
    }


class _Batches:
    """Rays with colours and features, as the datamanager makes them."""

    def __init__(self, request: PlanRequest, sizes: list[FeatureSize], rays: TableRayGenerator) -> None:
        manager: Any = request.config.pipeline.datamanager
        scope = request.processes if manager.ray_batch_scope == "global" else 1
        self.rays = -(-manager.train_num_rays_per_batch // scope)
        self.featured = math.ceil(self.rays * manager.feature_ray_fraction)
        self._names = [spec.name for spec in feature_specs(manager.features, sizes)]
        self._dims = [size.dim for size in sizes]
        self._make_rays = rays

    def __call__(self) -> tuple[Any, dict[str, Any]]:
        """Returns rays and their batch."""
        indices = torch.zeros(self.rays, 3, dtype=torch.int64)
        batch: dict[str, Any] = {
            "image": colors_of(torch.empty(self.rays, 3, dtype=torch.uint8)),
            "indices": indices,
        }
        if self._names:
            batch["features"] = {
                name: interpolate(
                    (torch.empty(self.featured, dim, dtype=torch.float16), torch.empty(self.featured)) for _ in range(4)
                )
                for name, dim in zip(self._names, self._dims, strict=True)
            }
        return self._make_rays(indices), batch


@contextmanager
def _two_chunks() -> Iterator[None]:
    """Draws pictures as chunks do, but computes only the first chunk and the last: thousands would take minutes."""

    def render(
        renderer: ChunkedRenderer, rays: RayBundle, forward: Callable[[RayBundle], dict[str, Any]], device: torch.device
    ) -> dict[str, Tensor]:
        height, width = rays.origins.shape[:2]
        chunk = min(renderer.chunk or default_chunk(device), height * width)
        earlier = height * width - chunk
        part = rays.get_row_major_sliced_ray_bundle(0, chunk)
        found = _tensors_of(forward(part))
        pieces: dict[str, list[Tensor]] = {name: [] for name in found}
        if earlier:
            for name, value in found.items():
                pieces[name].append(torch.empty(earlier, *value.shape[1:], dtype=value.dtype))
            del found
            found = _tensors_of(forward(part))
        for name, value in found.items():
            pieces[name].append(value)
        return {name: torch.cat(parts).view(height, width, -1) for name, parts in pieces.items()}

    with mock.patch.object(ChunkedRenderer, "render", render):
        yield


def _tensors_of(outputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in outputs.items() if isinstance(value, Tensor)}


def _evaluate(model: F3rmModel, view: Cameras) -> object:
    outputs = model.get_outputs_for_camera_ray_bundle(view.generate_rays(camera_indices=0, keep_shape=True))
    image = torch.empty(int(view.height[0]), int(view.width[0]), 3)
    return model.get_image_metrics_and_images(outputs, {"image": image})


def _query(model: F3rmModel, view: Cameras) -> object:
    heads = model.query_heads()
    if not heads:
        return model.render_camera(view, {})
    name, head = next(iter(heads.items()))
    vectors = (
        Embeddings(torch.empty(1, head.dim), ("query",)),
        Embeddings(torch.empty(NEGATIVES, head.dim), ("",) * NEGATIVES),
    )
    scorer = Scorer.of_model(model, [Query(name="query", positives=vectors[0], negatives=vectors[1], head=name)])
    return model.render_camera(view, {"scores": lambda _, rendered_of: scorer(rendered_of)})
