"""Estimates the memory of a run, without a GPU and without data: of a feature field, and of Gaussian splats."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import SceneBox
from nerfstudio.engine.callbacks import TrainingCallbackAttributes
from torch import Tensor, nn

from f3rm_ext.data.datamanager import F3rmDataManagerConfig
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.pixel_sampler import to_colors
from f3rm_ext.data.ray_generators import TableRayGenerator
from f3rm_ext.errors import ConfigError
from f3rm_ext.features.sampling import interpolate
from f3rm_ext.features.spec import FeatureSpec
from f3rm_ext.memory.estimate import Category, MemoryEstimate, Phase, add_overhead, process_bytes
from f3rm_ext.memory.trace import AllocationTracker
from f3rm_ext.mesh.bound.model import FREE, BoundModel, BoundModelConfig
from f3rm_ext.model_components.chunked_rendering import DEFAULT_CHUNK_CUDA, ChunkedRenderer, default_chunk
from f3rm_ext.nerf.model import F3rmModel, F3rmModelConfig
from f3rm_ext.planning.gaussians import count_parts, final_gaussians, refinement_start, starting_gaussians
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
from f3rm_ext.splat.features.heads import LiftedHead
from f3rm_ext.splat.features.lifting import CHANNELS, accumulate_pixels, channels_at_once, lifts_patches
from f3rm_ext.splat.gaussian_model import GaussianModel
from f3rm_ext.splat.model import SplatModel, SplatModelConfig
from f3rm_ext.utils.console import silence

Estimator = Callable[[PlanRequest], MemoryEstimate]
REFINEMENT_BYTES = 120 << 20
"""What a refinement adds to the process: Open3D, and what the C library keeps after colours were taken from photos."""
PROGRESS_EVERY_S = 10.0
"""Seconds between messages of a long search."""
FEW = 100
"""Gaussians with which a model is built, before it gets those of the plan."""
EXCHANGED = 40
"""Numbers, besides colours, that a device keeps of a divided Gaussian in a view: indices, centre, depth, conic, opacity
and direction, and the table that is sent and the one that arrives."""
FEW_VIEWS = 4
"""Training cameras of splats. A step draws one or two; comparing all of them would take most of the plan's time."""


def estimate_memory(request: PlanRequest) -> MemoryEstimate:
    """Estimates the memory of a run: what each device holds at the peak of a training step, a picture and a query.

    Two training steps of the real model run on tensors without values. With several processes, figures are those of one
    of them, which is one device.

    Raises:
        ConfigError: there is no planner for this method.
        UserError: an option of the run cannot be used.
    """
    planner = PLANNERS.get(type(getattr(request.config.pipeline, "model", None)))
    if planner is None:
        raise ConfigError(
            f"The method {request.config.method_name} has no memory plan: plans are made for f3rm-ext and sugar-ext, "
            "and for methods that register a planner."
        )
    tensors = planner(request)
    device: dict[Phase, dict[Category, int]] = {
        phase: add_overhead(held, request.device.type) for phase, held in tensors.device.items()
    }
    if request.device.type == "cpu":
        refined = isinstance(request.config.pipeline.model, BoundModelConfig)
        for held in device.values():
            held["context"] = process_bytes() + REFINEMENT_BYTES * refined
    return MemoryEstimate(device, tensors.host)


def cached(estimate: Estimator, report: Callable[[str], None] = lambda text: None) -> Estimator:
    """Remembers estimates by the contents of their requests. One with pictures answers a request without them, too.

    Args:
        report: receives a message from time to time in a long search.
    """
    estimates: dict[str, MemoryEstimate] = {}
    reported_s = time.monotonic()

    def estimate_once(request: PlanRequest) -> MemoryEstimate:
        nonlocal reported_s
        with_pictures = repr(replace(request, pictures=True))
        key = with_pictures if with_pictures in estimates else repr(request)
        if key not in estimates:
            if time.monotonic() - reported_s > PROGRESS_EVERY_S:
                reported_s = time.monotonic()
                report(f"Searching for options that fit: {len(estimates)} tried.")
            with silence():  # models print how they start
                estimates[key] = estimate(request)
        return estimates[key]

    return estimate_once


def unit_box() -> SceneBox:
    """Returns the box of a scene, on which no memory depends."""
    return SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))


# --- feature fields --------------------------------------------------------------------------------------------------


def estimate_field(request: PlanRequest) -> MemoryEstimate:
    """Returns the peaks of a feature field; see :func:`estimate_memory`."""
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
        metadata = {"feature_specs": specs, "feature_ray_fraction": manager.feature_ray_fraction}
        model: F3rmModel = config.pipeline.model.setup(
            scene_box=unit_box(), num_train_data=capture.train_images, metadata=metadata, device="cpu", grad_scaler=None
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
        device["train"] = run.train(lambda: _make_batch(request, specs, rays))
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


def _make_batch(
    request: PlanRequest, specs: Sequence[FeatureSpec], make_rays: TableRayGenerator
) -> tuple[RayBundle, dict[str, Any]]:
    """Returns rays with colours and features, as the datamanager makes them."""
    manager: Any = request.config.pipeline.datamanager
    scope = request.processes if manager.ray_batch_scope == "global" else 1
    rays = -(-manager.train_num_rays_per_batch // scope)
    featured = math.ceil(rays * manager.feature_ray_fraction)
    indices = torch.zeros(rays, 3, dtype=torch.int64)
    batch: dict[str, Any] = {"image": to_colors(torch.empty(rays, 3, dtype=torch.uint8)), "indices": indices}
    if specs:
        batch["features"] = {
            spec.name: interpolate(
                (torch.empty(featured, spec.dim, dtype=torch.float16), torch.empty(featured)) for _ in range(4)
            )
            for spec in specs
        }
    return make_rays(indices), batch


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


# --- splats ----------------------------------------------------------------------------------------------------------


def estimate_splats(request: PlanRequest, *, arrays: bool = True) -> MemoryEstimate:
    """Returns the peaks of splats; see :func:`estimate_memory`.

    Args:
        arrays: whether arrays of numpy count, which torch's allocator does not see.
    """
    manager: Any = request.config.pipeline.datamanager
    capture, kind = request.capture, request.device.type
    local = request.config.machine.num_devices
    train = CachedImages.from_split(manager, "train", capture.train_images, capture, processes=local)
    final, parts = final_gaussians(request), count_parts(request)
    splats = _TracedSplats(request, -(-final // parts), parts)
    device: dict[Phase, dict[Category, int]] = {}
    with tracing_run(kind, arrays=arrays) as tracker:
        run = splats.begin(tracker)
        # The first batch decides, with the Gaussians of the start.
        there = tracker.total * starting_gaussians(request) // final
        kept = train.on_device(manager.cache_images == "gpu", kind, request.device.memory_bytes, there)
        exchanged = splats.exchange(tracker)
        copies = 1 + train.changes if kind == "cpu" else int(kept)  # The next window waits beside the present one.
        cached = train.allocate(tracker, copies)
        device["train"] = run.train(splats.make_batch, splats.end_step)
        if request.pictures:
            device["evaluation"] = run.draw(splats.evaluate)
            if splats.specs:
                device["lifting"] = run.draw(splats.lift_features)
            device["query"] = run.draw(lambda: draw_query(splats.model, splats.queried))
        del cached, exchanged
    return MemoryEstimate(device, {} if kind == "cpu" else {"images": train.images * (1 + train.changes)})


class _TracedSplats:
    """Splats without values.

    Args:
        count: Gaussians of a device.
        parts: number of devices over which all are divided.
    """

    def __init__(self, request: PlanRequest, count: int, parts: int) -> None:
        self.request, self.count, self.parts = request, count, parts
        self.config: Any = copy.deepcopy(request.config)
        options = self.config.pipeline.model
        options.start_from = None
        if isinstance(options, SplatModelConfig):
            options.num_random, options.start_stage, options.densify.max_gaussians = FEW, "vanilla", 0
        capture = request.capture
        self.view, self.queried = make_cameras(capture.width_px, capture.height_px), make_cameras(*QUERY_PX)
        self.view.metadata = {"cam_idx": 0}
        self.trained = make_cameras(capture.width_px, capture.height_px, min(capture.train_images, FEW_VIEWS))
        self.model: GaussianModel = options.setup(
            scene_box=unit_box(),
            num_train_data=capture.train_images,
            metadata={},
            device="cpu",
            grad_scaler=None,
            seed_points=None,
        )
        sizes = feature_sizes(self.config.pipeline.datamanager.features, capture)
        self.specs = feature_specs(self.config.pipeline.datamanager.features, sizes)

    def begin(self, tracker: AllocationTracker) -> TracedRun:
        """Gives the model the Gaussians of the plan, and makes what training needs."""
        model, cuda = self.model, self.request.device.type == "cuda"
        rows = self._allocate_mesh(tracker) if isinstance(model, BoundModel) else {}
        for name, value in list(model.gauss_params.items()):
            count = rows.get(name, self.count)
            model.gauss_params[name] = nn.Parameter(torch.empty(count, *value.shape[1:], dtype=value.dtype))
        model.filter_3d = torch.empty(self.count)
        processes = self.request.processes if self.parts == 1 else 1  # gradients of a part are complete
        self.run = TracedRun(self.config, model, tracker, mixed=False, foreach=cuda, processes=processes)
        manager = SimpleNamespace(train_dataset=SimpleNamespace(cameras=self.trained, image_filenames=()))
        pipeline: Any = SimpleNamespace(datamanager=manager)
        trainer: Any = SimpleNamespace(config=self.config)
        attributes = TrainingCallbackAttributes(
            optimizers=self.run.optimizers, grad_scaler=None, pipeline=pipeline, trainer=trainer
        )
        model.loaded = True  # no message about the start
        with tracker.allocating("buffers"):
            model.get_training_callbacks(attributes)
        if isinstance(model, SplatModel):
            assert model.regularizer is not None and model.densifier is not None
            surface, growing = model.regularizer.options, model.densifier.options
            # With losses of surfaces a step in which they are active, so that what they take counts.
            model.step = (growing.start + growing.every if surface.mode == "none" else surface.first_surface_loss) + 1
        return self.run

    def _allocate_mesh(self, tracker: AllocationTracker) -> dict[str, int]:
        """Gives the model triangles. Returns the rows of parameters that do not have one for each Gaussian."""
        start, each = refinement_start(self.request), int(self.config.pipeline.model.gaussians_per_triangle)
        # For another number of Gaussians than the mesh has, the proportions are the same.
        share = start.triangles / (start.triangles * each + start.free)
        faces = int(self.count * share + 1e-6)
        free = self.count - faces * each if start.free else 0
        vertices = round(faces * start.vertices / start.triangles)
        with tracker.allocating("buffers"):
            self.model.faces = torch.empty(faces, 3, dtype=torch.int64)
        bound = dict.fromkeys(("scales", "turns"), self.count - free)
        return {"vertices": vertices, **bound, **dict.fromkeys(FREE, free)}

    def exchange(self, tracker: AllocationTracker) -> Tensor:
        """Returns what a device keeps of divided Gaussians in the views of the others, and of theirs in its own: as
        many, if every view shows all; see :func:`~f3rm_ext.splat.rasterize.sharded.rasterize_sharded`."""
        harmonics = 3 * (self.config.pipeline.model.sh_degree + 1) ** 2
        with tracker.allocating("activations"):
            return torch.empty((self.parts - 1) * self.count, harmonics + EXCHANGED)

    def make_batch(self) -> tuple[Any, dict[str, Any]]:
        """Returns the camera and the batch of a step."""
        self.model.current_sh_degree = self.model.config.sh_degree
        pixels = torch.empty(*self._picture().shape, dtype=torch.uint8).float().div_(255.0)
        return self.view, {"image": pixels[..., :3].contiguous(), "image_idx": 0}

    def end_step(self) -> None:
        """Does what follows a step of splats that grow."""
        model = self.model
        if not isinstance(model, SplatModel):
            return
        assert model.regularizer is not None and model.densifier is not None and model._rasterization is not None
        if model.regularizer.neighbours.index is not None:
            self.run.tracker.label([model.regularizer.neighbours.index], "buffers")
        step = model.schedule.position(model.step)
        model.densifier.step_post_backward(step, model._rasterization, model.gauss_params, self.run.optimizers)
        model._rasterization = None

    def evaluate(self) -> object:
        """Draws an evaluation picture with its metrics."""
        outputs = self.model.get_outputs(self.view)
        return self.model.get_image_metrics_and_images(outputs, {"image": self._picture()})

    def lift_features(self) -> None:
        """Lifts features of a view to the Gaussians, as after the last step; a query asks them."""
        scene, view = self.model._scene(), PinholeCameras.of(self.view)
        for spec in self.specs:
            with self.run.tracker.allocating("features"):
                head = LiftedHead(spec, torch.empty(self.count, spec.dim, dtype=torch.float16))
            sums = torch.empty(self.count, min(spec.dim, channels_at_once(scene)))
            if not lifts_patches(scene):
                sums += accumulate_pixels(scene, view, torch.empty(*self._picture().shape[:2], CHANNELS + 1))[:, :-1]
            self.model.lifted.add(head)

    def _picture(self) -> Tensor:
        return torch.empty(self.request.capture.height_px, self.request.capture.width_px, 3)


# --- methods ---------------------------------------------------------------------------------------------------------

PLANNERS: dict[type, Estimator] = {
    F3rmModelConfig: estimate_field,
    SplatModelConfig: estimate_splats,
    BoundModelConfig: estimate_splats,
}
"""Functions that estimate the memory of a run's tensors, by the class of its model's configuration; see
:func:`register_planner`."""


def register_planner(config_type: type, planner: Estimator) -> None:
    """Adds a method to those that can be planned.

    Args:
        config_type: class of its model's configuration, ``config.pipeline.model``. Subclasses need planners of their
            own.
        planner: estimates the memory of the tensors of such a run: neither that of CUDA itself nor fragmentation.
    """
    PLANNERS[config_type] = planner
