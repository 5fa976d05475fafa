"""The memory of Gaussian splats in training, in an evaluation picture and in a query."""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from nerfstudio.data.scene_box import SceneBox
from nerfstudio.engine.callbacks import TrainingCallbackAttributes
from torch import Tensor, nn

from f3rm_ext.memory.estimate import Category, MemoryEstimate, Phase
from f3rm_ext.memory.trace import AllocationTracker, Bytes
from f3rm_ext.mesh.bound.model import FREE, BoundModel
from f3rm_ext.planning.gaussians import final_gaussians, refinement_start
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
from f3rm_ext.splat.gaussian_model import GaussianModel
from f3rm_ext.splat.model import SplatModel, SplatModelConfig

FEW = 100
"""Gaussians with which the model is built, before it gets those of the plan."""
FEW_VIEWS = 4
"""Training cameras of the model. A step draws one or two; comparing all of them would take most of the plan's time."""


def estimate_splats(request: PlanRequest, *, arrays: bool = True) -> MemoryEstimate:
    """Returns the peaks of splats; see :func:`f3rm_ext.planning.estimator.estimate_memory`.

    Args:
        arrays: whether arrays of numpy count, which torch's allocator does not see.
    """
    manager: Any = request.config.pipeline.datamanager
    capture, kind = request.capture, request.device.type
    local = request.config.machine.num_devices
    train = CachedImages.from_split(manager, "train", capture.train_images, capture, processes=local)
    run = _TracedSplats(request, final_gaussians(request))
    device: dict[Phase, dict[Category, int]] = {}
    with tracing_run(kind, arrays=arrays) as tracker:
        run.begin(tracker)
        kept = train.on_device(manager.cache_images == "gpu", kind, request.device.memory_bytes, tracker.total)
        copies = 1 + train.changes if kind == "cpu" else int(kept)  # The next window waits beside the present one.
        cached = train.allocate(tracker, copies)
        device["train"] = run.train()
        if request.pictures:
            device["evaluation"] = run.evaluate()
            device["query"] = run.query()
        del cached
    return MemoryEstimate(device, {} if kind == "cpu" else {"images": train.images * (1 + train.changes)})


class _TracedSplats:
    """Splats without values."""

    def __init__(self, request: PlanRequest, count: int) -> None:
        self.request, self.count = request, count
        self.config: Any = copy.deepcopy(request.config)
        options = self.config.pipeline.model
        options.start_from = None
        if isinstance(options, SplatModelConfig):
            options.num_random, options.start_stage, options.densify.max_gaussians = FEW, "vanilla", 0
        capture = request.capture
        self.view, self.queried = make_cameras(capture.width_px, capture.height_px), make_cameras(*QUERY_PX)
        self.view.metadata = {"cam_idx": 0}
        self.trained = make_cameras(capture.width_px, capture.height_px, min(capture.train_images, FEW_VIEWS))
        box = SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))
        self.model: GaussianModel = options.setup(
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
        model, cuda = self.model, self.request.device.type == "cuda"
        rows = self._allocate_mesh(tracker) if isinstance(model, BoundModel) else {}
        for name, value in list(model.gauss_params.items()):
            count = rows.get(name, self.count)
            model.gauss_params[name] = nn.Parameter(torch.empty(count, *value.shape[1:], dtype=value.dtype))
        model.filter_3d = torch.empty(self.count)
        processes = self.request.processes
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
            model.step = (growing.start + growing.every if surface.mode == "none" else surface.first_surface_loss) + 1

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

    def train(self) -> Bytes:
        """Returns the bytes at the peak of a step."""
        return self.run.train(self._batch, self._after)

    def evaluate(self) -> Bytes:
        """Returns the bytes at the peak of an evaluation picture with its metrics."""

        def draw() -> object:
            outputs = self.model.get_outputs(self.view)
            return self.model.get_image_metrics_and_images(outputs, {"image": self._picture()})

        return self.run.draw(draw)

    def query(self) -> Bytes:
        """Returns the bytes at the peak of the viewer's picture of a query, with lifted features."""
        model = self.model
        with self.run.tracker.allocating("features"):
            for spec in self.specs:
                model.lifted.add(LiftedHead(spec, torch.empty(self.count, spec.dim, dtype=torch.float16)))
        return self.run.draw(lambda: draw_query(model, self.queried))

    def _picture(self) -> Tensor:
        return torch.empty(self.request.capture.height_px, self.request.capture.width_px, 3)

    def _batch(self) -> tuple[Any, dict[str, Any]]:
        self.model.current_sh_degree = self.model.config.sh_degree
        pixels = torch.empty(*self._picture().shape, dtype=torch.uint8).float().div_(255.0)
        return self.view, {"image": pixels[..., :3].contiguous(), "image_idx": 0}

    def _after(self) -> None:
        model = self.model
        if not isinstance(model, SplatModel):
            return
        assert model.regularizer is not None and model.densifier is not None and model._rasterization is not None
        if model.regularizer.neighbours.index is not None:
            self.run.tracker.label([model.regularizer.neighbours.index], "buffers")
        step = model.schedule.position(model.step)
        model.densifier.step_post_backward(step, model._rasterization, model.gauss_params, self.run.optimizers)
        model._rasterization = None
