"""The memory of a feature field in training, in an evaluation picture and in a query."""

import math
from collections.abc import Callable
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import SceneBox
from torch import Tensor

from f3rm_ext.data.datamanager import F3rmDataManagerConfig
from f3rm_ext.data.pixel_sampler import to_colors
from f3rm_ext.data.ray_generators import TableRayGenerator
from f3rm_ext.features.base import FeatureSize
from f3rm_ext.features.sampling import interpolate
from f3rm_ext.memory.estimate import Category, MemoryEstimate, Phase
from f3rm_ext.model_components.chunked_rendering import DEFAULT_CHUNK_CUDA, ChunkedRenderer, default_chunk
from f3rm_ext.nerf.model import F3rmModel
from f3rm_ext.planning.request import PlanRequest
from f3rm_ext.planning.traced_run import (
    QUERY_PX,
    CachedImages,
    TracedRun,
    draw_query,
    feature_sizes,
    feature_specs,
    make_cameras,
    tracing_run,
)


def estimate_field(request: PlanRequest) -> MemoryEstimate:
    """Returns the peaks of a feature field; see :func:`f3rm_ext.planning.estimator.estimate_memory`."""
    config: Any = request.config
    manager: F3rmDataManagerConfig = config.pipeline.datamanager
    capture, kind = request.capture, request.device.type
    sizes = feature_sizes(manager.features, capture)
    specs = feature_specs(manager.features, sizes)
    local = request.config.machine.num_devices
    train = CachedImages.from_split(manager, "train", capture.train_images, capture, sizes, local)
    # Nerfstudio evaluates during training for its writers only, and batches of rays only if asked to.
    written = config.is_wandb_enabled() or config.is_tensorboard_enabled() or config.is_comet_enabled()
    held_out = capture.eval_images if written and config.steps_per_eval_batch else 0
    evaluated = CachedImages.from_split(manager, "eval", held_out, capture, sizes, local)
    view, queried = make_cameras(capture.width_px, capture.height_px), make_cameras(*QUERY_PX)
    trained = make_cameras(capture.width_px, capture.height_px, capture.train_images)
    device: dict[Phase, dict[Category, int]] = {}
    with tracing_run(kind) as tracker:
        scene_box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
        metadata = {"feature_specs": specs, "feature_ray_fraction": manager.feature_ray_fraction}
        model: F3rmModel = config.pipeline.model.setup(
            scene_box=scene_box, num_train_data=capture.train_images, metadata=metadata, device="cpu", grad_scaler=None
        )
        chunk = DEFAULT_CHUNK_CUDA if kind == "cuda" else default_chunk(torch.device("cpu"))
        model.chunked = _TwoChunkRenderer(model.chunked.chunk or chunk)
        cuda = kind == "cuda"
        run = TracedRun(config, model, tracker, mixed=config.mixed_precision and cuda, foreach=cuda)
        with tracker.allocating("buffers"):
            rays = TableRayGenerator(trained)
        kept = train.on_device(manager.images_on_gpu, kind, request.device.memory_bytes, tracker.total)
        cached = [train.allocate(tracker)] if kept else []
        if not cuda:  # The next window waits beside the present one.
            cached = [split.allocate(tracker, 1 + split.changes) for split in (train, evaluated)]
        device["train"] = run.train(_Batches(request, sizes, rays))
        if request.pictures:
            device["evaluation"] = run.draw(lambda: _evaluate(model, view))
            device["query"] = run.draw(lambda: draw_query(model, queried))
        del cached
    if not cuda:
        return MemoryEstimate(device)
    # Cached images on the device leave main memory, where the next ones wait.
    copies = (not kept) + train.changes
    images = copies * train.images + evaluated.images
    return MemoryEstimate(device, {"images": images, "features": copies * train.features + evaluated.features})


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
            "image": to_colors(torch.empty(self.rays, 3, dtype=torch.uint8)),
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


class _TwoChunkRenderer(ChunkedRenderer):
    """Computes only the first chunk of a picture and the last, since thousands would take minutes."""

    def render(
        self, rays: RayBundle, forward: Callable[[RayBundle], dict[str, Any]], device: torch.device
    ) -> dict[str, Tensor]:
        """See the base; the chunks between are allocated only."""
        height, width = rays.origins.shape[:2]
        chunk = min(self.chunk, height * width)
        earlier = height * width - chunk
        part = rays.get_row_major_sliced_ray_bundle(0, chunk)
        outputs = _tensors(forward(part))
        pieces: dict[str, list[Tensor]] = {name: [] for name in outputs}
        if earlier:
            for name, value in outputs.items():
                pieces[name].append(torch.empty(earlier, *value.shape[1:], dtype=value.dtype))
            del outputs
            outputs = _tensors(forward(part))
        for name, value in outputs.items():
            pieces[name].append(value)
        return {name: torch.cat(parts).view(height, width, -1) for name, parts in pieces.items()}


def _tensors(outputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in outputs.items() if isinstance(value, Tensor)}


def _evaluate(model: F3rmModel, view: Cameras) -> object:
    outputs = model.get_outputs_for_camera_ray_bundle(view.generate_rays(camera_indices=0, keep_shape=True))
    image = torch.empty(int(view.height[0]), int(view.width[0]), 3)
    return model.get_image_metrics_and_images(outputs, {"image": image})
