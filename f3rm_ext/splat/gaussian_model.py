"""The base of models whose parameters are Gaussians: rendering, colour loss, metrics, viewer and checkpoints."""

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor, nn

from f3rm_ext.data.background import PhotoBackground, photo_background
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.uploads import upload
from f3rm_ext.engine.cost import TrainingCost
from f3rm_ext.engine.optimizers import schedule_length
from f3rm_ext.engine.random_state import step_seed
from f3rm_ext.engine.ranks import is_first, sum_over_ranks
from f3rm_ext.memory.options import MemoryOption, RunState
from f3rm_ext.model_components import masks
from f3rm_ext.model_components.exposure import choices, judge, make_exposures, saturate
from f3rm_ext.model_components.image_metrics import ImageMetrics
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.model_components.visualization import comparison_images, feature_images
from f3rm_ext.splat.densify import RunOptimizers
from f3rm_ext.splat.features.heads import LiftedHeads
from f3rm_ext.splat.features.queryable import QueryableSplats
from f3rm_ext.splat.gaussians import Gaussians, degree_from_count
from f3rm_ext.splat.losses import photometric_loss
from f3rm_ext.splat.memory.allocator import clear_cache
from f3rm_ext.splat.memory.conversion import ConversionLoss
from f3rm_ext.splat.mip import MipOptions, smoothing_filter
from f3rm_ext.splat.options import GaussianOptions
from f3rm_ext.splat.rendering import SplatScene, render
from f3rm_ext.splat.schedule import Schedule
from f3rm_ext.utils import threads
from f3rm_ext.viewer.panel import QueryPanel

PREFIX = "gauss_params."
"""Prefix of the parameters in checkpoints, as in splatfacto."""
_POSITIONS = ("means", "vertices", "free_means")
"""Parameter groups of positions."""


class GaussianModel(QueryableSplats):
    """Holds any number of Gaussians; subclasses create them and say what training changes besides their values."""

    config: GaussianOptions
    gauss_params: nn.ParameterDict
    """Tensors of :class:`~f3rm_ext.splat.gaussians.Gaussians` by name, or what a subclass computes them from."""
    filter_3d: Tensor
    """Standard deviations of the 3D filter, (gaussians,), scene units; 0 where not computed yet."""
    background: Tensor
    """Colour behind the Gaussians outside training, (3,)."""
    extent = 1.0
    """Extent of the scene, scene units; see :meth:`~f3rm_ext.data.pinhole_cameras.PinholeCameras.extent`."""
    rate_factors: Mapping[str, float] = {}
    """Factors of the learning rates of positions, which are those of scenes that are no larger than the extent of their
    cameras; see :class:`~f3rm_ext.engine.protocols.ScalesRates`."""
    schedule: Schedule
    """Schedule of the run; set when training starts."""
    loaded = False
    """Whether the Gaussians come from a checkpoint."""
    sharded = False
    """Whether this process holds a part of the Gaussians; see :mod:`f3rm_ext.splat.sharding`."""

    @abstractmethod
    def _initial_parameters(self, views: PinholeCameras | None) -> dict[str, Tensor]:
        """Returns the initial values of the parameters by name."""

    @abstractmethod
    def _start(self, manager: Any, views: PinholeCameras) -> str:
        """Prepares the Gaussians of a run that does not resume. Returns what the log says.

        Args:
            views: the training cameras, on the device of the model.
        """

    @abstractmethod
    def _take(self, state_dict: Mapping[str, Any]) -> ConversionLoss:
        """Replaces all Gaussians by those of a checkpoint. Returns what the SH degree and the storage lose.

        Raises:
            CheckpointError: the checkpoint is of another method.
        """

    def populate_modules(self) -> None:
        """Creates the initial Gaussians."""
        threads.settle(numba=torch.device(self.kwargs.get("device") or "cpu").type == "cpu")
        config = self.config
        metadata = self.kwargs.get("metadata") or {}
        cameras: Cameras | None = metadata.get("cameras")
        views = None if cameras is None else PinholeCameras.of(cameras)
        if views is not None:
            points = self.kwargs.get("seed_points")
            self.extent = views.extent(0.0 if points is None else views.median_depth(points[0]))
            self.rate_factors = dict.fromkeys(_POSITIONS, self.extent / views.extent())
        first = self._initial_parameters(views)
        self.gauss_params = nn.ParameterDict({name: nn.Parameter(value.contiguous()) for name, value in first.items()})
        self.gauss_params["features_rest"].data = self.gauss_params["features_rest"].data.to(config.memory.sh_dtype)
        self.register_buffer("filter_3d", torch.zeros(self.num_gaussians))
        self.register_buffer("confidence", None)
        option = "off" if self.sharded and config.exposure == "auto" else config.exposure
        self.exposures = make_exposures(option, self.num_train_data, metadata)
        self.choices = choices(config.exposure, self.exposures)
        self.background_color = config.background_color
        is_given = self.background_color in ("black", "white")
        measured = PhotoBackground() if is_given else photo_background(metadata)  # reads photos
        if self.background_color == "auto":
            self.background_color = self.choices["background_color"] = measured.choose("random")
        rgb = {"white": (1.0, 1.0, 1.0), "black": (0.0, 0.0, 0.0)}.get(self.background_color, measured.mean_rgb)
        self.register_buffer("background", torch.tensor(rgb))
        self.collider = None
        self.image_metrics = ImageMetrics(config.lpips_weights)
        self.guard = OutputGuard()
        self.lifted = LiftedHeads()
        self.queries = QueryPanel(self)
        self.cost = TrainingCost()
        self.step = 0
        self.current_sh_degree = config.sh_degree
        self._filter_stale = True

    @property
    def gaussians(self) -> Gaussians:
        """The Gaussians as optimised, without the 3D filter."""
        return Gaussians.from_tensors(dict(self.gauss_params.items()))

    @property
    def num_gaussians(self) -> int:
        """Number of Gaussians that this process holds."""
        return len(self.gauss_params["opacities"])

    @property
    def total_gaussians(self) -> int:
        """Number of Gaussians of all processes."""
        return self.num_gaussians

    # Not a property: nerfstudio's viewer reads all properties, and a model that is not trained has no schedule.
    def is_growing(self) -> bool:
        """Returns whether this training will still add Gaussians."""
        return False

    @property
    def mip(self) -> MipOptions:
        """The anti-aliasing filters, with the compensation that suits the Gaussians."""
        return self.config.mip.resolve(flat=False)

    def get_param_groups(self) -> dict[str, list[nn.Parameter]]:
        """Returns one group for each parameter of the Gaussians, and exposure."""
        groups: dict[str, Any] = {name: [parameter] for name, parameter in self.gauss_params.items()}
        if self.exposures is not None:
            groups["exposure"] = list(self.exposures.parameters())
        return groups

    def memory_options(self) -> list[MemoryOption]:
        """Returns options that lower the memory of a training step."""
        return self.config.memory_options(
            RunState(self.device.type, self.num_train_data, gaussians=self.total_gaussians, growing=self.is_growing())
        )

    # --- training ----------------------------------------------------------------------------------------------------

    def get_training_callbacks(self, attributes: TrainingCallbackAttributes) -> list[TrainingCallback]:
        """Sets up the schedule and, unless the run resumes, the Gaussians. Returns one callback before each step, for
        filters and SH degree, and one after it."""
        assert attributes.trainer is not None and attributes.pipeline is not None and attributes.optimizers is not None
        config, optimizers, trainer = self.config, attributes.optimizers, attributes.trainer.config
        manager: Any = attributes.pipeline.datamanager
        views = PinholeCameras.of(manager.train_dataset.cameras).to(self.device)
        self.schedule = config.schedule(schedule_length(trainer))
        if not self.loaded:
            CONSOLE.log(self._start(manager, views), markup=False)
        if self.exposures is not None:
            self.exposures.start(manager.train_dataset.metadata.get("measure_stops"))
        self.lifted.clear()  # Neither features nor confidence follow the Gaussians through training.
        self.confidence = None

        def begin_step(step: int) -> None:
            self.cost.step_pre_backward(self.device)
            self.step = step
            self.current_sh_degree = self.schedule.sh_degree(step, config.sh_degree, config.sh_steps_per_degree)
            if config.mip.due(step, self.schedule.total, self._filter_stale):
                self.filter_3d = smoothing_filter(self.gaussians.means.detach(), views, options=config.mip)
            self._filter_stale = False

        def end_step(step: int) -> None:
            self._filter_stale = self._change_gaussians(step, optimizers)
            if self.exposures is not None:
                self.exposures.project()
            self.cost.step_post_backward(step, self.device)
            clear_cache(step, config.memory.clear_every, self.device)
            if step == trainer.max_num_iterations - 1 and is_first():
                self._finish(step, attributes)
                if hasattr(manager, "train_feature_source"):
                    self.lift_features(manager.train_dataset, manager.train_feature_source())

        before, after = TrainingCallbackLocation.BEFORE_TRAIN_ITERATION, TrainingCallbackLocation.AFTER_TRAIN_ITERATION
        return [TrainingCallback([before], begin_step, 1), TrainingCallback([after], end_step, 1)]

    def _change_gaussians(self, step: int, optimizers: RunOptimizers) -> bool:
        """Adds and removes Gaussians after a step. Returns whether their set changed."""
        return False

    def _finish(self, step: int, attributes: TrainingCallbackAttributes) -> None:
        """Does what there is to do after the last step, before features are lifted."""

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
        scene, view = self._scene(), PinholeCameras.to_render(camera, self.device)
        return self._apply_exposure(render(scene, view).outputs(), scene, camera) | {"background": scene.background}

    def _apply_exposure(self, outputs: dict[str, Tensor], scene: SplatScene, camera: Cameras) -> dict[str, Tensor]:
        """Returns the outputs for a training camera, with colours as its photo shows them."""
        if self.exposures is None:
            return outputs
        assert camera.metadata is not None and scene.background is not None
        behind = (1 - outputs["accumulation"]) * scene.background
        return {**outputs, "rgb": self.exposures(outputs["rgb"], camera.metadata["cam_idx"], behind)}

    def _scene(self) -> SplatScene:
        scene = SplatScene(
            self.gaussians,
            self.mip,
            self.filter_3d,
            sh_degree=self.current_sh_degree,
            background=self._background(),
            near_plane=self.config.near_plane,
            backend=self.config.backend,
            sharded=self.sharded,
        )
        hidden = self.queries.hidden()
        return scene if hidden is None else scene.hide(hidden)

    def _background(self) -> Float[Tensor, "3"]:
        if not self.training or self.background_color != "random":
            return self.background
        generator = torch.Generator().manual_seed(step_seed(self.config.seed, self.step))
        return upload(torch.rand(3, generator=generator), self.device)

    def get_loss_dict(
        self, outputs: dict[str, Any], batch: dict[str, Any], metrics_dict: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Returns ``rgb_loss`` and, in training, the active losses of the regularisation."""
        truth = self.true_colors(batch, outputs.get("background", self.background))
        mask = batch["mask"].to(self.device) if "mask" in batch else None
        rgb = outputs["rgb"] if self.exposures is None else saturate(outputs["rgb"], truth)
        losses = {"rgb_loss": photometric_loss(rgb, truth, mask, self.config.ssim_weight)}
        return losses | self._regularization_losses(outputs, truth, mask) if self.training else losses

    def _regularization_losses(
        self, outputs: dict[str, Any], truth: Float[Tensor, "h w 3"], mask: Tensor | None
    ) -> dict[str, Tensor]:
        """Returns the losses of a training step besides that of colours."""
        return {}

    def get_metrics_dict(self, outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, Tensor]:
        """Returns psnr over the pixels that masks keep (absent if they keep none) and the number of Gaussians."""
        truth = self.true_colors(batch, outputs.get("background", self.background))
        kept = batch.get("mask")
        if "kept" in batch:
            kept = batch["kept"] if kept is None else kept & batch["kept"]
        metrics = {"gaussian_count": torch.tensor(float(self.total_gaussians))}
        if not masks.is_empty(kept):
            kept = None if kept is None else kept.to(self.device)
            metrics["psnr"] = masks.psnr(outputs["rgb"].detach(), truth, kept)
        return metrics

    def true_colors(self, batch: dict[str, Any], background: Float[Tensor, "3"]) -> Float[Tensor, "h w 3"]:
        """Returns the colours of a photo, over a background where it is transparent."""
        image = batch["image"].to(self.device)
        if "alpha" not in batch:
            return image
        alpha = batch["alpha"].to(self.device)
        return alpha * image + (1 - alpha) * background

    @torch.no_grad()
    def get_image_metrics_and_images(
        self, outputs: dict[str, Tensor], batch: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Compares a rendered image with the photo.

        Returns:
            The metrics psnr, ssim, lpips (where its weights are available), l1, gaussian_count, mean_opacity,
            train_peak_memory_mib, train_it_per_s and eval_peak_memory_mib, with those of the features and, with
            modelled exposures, of :func:`~f3rm_ext.model_components.exposure.judge`; and the images
            img (photo | rendered), accumulation, depth and normal. Pixels that ``mask`` leaves out do not count and
            are grey. If it leaves out all pixels, the metrics that compare images are absent.
        """
        truth, mask = self.true_colors(batch, self.background), batch.get("mask")
        outputs, exposure_metrics = judge(self.exposures, outputs, truth, batch)
        metrics = self.image_metrics(outputs["rgb"], truth, mask) | exposure_metrics
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

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Loads any number of Gaussians of any SH degree, and logs what a lower degree loses.

        Raises:
            CheckpointError: the checkpoint is of another method.
        """
        loss = self._take(state_dict)
        ours, theirs = self.config.sh_degree, degree_from_count(state_dict[f"{PREFIX}features_rest"].shape[1])
        if ours != theirs or loss.rounding:
            CONSOLE.log(f"The checkpoint's colours of SH degree {theirs} are opened as degree {ours}: {loss}.")
        self.loaded = True
        about = json.loads(state_dict.get("_extra_state", {}).get("about", "{}"))
        self.lifted.grow(about.get("features", ()), state_dict, "lifted.")
        self.lifted.to(self.device)
        # Torch loads only tensors of equal shape. The Gaussians have been replaced by now, so they load as themselves.
        own = {f"{PREFIX}{name}": value.data for name, value in self.gauss_params.items()}
        own["filter_3d"] = self.filter_3d
        stored = state_dict.get("confidence")
        self.confidence = None if stored is None else stored.to(self.device, copy=True)
        return super().load_state_dict({**state_dict, **own}, *args, **kwargs)

    def _about(self) -> dict[str, Any]:
        """Returns the part of the checkpoint's extra state that is plain JSON."""
        return {
            **self.cost.state(),
            "extent": self.extent,
            "sh_degree_in_use": self.current_sh_degree,
            "step": self.step,
            "filter_stale": self._filter_stale,
            "features": self.lifted.describe(),
        }

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the state that the checkpoint keeps beside the parameters."""
        return {"about": json.dumps(self._about())}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`get_extra_state`."""
        about = json.loads(state["about"])
        self.cost.restore(about)
        self.extent = float(about["extent"])
        self.current_sh_degree = min(int(about["sh_degree_in_use"]), self.config.sh_degree)
        self._filter_stale = bool(about["filter_stale"])
