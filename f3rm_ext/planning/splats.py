"""What Gaussian splats hold in training, in an evaluation picture and in a query."""

import copy
from types import SimpleNamespace
from typing import Any

import numba
import torch
from nerfstudio.data.scene_box import SceneBox
from nerfstudio.engine.callbacks import TrainingCallbackAttributes
from torch import Tensor, nn

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.mesh.bound.model import FREE, BoundModel
from f3rm_ext.planning.allowances import QUERY_PX, on_the_device
from f3rm_ext.planning.estimate import Category, MemoryEstimate, Phase
from f3rm_ext.planning.growth import final_gaussians, refinement_start, schedule_of
from f3rm_ext.planning.request import PlanRequest
from f3rm_ext.planning.splat_stand_in import splat_stand_in
from f3rm_ext.planning.steps import TracedRun, cameras, lpips_stand_in, tracing
from f3rm_ext.planning.tracker import AllocationTracker, Bytes
from f3rm_ext.planning.windows import feature_sizes, feature_specs, stays_on_device, window_of
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.queryable import Scorer
from f3rm_ext.splat.features.heads import LiftedHead
from f3rm_ext.splat.memory.accounting import CHUNKS_BYTES, FLOAT, PACKED_BYTES, Layout, account, total
from f3rm_ext.splat.model import SplatModel
from f3rm_ext.splat.regularization.kernels import GRADIENT_BYTES
from f3rm_ext.splat.regularization.table import WIDTH

FEW = 100
"""Gaussians with which the model is built, before it gets those of the plan."""
FEW_VIEWS = 4
"""Training cameras of the model. A step draws one or two; comparing all of them would take most of the plan's time."""


def estimate_splats(request: PlanRequest, *, arrays: bool = True) -> MemoryEstimate:
    """Returns the peaks of splats; see :func:`f3rm_ext.planning.memory.estimate_memory`.

    Args:
        request: what is planned.
        arrays: see :func:`~f3rm_ext.planning.splat_stand_in.splat_stand_in`.
    """
    manager: Any = request.config.pipeline.datamanager
    capture, kind = request.capture, request.device.type
    train = window_of(manager, "train", capture.train_images, capture)
    run = _TracedSplats(request, final_gaussians(request), arrays and kind == "cpu")
    device: dict[Phase, dict[Category, int]] = {}
    with splat_stand_in(kind, arrays), tracing(kind) as tracker:
        run.begin(tracker)
        free = request.device.memory_bytes - on_the_device(kind, tracker.total)
        kept = stays_on_device(train, manager.cache_images == "gpu", kind, free)
        with tracker.allocating("images"):
            window = torch.empty(train.images if kept or kind == "cpu" else 0, dtype=torch.uint8)
        device["train"] = run.train()
        if request.pictures:
            device["evaluation"] = run.evaluate()
            device["query"] = run.query()
        del window
    return MemoryEstimate(device, {} if kind == "cpu" else {"images": train.images * (1 + train.changes)})


class _TracedSplats:
    """Splats without values.

    Args:
        request: what is planned.
        count: number of Gaussians.
        arrays: whether numba's gradients of points count.
    """

    def __init__(self, request: PlanRequest, count: int, arrays: bool) -> None:
        self.request, self.count, self.arrays = request, count, arrays
        self.config: Any = copy.deepcopy(request.config)
        options = self.config.pipeline.model
        options.num_random, options.start_from, options.start_stage = FEW, None, "vanilla"
        options.densify.max_gaussians = 0
        self.regularized = options.regularization != "none"
        self.at_points = options.regularization not in ("none", "planar")
        capture = request.capture
        self.view, self.queried = cameras(capture.width_px, capture.height_px), cameras(*QUERY_PX)
        self.view.metadata = {"cam_idx": 0}
        self.trained = cameras(capture.width_px, capture.height_px, min(capture.train_images, FEW_VIEWS))
        box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
        self.model: SplatModel = options.setup(
            scene_box=box,
            num_train_data=capture.train_images,
            metadata={},
            device="cpu",
            grad_scaler=None,
            seed_points=None,
        )
        sizes = feature_sizes(self.config.pipeline.datamanager.features, capture)
        self.specs = feature_specs(self.config.pipeline.datamanager.features, sizes)

    def begin(self, tracker: AllocationTracker) -> None:
        """Gives the model the Gaussians of the plan, and makes what training needs."""
        model, kind = self.model, self.request.device.type
        rows = self._mesh(tracker) if isinstance(model, BoundModel) else {}
        for name, value in list(model.gauss_params.items()):
            count = rows.get(name, self.count)
            model.gauss_params[name] = nn.Parameter(torch.empty(count, *value.shape[1:], dtype=value.dtype))
        model.filter_3d = torch.empty(self.count)
        model.image_metrics._lpips = lpips_stand_in  # type: ignore[method-assign]
        self.run = TracedRun(self.config, model, tracker, mixed=False, foreach=kind == "cuda")
        manager = SimpleNamespace(train_dataset=SimpleNamespace(cameras=self.trained))
        pipeline: Any = SimpleNamespace(datamanager=manager)
        trainer: Any = SimpleNamespace(config=self.config)
        attributes = TrainingCallbackAttributes(
            optimizers=self.run.optimizers, grad_scaler=None, pipeline=pipeline, trainer=trainer
        )
        model.loaded = True  # so that nothing is said of how it starts
        model.get_training_callbacks(attributes)
        if isinstance(model, BoundModel) and model._pairs is not None:
            tracker.label(model._pairs, "buffers")
        assert model.regularizer is not None and model.densifier is not None
        # What it needs at points is in the account; its kernels do not run without values.
        model.regularizer._at_points = lambda *_: {}  # type: ignore[method-assign]
        if model.nearby is not None:
            # The cameras of a plan are all alike, so none is a neighbour of another.
            beside = PinholeCameras.to_render(self.view, model.device)
            model.nearby.draw = lambda *_: 0  # type: ignore[method-assign]
            model.nearby.camera = lambda *_: beside  # type: ignore[method-assign]
        surface, growing = model.regularizer.options, model.densifier.options
        model.step = surface.first_surface_loss + 1 if self.regularized else growing.start + growing.every + 1
        self.neighbours: Tensor | None = None
        if self.at_points:
            with tracker.allocating("buffers"):
                self.neighbours = torch.empty(self.count, surface.neighbours, dtype=torch.int32)

    def _mesh(self, tracker: AllocationTracker) -> dict[str, int]:
        """Gives the model triangles. Returns the rows of parameters that do not have one for each Gaussian."""
        start, each = refinement_start(self.request), int(self.config.pipeline.model.gaussians_per_triangle)
        # Of another number of Gaussians than the mesh has, the shares are the same.
        share = start.triangles / (start.triangles * each + start.free)
        faces = int(self.count * share + 1e-6)
        free = self.count - faces * each if start.free else 0
        vertices = round(faces * start.vertices / start.triangles)
        with tracker.allocating("buffers"):
            self.model.faces = torch.empty(faces, 3, dtype=torch.int64)
        bound = dict.fromkeys(("scales", "turns"), self.count - free)
        return {"vertices": vertices, **bound, **dict.fromkeys(FREE, free)}

    def train(self) -> Bytes:
        """Returns the peak of a step."""
        found, before_backward = self.run.train(self._batch, self._after)
        moments = [found]
        if self.at_points:
            # Neither numba's kernels nor Triton's compute points in chunks.
            points = total(account(layout_of(self.request, self.count)), "regularization") - CHUNKS_BYTES
            if self.arrays:
                points += min(GRADIENT_BYTES, self.count * WIDTH * FLOAT * numba.get_num_threads())
            moments.append({**before_backward, "activations": before_backward.get("activations", 0) + points})
        if self.request.processes > 1:
            moments.append(self._gathering(found))
        return max(moments, key=lambda held: sum(held.values()))

    def _gathering(self, found: Bytes) -> Bytes:
        """Returns what is held when a process has the packed gradients of all, once as they came and once in parts."""
        kept = total(account(layout_of(self.request, self.count)), "gradient")
        packed = self.count * PACKED_BYTES * self.request.processes
        held: Bytes = {name: size for name, size in found.items() if name not in ("activations", "workspace")}
        held["gradients"] = kept + 2 * packed
        return held

    def evaluate(self) -> Bytes:
        """Returns the peak of an evaluation picture with its metrics."""

        def draw() -> object:
            outputs = self.model.get_outputs(self.view)
            return self.model.get_image_metrics_and_images(outputs, {"image": self._picture()})

        return self.run.draw(draw)

    def query(self) -> Bytes:
        """Returns the peak of a picture in the viewer, with a query once features are lifted."""
        model = self.model
        with self.run.tracker.allocating("features"):
            for spec in self.specs:
                model.lifted.put(LiftedHead(spec, torch.empty(self.count, spec.dim, dtype=torch.float16)))

        def draw() -> object:
            heads = model.query_heads()
            if not heads:
                return model.render_camera(self.queried, {})
            name, head = next(iter(heads.items()))
            one, others = Embeddings(torch.empty(1, head.dim), ("",)), Embeddings(torch.empty(4, head.dim), ("",) * 4)
            scorer = Scorer.of_model(model, [Query(name="query", positives=one, negatives=others, head=name)])
            return model.render_camera(self.queried, {"scores": lambda _, rendered_of: scorer(rendered_of)})

        return self.run.draw(draw)

    def _picture(self) -> Tensor:
        return torch.empty(self.request.capture.height_px, self.request.capture.width_px, 3)

    def _batch(self) -> tuple[Any, dict[str, Any]]:
        self.model.current_sh_degree = self.model.config.sh_degree
        pixels = torch.empty(*self._picture().shape, dtype=torch.uint8).float().div_(255.0)
        return self.view, {"image": pixels[..., :3].contiguous(), "image_idx": 0}

    def _after(self) -> None:
        model = self.model
        assert model.densifier is not None and model._rasterization is not None
        step = model.schedule.at(model.step)
        model.densifier.after_backward(step, model._rasterization, model.gauss_params, self.run.optimizers)
        model._rasterization = None


def layout_of(request: PlanRequest, count: int) -> Layout:
    """Returns how Gaussians are stored in the stage of a run that needs most.

    Args:
        request: the run.
        count: number of Gaussians.
    """
    model: Any = request.config.pipeline.model
    if model.regularization == "none":
        layout = Layout.of(model.memory, count, model.sh_degree)
        return Layout(**{**vars(layout), "neighbours": 0})
    if model.regularization == "planar":
        layout = Layout.of(model.memory, count, model.sh_degree)
        return Layout(**{**vars(layout), "neighbours": 0, "statistics": 0, "planes": True})
    surface = schedule_of(request).surface(model.surface)
    layout = Layout.of(model.memory, count, model.sh_degree, surface.samples)
    return Layout(**{**vars(layout), "neighbours": surface.neighbours, "statistics": 0})
