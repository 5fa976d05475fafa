"""Gaussian splats with surface regularisation and mip filters, on nerfstudio's trainer."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes
from torch import Tensor

from f3rm_ext.capture.points import DENSE, SOURCE
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.undistort import shrunk_size
from f3rm_ext.engine import services
from f3rm_ext.engine.random_state import step_seed
from f3rm_ext.engine.ranks import Ranks, world_size
from f3rm_ext.errors import CheckpointError
from f3rm_ext.query.embeddings import Query
from f3rm_ext.query.render import match_pixels
from f3rm_ext.splat.densify import Change, Densifier, FreeSpace, RunOptimizers, make_densifier
from f3rm_ext.splat.gaussian_model import PREFIX, GaussianModel
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.initialization import initial_gaussians, initial_points
from f3rm_ext.splat.memory.conversion import ConversionLoss, convert_harmonics
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.options import SplatOptions
from f3rm_ext.splat.rasterize import Rasterization
from f3rm_ext.splat.regularization import Regularizer, TrainingView, make_regularizer
from f3rm_ext.splat.regularization.multiview import DepthView, NeighbourViews
from f3rm_ext.splat.rendering import SplatScene, render, render_nearby
from f3rm_ext.splat.selection import PackedMasks, choose_gaussians
from f3rm_ext.splat.sharding import collect, count_of_all, deal_out, own_slice, require_one_size
from f3rm_ext.viewer.picking import not_training


@dataclass
class SplatModelConfig(SplatOptions):
    """Options of a splat model."""

    _target: type = field(default_factory=lambda: SplatModel)


class SplatModel(GaussianModel):
    """Free Gaussians, whose number changes in training, and which a regularisation pulls to surfaces.

    Args:
        scene_box: not used.
        seed_points: positions (scene frame) and colours (0 to 255) of the capture's points, if it has any.
        metadata: metadata of the training set; random initial points lie in view of its ``cameras``.
    """

    config: SplatModelConfig
    regularizer: Regularizer | None = None
    densifier: Densifier | None = None
    nearby: NeighbourViews | None = None
    """Which training views are near each other; for planar alone."""
    train_photo: Callable[[int], dict[str, Any] | None] | None = None
    """Gives the photo of a training view, if it is in memory."""
    free_space: FreeSpace | None = None
    """Balls around the training cameras in which Gaussians are removed; None if they are not known, or not wished."""
    _total = 0
    _rasterization: Rasterization | None = None

    def populate_modules(self) -> None:
        self.sharded = self.config.shard_gaussians and world_size() > 1
        self._saved_training: dict[str, Any] = {}
        super().populate_modules()

    def _initial_parameters(self, views: PinholeCameras | None) -> dict[str, Tensor]:
        config, generator = self.config, torch.Generator().manual_seed(self.config.seed)
        metadata = self.kwargs.get("metadata") or {}
        points = initial_points(
            self.kwargs.get("seed_points"),
            metadata.get(SOURCE, "the capture"),
            views,
            config.num_random,
            config.densify.max_gaussians,
            generator,
            metadata.get(DENSE, 0),
            config.densify.free_share,
        )
        self._start_notice, self._starts_at_random = points.described, points.random
        self.free_space = points.free_space
        gaussians = initial_gaussians(points.means, points.rgb, config.sh_degree, 0.1 * self.extent, generator)
        return (gaussians[own_slice()] if self.sharded else gaussians).tensors()

    @property
    def total_gaussians(self) -> int:
        """Number of Gaussians of all processes, as of the last round of densification where they are divided."""
        return self._total if self.sharded else self.num_gaussians

    def count_gaussians(self) -> int:
        """Returns the number of Gaussians of all processes, each of which must call it where they are divided."""
        return count_of_all(self.num_gaussians, self.device) if self.sharded else self.num_gaussians

    def is_growing(self) -> bool:
        last = self.schedule.last_growth()
        return self.config.densify.strategy != "none" and self.schedule.position(self.step) < last

    @property
    def mip(self) -> MipOptions:
        """The anti-aliasing filters, with the compensation that suits the regularisation."""
        return self.config.mip.resolve(flat=self.config.regularization == "planar")

    def set_gaussians(
        self, gaussians: Gaussians, filter_3d: Float[Tensor, " gaussians"] | None = None
    ) -> ConversionLoss:
        """Replaces all Gaussians. The parameters stay the same objects, so optimisers keep working.

        Args:
            filter_3d: standard deviations of their 3D filter; 0 (not filtered yet) by default.

        Returns:
            What the SH degree and the storage of the model lose of the colours.
        """
        self.lifted.clear()
        self.confidence = None
        rest, loss = convert_harmonics(gaussians.features_rest, self.config.sh_degree, self.config.memory.sh_dtype)
        for name, value in replace(gaussians, features_rest=rest).tensors().items():
            dtype = rest.dtype if name == "features_rest" else torch.float32
            self.gauss_params[name].data = value.detach().to(self.device, dtype, copy=True)
        self.filter_3d = torch.zeros(len(gaussians)) if filter_3d is None else filter_3d
        self.filter_3d = self.filter_3d.to(self.device)
        return loss

    # --- edits in the viewer: :class:`~f3rm_ext.query.queryable.Editable` ---------------------------------------------

    def opened_checkpoint(self) -> Path | None:
        """Returns the file that a command of nerfstudio has opened the model from; None in training."""
        return self.config.opened

    def points(self) -> Float[Tensor, "gaussians 3"]:
        """Returns the centres of all Gaussians, scene frame."""
        return self.gaussians.means.detach()

    @torch.no_grad()
    def choose_points(
        self,
        cameras: Cameras,
        query: Query,
        threshold: float,
        inside: Bool[Tensor, " gaussians"],
        on_view: Callable[[], None],
        lock: AbstractContextManager[object],
    ) -> tuple[Bool[Tensor, " gaussians"], Float[Tensor, " gaussians"], Bool[Tensor, " gaussians"]]:
        """Finds the Gaussians that show what a query finds in views; see :mod:`f3rm_ext.splat.selection`."""

        def match(index: int) -> Bool[np.ndarray, "h w"]:
            with lock, not_training(self):
                return match_pixels(self, cameras[index : index + 1], [query], threshold)

        masks = PackedMasks(match, len(cameras), on_view)
        views = PinholeCameras.of(cameras).to(self.device)
        selection = choose_gaussians(self._scene(), views, masks, inside, on_view, lock)
        return selection.chosen, selection.shares, selection.core(self.points())

    # --- training ----------------------------------------------------------------------------------------------------

    def get_training_callbacks(self, attributes: TrainingCallbackAttributes) -> list[TrainingCallback]:
        """Sets up the schedule, densification and regularisation; see the base for the callbacks."""
        assert attributes.trainer is not None and attributes.pipeline is not None
        manager: Any = attributes.pipeline.datamanager
        cameras = PinholeCameras.of(manager.train_dataset.cameras)
        if self.sharded:
            held_out = [] if manager.eval_dataset is None else [PinholeCameras.of(manager.eval_dataset.cameras)]
            require_one_size(cameras, *held_out)
        callbacks = super().get_training_callbacks(attributes)
        # Random Gaussians turn to fog before cameras of full resolution; see ImageDataManager.begin_small.
        if not self.loaded and self._starts_at_random and self.config.start_from is None:
            if hasattr(manager, "begin_small"):
                manager.begin_small(attributes.trainer.config.max_num_iterations)
        options, schedule = self.config.regularization_options, self.schedule
        self.regularizer = make_regularizer(schedule.surface(options))
        self.nearby = NeighbourViews(cameras, self.device) if options.mode == "planar" else None
        self.train_photo = getattr(manager, "train_photo", None)
        self.densifier = make_densifier(
            schedule.densify(self.config.densify), self.extent, schedule.last_growth(), self.sharded
        )
        self._restore_training()
        self._total = self.count_gaussians()
        return callbacks

    def _start(self, manager: Any, views: PinholeCameras) -> str:
        config = self.config
        if config.start_from is None:
            return self._start_notice
        from f3rm_ext.splat.start_from import read_start

        start = read_start(config.start_from, config.start_iteration)
        if not self.mip.filter_3d:
            start = start.as_drawn()
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

    def _change_gaussians(self, step: int, optimizers: RunOptimizers) -> bool:
        assert self.densifier is not None and self.regularizer is not None and self._rasterization is not None
        position, params = self.schedule.position(step), self.gauss_params
        changed = self._follow(self.densifier.step_post_backward(position, self._rasterization, params, optimizers))
        remove = self.regularizer.prune_mask(position, self.gaussians)
        if remove is not None:
            changed |= self._follow(self.densifier.prune(remove, params, optimizers))
        is_round = position % self.densifier.options.every == 0
        if self.free_space is not None and is_round:
            self.free_space = self.free_space.to(self.device)
            too_near = self.free_space.holds(self.gaussians.means.detach())
            changed |= self._follow(self.densifier.prune(too_near, params, optimizers))
        self._rasterization = None
        if self.sharded and is_round:
            self._total = self.count_gaussians()
        return changed

    def _finish(self, step: int, attributes: TrainingCallbackAttributes) -> None:
        """Removes floaters, if so wished."""
        if not self.config.clean:
            return
        trainer, manager = cast(Any, attributes.trainer), cast(Any, attributes.pipeline).datamanager
        kept = services.get("clean_trained")(self, manager, trainer.config, trainer.checkpoint_dir, step)
        assert self.densifier is not None and attributes.optimizers is not None
        self._follow(self.densifier.prune(~kept.to(self.device), self.gauss_params, attributes.optimizers))

    def _follow(self, change: Change | None) -> bool:
        """Carries per-Gaussian data over to a changed set. Returns whether the set changed."""
        if change is None:
            return False
        assert self.regularizer is not None
        self.filter_3d = change.carry(self.filter_3d)
        self.regularizer.after_change(torch.where(change.fresh, -1, change.source))
        return True

    def get_outputs(self, camera: Cameras, obb_box: OrientedBox | None = None) -> dict[str, Any]:  # type: ignore[override]
        """Renders one camera; see the base. In training, also what the regularisation needs."""
        if not self.training:
            return super().get_outputs(camera, obb_box)
        assert self.densifier is not None and self.regularizer is not None
        needs = self.regularizer.needs(self.schedule.position(self.step))
        scene, view = self._scene(), PinholeCameras.to_render(camera, self.device)
        rendered = render(scene, view, normals=needs.normals, planes=needs.planes, absgrad=self.densifier.absgrad)
        self.densifier.step_pre_backward(self.schedule.position(self.step), rendered.rasterization)
        self._rasterization = rendered.rasterization
        other, picture = self._nearby(scene, view, camera) if needs.neighbour else (None, None)
        kept = {"rendered": rendered, "background": scene.background, "view": view, "other": other, "picture": picture}
        return {**self._apply_exposure(rendered.outputs(), scene, camera), **kept}

    def _nearby(
        self, scene: SplatScene, view: PinholeCameras, camera: Cameras
    ) -> tuple[DepthView | None, Float[Tensor, "h w 3"] | None]:
        """Renders depth of planes of a training view near another; also returns its photo, or colours rendered there
        where the photo is not in memory or masked. None if there is none."""
        assert self.nearby is not None and camera.metadata is not None and scene.background is not None
        index = camera.metadata["cam_idx"]
        chosen = self.nearby.draw(index, step_seed(self.config.seed, self.step))
        if chosen is None:
            return None, None
        photo = None if self.train_photo is None else self.train_photo(chosen)
        if photo is None:
            h, w = self.nearby.size_like(chosen, index, int(view.widths[0]))
        else:
            h, w = photo["image"].shape[:2]
        rgb = photo is None or "mask" in photo
        # Depth of planes is as good from half the rows and columns.
        beside = self.nearby.camera(chosen, (h, w) if rgb else shrunk_size(h, w, 0.5))
        depth, colors = render_nearby(scene, beside, rgb=rgb)
        if photo is not None:
            truth = self.true_colors(photo, scene.background)
            colors = truth if colors is None else torch.where(photo["mask"], truth, colors)
        return DepthView(depth, beside.viewmats[0], beside.Ks[0]), colors

    def _regularization_losses(
        self, outputs: dict[str, Any], truth: Float[Tensor, "h w 3"], mask: Tensor | None
    ) -> dict[str, Tensor]:
        losses = {} if self.densifier is None else self.densifier.losses(self.gaussians)
        if self.regularizer is None or self.regularizer.options.mode == "none":
            return losses
        rendered, view = outputs["rendered"], outputs["view"]
        training_view = TrainingView(
            self.gaussians,
            rendered.rasterization.radii > 0,
            view.viewmats[0],
            view.Ks[0],
            self.extent,
            depth=rendered.rasterization.depth,
            alpha=rendered.rasterization.alpha,
            normals=rendered.normals,
            plane_depth=rendered.plane_depth,
            photo=truth,
            other=outputs["other"],
            picture=outputs["picture"],
            filter_3d=self.filter_3d if self.mip.filter_3d and not self.mip.area else None,
            mask=None if mask is None else mask[..., 0],
            generator=torch.Generator(self.device).manual_seed(step_seed(self.config.seed, self.step)),
        )
        return losses | self.regularizer.losses(self.schedule.position(self.step), training_view)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def deal_out(self, state: dict[str, Any]) -> None:
        """Keeps of a checkpoint what this process is to hold; see :func:`f3rm_ext.splat.sharding.deal_out`."""
        if self.sharded:
            deal_out(state)

    def collect(self, state: dict[str, Any], ranks: Ranks) -> None:
        """Completes a checkpoint on rank 0; see :func:`f3rm_ext.splat.sharding.collect`."""
        if self.sharded:
            collect(state, ranks)

    def _take(self, state_dict: Mapping[str, Any]) -> ConversionLoss:
        if PREFIX + "means" not in state_dict:
            raise CheckpointError(
                "The checkpoint holds no Gaussians, so it is of another method: load a run of sugar-ext."
            )
        gaussians = Gaussians.from_tensors({name.removeprefix(PREFIX): value for name, value in state_dict.items()})
        return self.set_gaussians(gaussians, state_dict.get("filter_3d", torch.zeros(len(gaussians))))

    def _about(self) -> dict[str, Any]:
        return {**super()._about(), "regularization": self.config.regularization, "filter_area": self.mip.area}

    def get_extra_state(self) -> dict[str, Any]:
        state = super().get_extra_state()
        if self.densifier is not None and self.regularizer is not None:
            state["densifier"] = self.densifier.state_dict()
            state["regularizer"] = self.regularizer.state_dict()
        if self.free_space is not None:  # A resumed run has no points of stereo to measure it again.
            state["free_space"] = list(self.free_space)
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        self._saved_training = {name: state[name] for name in ("densifier", "regularizer") if name in state}
        self._saved_training["about"] = json.loads(state["about"])
        balls = state.get("free_space") if self.config.densify.free_share else None
        self.free_space = None if balls is None else FreeSpace(*balls)
        self._restore_training()

    def _restore_training(self) -> None:
        """Restores densifier and regulariser once both they and the checkpoint are there, in either order."""
        if "densifier" in self._saved_training and self.densifier is not None and self.regularizer is not None:
            about = self._saved_training["about"]
            self.schedule.require_stage(about["step"], about["regularization"], self.regularizer.options)
            self.densifier.load_state_dict(self._saved_training["densifier"])
            self.regularizer.load_state_dict(self._saved_training["regularizer"])
            self._saved_training = {}
