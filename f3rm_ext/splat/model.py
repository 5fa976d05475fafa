"""Gaussian splats with surface regularisation and mip filters, on nerfstudio's trainer."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor, nn

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.uploads import upload
from f3rm_ext.engine.cost import TrainingCost
from f3rm_ext.engine.optimizers import schedule_length
from f3rm_ext.engine.ranks import is_first, sum_over_ranks, world_size
from f3rm_ext.memory.options import MemoryOption, RunState
from f3rm_ext.model_components import masks
from f3rm_ext.model_components.image_metrics import ImageMetrics
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.model_components.visualization import comparison_images, feature_images
from f3rm_ext.splat.densify import Change, Densifier, make_densifier
from f3rm_ext.splat.features.heads import LiftedHeads
from f3rm_ext.splat.features.queryable import QueryableSplats
from f3rm_ext.splat.gaussian_model import GaussianModel
from f3rm_ext.splat.initialization import initial_gaussians, initial_points
from f3rm_ext.splat.losses import photometric_loss
from f3rm_ext.splat.memory.allocator import CacheCleaner
from f3rm_ext.splat.mip import MipOptions, smoothing_filter
from f3rm_ext.splat.options import SplatOptions
from f3rm_ext.splat.rasterize import Rasterization
from f3rm_ext.splat.regularization import Regularizer, make_regularizer
from f3rm_ext.splat.regularization.multiview import DepthView, NeighbourViews
from f3rm_ext.splat.rendering import RenderSettings, SplatScene, render, render_nearby, render_outputs
from f3rm_ext.splat.schedule import Schedule
from f3rm_ext.splat.sharding import own_slice, require_one_size
from f3rm_ext.utils import threads
from f3rm_ext.viewer.panel import QueryPanel


@dataclass
class SplatModelConfig(SplatOptions):
    """Options of a splat model."""

    _target: type = field(default_factory=lambda: SplatModel)


class SplatModel(QueryableSplats, GaussianModel):
    """Gaussian splats in training and evaluation.

    Args:
        scene_box: not used.
        seed_points: positions (scene frame) and colours (0 to 255) of the capture's points, if it has any.
        metadata: of the training set; random initial points lie in view of its ``cameras``.
    """

    config: SplatModelConfig
    _starts_at_random: bool = False

    def populate_modules(self) -> None:
        """Creates the initial Gaussians."""
        threads.settle(numba=torch.device(self.kwargs.get("device") or "cpu").type == "cpu")
        config = self.config
        metadata = self.kwargs.get("metadata") or {}
        cameras: Cameras | None = metadata.get("cameras")
        views = None if cameras is None else PinholeCameras.of(cameras)
        self.extent = 1.0 if views is None else views.extent()
        self.sharded = config.shard_gaussians and world_size() > 1
        first = self._first_parameters(metadata.get("points3D_source", "the capture"), views)
        self.gauss_params = nn.ParameterDict({name: nn.Parameter(value.contiguous()) for name, value in first.items()})
        self.gauss_params["features_rest"].data = self.gauss_params["features_rest"].data.to(config.memory.sh_dtype)
        self.register_buffer("filter_3d", torch.zeros(self.num_gaussians))
        self.register_buffer("background", torch.tensor(1.0 if config.background_color == "white" else 0.0).repeat(3))
        self.background: Tensor
        self.collider = None
        self.image_metrics = ImageMetrics(config.lpips_weights)
        self.guard = OutputGuard()
        self.lifted = LiftedHeads()
        self.queries = QueryPanel(self)
        self.cost = TrainingCost()
        self.step = 0
        self.current_sh_degree = config.sh_degree
        self.regularizer: Regularizer | None = None
        self.nearby: NeighbourViews | None = None
        self.train_photo: Callable[[int], dict[str, Any] | None] | None = None
        self.densifier: Densifier | None = None
        self._saved_training: dict[str, Any] = {}
        self._rasterization: Rasterization | None = None
        self._filter_stale = True

    def _first_parameters(self, source: str, views: PinholeCameras | None) -> dict[str, Tensor]:
        """Returns the parameters of the initial Gaussians.

        Args:
            source: origin of the capture's points, for the log.
        """
        config, generator = self.config, torch.Generator().manual_seed(self.config.seed)
        points = initial_points(
            self.kwargs.get("seed_points"),
            source,
            views,
            config.num_random,
            config.densify.max_gaussians,
            generator,
        )
        self._start_notice, self._starts_at_random = points.described, points.random
        gaussians = initial_gaussians(points.means, points.rgb, config.sh_degree, 0.1 * self.extent, generator)
        return (gaussians[own_slice()] if self.sharded else gaussians).tensors()

    # --- training ----------------------------------------------------------------------------------------------------

    def get_training_callbacks(self, attributes: TrainingCallbackAttributes) -> list[TrainingCallback]:
        """Sets up the schedule. Returns one callback before each step, for filters and SH degree, and one after it, for
        densification, pruning and the neighbours."""
        assert attributes.trainer is not None and attributes.pipeline is not None and attributes.optimizers is not None
        config, optimizers = self.config, attributes.optimizers
        manager: Any = attributes.pipeline.datamanager
        cameras = PinholeCameras.of(manager.train_dataset.cameras)
        views = cameras.to(self.device)
        self.extent = views.extent()
        if self.sharded:
            held_out = [] if manager.eval_dataset is None else [PinholeCameras.of(manager.eval_dataset.cameras)]
            require_one_size(views, *held_out)
        last_step = attributes.trainer.config.max_num_iterations - 1
        options = config.regularization_options
        schedule = Schedule.from_options(schedule_length(attributes.trainer.config), options, config.start_stage)
        if not self.loaded:
            CONSOLE.log(self._start(manager, views), markup=False)
            if self._starts_at_random and config.start_from is None and hasattr(manager, "begin_small"):
                manager.begin_small(last_step + 1)
        self.regularizer = make_regularizer(schedule.surface(options))
        self.nearby = NeighbourViews(cameras, self.extent, self.device) if options.mode == "planar" else None
        self.train_photo = getattr(manager, "train_photo", None)
        self.densifier = make_densifier(
            schedule.densify(config.densify), self.extent, schedule.last_growth(), self.sharded
        )
        self.schedule = schedule
        self._restore_training()
        self.lifted.clear()  # Features do not follow the Gaussians through training.
        clearing = CacheCleaner(config.memory.clear_every)

        def begin_step(step: int) -> None:
            self.cost.step_pre_backward(self.device)
            self.step = step
            if self.sharded and not self._total:
                self._total = self.count_gaussians()
            self.current_sh_degree = schedule.sh_degree(step, config.sh_degree, config.sh_steps_per_degree)
            if config.mip.due(step, schedule.total, self._filter_stale):
                self.filter_3d = smoothing_filter(self.gaussians.means.detach(), *views, options=config.mip)
            self._filter_stale = False

        def end_step(step: int) -> None:
            assert self.densifier is not None and self.regularizer is not None and self._rasterization is not None
            params = self.gauss_params
            change = self.densifier.step_post_backward(schedule.position(step), self._rasterization, params, optimizers)
            self._filter_stale = self._follow(change)
            idle = self.regularizer.options.mode == "none"
            remove = None if idle else self.regularizer.prune_mask(schedule.position(step), self.gaussians)
            if remove is not None:
                self._filter_stale |= self._follow(self.densifier.prune(remove, params, optimizers))
            self._rasterization = None
            if self.sharded and schedule.position(step) % self.densifier.options.every == 0:
                self._total = self.count_gaussians()
            self.cost.step_post_backward(step, self.device)
            clearing.clear(step, self.device)
            if step == last_step and hasattr(manager, "train_feature_source") and is_first():
                self.lift_features(manager.train_dataset, manager.train_feature_source())

        locations = (TrainingCallbackLocation.BEFORE_TRAIN_ITERATION, TrainingCallbackLocation.AFTER_TRAIN_ITERATION)
        return [
            TrainingCallback([location], call, update_every_num_iters=1)
            for location, call in zip(locations, (begin_step, end_step), strict=True)
        ]

    def _start(self, manager: Any, views: PinholeCameras) -> str:
        """Replaces the initial Gaussians by those to start from, if any are given. Returns what the log says.

        Args:
            views: the training cameras, on the device of the model.
        """
        config = self.config
        if config.start_from is None:
            return self._start_notice
        from f3rm_ext.splat.start_from import read_start

        start = read_start(config.start_from, config.start_iteration)
        if self.sharded:
            start = replace(start, gaussians=start.gaussians[own_slice()])
        start = start.to_scene(getattr(manager, "train_dataparser_outputs", None), config.start_frame)
        loss = self.set_gaussians(start.prepare_gaussians(views, self.mip))
        return (
            f"Starting from {self.count_gaussians()} Gaussians of {start.source}, which lie in the frame of the "
            f"{start.frame}: {loss}."
        )

    def gather_statistics(self) -> None:
        """Brings the statistics of densification of all processes to rank 0; see :class:`Densifier`."""
        if self.densifier is not None:
            self.densifier.gather_statistics()

    def memory_options(self) -> list[MemoryOption]:
        """Returns options that lower the memory of a training step."""
        growing = (
            self.config.densify.strategy != "none" and self.schedule.position(self.step) < self.schedule.last_growth()
        )
        state = RunState(self.device.type, self.num_train_data, gaussians=self.total_gaussians, growing=growing)
        return self.config.memory_options(state)

    def _follow(self, change: Change) -> bool:
        """Carries per-Gaussian data over to a changed set. Returns whether the set changed."""
        if not change.rows_changed:
            return False
        assert self.regularizer is not None and change.source is not None and change.fresh is not None
        self.filter_3d = change.carry(self.filter_3d)
        self.regularizer.after_change(torch.where(change.fresh, -1, change.source))
        return True

    def get_outputs(self, camera: Cameras, obb_box: OrientedBox | None = None) -> dict[str, Any]:  # type: ignore[override]
        """Renders one camera.

        Args:
            camera: one pinhole camera, shape (1,).
            obb_box: Gaussians whose centres lie outside are left out; used outside training only.

        Returns:
            ``rgb`` (h, w, 3), ``depth`` (h, w, 1; along the camera's axis, divided by the accumulation) and
            ``accumulation`` (h, w, 1); outside training also ``plane_depth`` (h, w, 1), and ``normal`` and
            ``normal_from_depth`` as colours, see :func:`~f3rm_ext.splat.rendering.render_outputs`.
        """
        if not self.training:
            return self.render_with_features(camera, {}, obb_box)
        assert self.densifier is not None and self.regularizer is not None
        needs = self.regularizer.needs(self.schedule.position(self.step))
        background = self._training_background()
        view = PinholeCameras.to_render(camera, self.device)
        rendered = render(
            self._scene(),
            view,
            self.current_sh_degree,
            background,
            self._settings,
            normals=needs.normals,
            planes=needs.planes,
            absgrad=self.densifier.absgrad,
        )
        self.densifier.step_pre_backward(self.schedule.position(self.step), rendered.rasterization)
        self._rasterization = rendered.rasterization
        other, picture = self._nearby(camera, view, background) if needs.neighbour else (None, None)
        kept = {"rendered": rendered, "background": background, "view": view, "other": other, "picture": picture}
        return {**rendered.outputs(), **kept}

    def _nearby(
        self, camera: Cameras, view: PinholeCameras, background: Float[Tensor, "3"]
    ) -> tuple[DepthView | None, Float[Tensor, "h w 3"] | None]:
        """Renders depth of planes of a training view near another; also returns its photo, or colours rendered there
        where the photo is not in memory or masked. None if there is none."""
        assert self.nearby is not None and camera.metadata is not None
        index = camera.metadata["cam_idx"]
        chosen = self.nearby.draw(index, (self.config.seed << 32) + self.step)
        if chosen is None:
            return None, None
        photo = None if self.train_photo is None else self.train_photo(chosen)
        if photo is None:
            h, w = self.nearby.size_like(chosen, index, int(view.widths[0]))
        else:
            h, w = photo["image"].shape[:2]
        beside = self.nearby.camera(chosen, (h, w))
        depth, colors = render_nearby(
            self._scene(),
            beside,
            self.current_sh_degree,
            background,
            self._settings,
            rgb=photo is None or "mask" in photo,
        )
        if photo is not None:
            truth = self._truth(photo, background)
            colors = truth if colors is None else torch.where(photo["mask"], truth, colors)
        return DepthView(depth, beside.viewmats[0], beside.Ks[0]), colors

    def _render(self, camera: Cameras, obb_box: OrientedBox | None = None) -> dict[str, Tensor]:
        view = PinholeCameras.to_render(camera, self.device)
        return render_outputs(
            self._scene(), view, self.current_sh_degree, self.background, self._settings, self.guard, obb_box
        )

    @property
    def mip(self) -> MipOptions:
        """The anti-aliasing filters, with the compensation that suits the regularisation."""
        return self.config.mip.resolve(flat=self.config.regularization == "planar")

    def _scene(self) -> SplatScene:
        return SplatScene(self.gaussians, self.filter_3d, self.mip)

    @property
    def _settings(self) -> RenderSettings:
        return RenderSettings(self.config.near_plane, self.config.backend, self.sharded)

    def _training_background(self) -> Float[Tensor, "3"]:
        if self.config.background_color != "random":
            return self.background
        generator = torch.Generator().manual_seed((self.config.seed << 32) + self.step)
        return upload(torch.rand(3, generator=generator), self.device)

    def get_loss_dict(
        self, outputs: dict[str, Any], batch: dict[str, Any], metrics_dict: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Returns ``rgb_loss`` and the active losses of the regularisation."""
        truth = self._truth(batch, outputs.get("background", self.background))
        mask = batch["mask"].to(self.device) if "mask" in batch else None
        losses = {"rgb_loss": photometric_loss(outputs["rgb"], truth, mask, self.config.ssim_weight)}
        if not self.training or self.regularizer is None or self.regularizer.options.mode == "none":
            return losses
        rendered, view = outputs["rendered"], outputs["view"]
        step = self.schedule.position(self.step)
        generator = torch.Generator(self.device).manual_seed((self.config.seed << 32) + self.step)
        regularisers = self.regularizer.losses(
            step,
            self.gaussians,
            rendered.rasterization.radii > 0,
            view.viewmats[0],
            view.Ks[0],
            extent=self.extent,
            depth=rendered.rasterization.depth,
            alpha=rendered.rasterization.alpha,
            normals=rendered.normals,
            plane_depth=rendered.plane_depth,
            photo=truth,
            other=outputs["other"],
            picture=outputs["picture"],
            filter_3d=self.filter_3d if self.mip.filter_3d and not self.mip.area else None,
            mask=None if mask is None else mask[..., 0],
            generator=generator,
        )
        return losses | regularisers

    def get_metrics_dict(self, outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, Tensor]:
        """Returns psnr over the pixels that masks keep (absent if they keep none) and the number of Gaussians."""
        truth = self._truth(batch, outputs.get("background", self.background))
        kept = batch.get("mask")
        if "kept" in batch:
            kept = batch["kept"] if kept is None else kept & batch["kept"]
        metrics = {"gaussian_count": torch.tensor(float(self.total_gaussians))}
        if not masks.is_empty(kept):
            kept = None if kept is None else kept.to(self.device)
            metrics["psnr"] = masks.psnr(outputs["rgb"].detach(), truth, kept)
        return metrics

    def _truth(self, batch: dict[str, Any], background: Float[Tensor, "3"]) -> Float[Tensor, "h w 3"]:
        image = batch["image"].to(self.device)
        if "alpha" not in batch:
            return image
        alpha = batch["alpha"].to(self.device)
        return alpha * image + (1 - alpha) * background

    # --- rendering and evaluation ------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_image_metrics_and_images(
        self, outputs: dict[str, Tensor], batch: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Compares a rendered image with the photo.

        Returns:
            The metrics psnr, ssim, lpips (where its weights are available), l1, gaussian_count, mean_opacity,
            train_peak_memory_mib, train_it_per_s and eval_peak_memory_mib, with those of the features; and the images
            img (photo | rendered), accumulation, depth and normal. Pixels that ``mask`` leaves out do not count and
            are grey. If it leaves out all pixels, the metrics that compare images are absent.
        """
        truth, mask = self._truth(batch, self.background), batch.get("mask")
        metrics = self.image_metrics(outputs["rgb"], truth, mask)
        metrics["gaussian_count"] = float(self.total_gaussians)
        opacities = self.gaussians.alphas().sum()
        if self.sharded:
            sum_over_ranks(opacities)
        metrics["mean_opacity"] = float(opacities) / self.total_gaussians
        metrics.update(self.feature_metrics(batch))
        metrics.update(self.cost.metrics(self.device))
        images = comparison_images(outputs, truth, mask)
        return metrics, images | masks.grey_out(feature_images(self, outputs, batch), mask)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the state that the checkpoint keeps beside the parameters."""
        about = {
            **self.cost.state(),
            "extent": self.extent,
            "sh_degree_in_use": self.current_sh_degree,
            "regularization": self.config.regularization,
            "step": self.step,
            "filter_stale": self._filter_stale,
            "features": self.lifted.describe(),
        }
        state: dict[str, Any] = {"about": json.dumps(about)}
        if self.densifier is not None and self.regularizer is not None:
            state["densifier"] = self.densifier.state_dict()
            state["regularizer"] = self.regularizer.state_dict()
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`get_extra_state`."""
        about = json.loads(state["about"])
        self.cost.restore(about)
        self.extent = float(about["extent"])
        self.current_sh_degree = min(int(about["sh_degree_in_use"]), self.config.sh_degree)
        self._filter_stale = bool(about["filter_stale"])
        self._saved_training = {name: state[name] for name in ("densifier", "regularizer") if name in state}
        self._saved_training["about"] = about
        self._restore_training()

    def _restore_training(self) -> None:
        """Restores densifier and regulariser once both they and the checkpoint are there, in either order."""
        if "densifier" in self._saved_training and self.densifier is not None and self.regularizer is not None:
            about = self._saved_training["about"]
            self.schedule.require_stage(about["step"], about["regularization"], self.regularizer.options)
            self.densifier.load_state_dict(self._saved_training["densifier"])
            self.regularizer.load_state_dict(self._saved_training["regularizer"])
            self._saved_training = {}
