"""Gaussian splats with surface regularisation and mip filters, on nerfstudio's trainer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import tyro
from jaxtyping import Float
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.models.base_model import Model
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor, nn

from f3rm_ext import threads
from f3rm_ext.engine.cost import TrainingCost, reset_peak
from f3rm_ext.engine.ns_export import check_export
from f3rm_ext.engine.optimizers import schedule_length
from f3rm_ext.engine.options import OwnModelConfig
from f3rm_ext.engine.shortage import Lever
from f3rm_ext.errors import CheckpointError, ConfigError
from f3rm_ext.model_components import masks
from f3rm_ext.model_components.image_metrics import ImageMetrics
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.model_components.visualization import comparison_images, feature_images
from f3rm_ext.splat import rendering as drawing
from f3rm_ext.splat.cameras import PinholeCameras
from f3rm_ext.splat.densify import Change, Densifier, DensifyOptions, make_densifier
from f3rm_ext.splat.features.heads import LiftedHeads
from f3rm_ext.splat.features.queryable import QueryableSplats
from f3rm_ext.splat.gaussians import MAX_SH_DEGREE, Gaussians
from f3rm_ext.splat.initialization import first_places, initial_gaussians
from f3rm_ext.splat.losses import photometric_loss
from f3rm_ext.splat.memory.allocator import CacheClearing
from f3rm_ext.splat.memory.conversion import Loss, converted
from f3rm_ext.splat.memory.levers import levers
from f3rm_ext.splat.memory.options import MemoryOptions
from f3rm_ext.splat.mip import MipOptions, smoothing_filter
from f3rm_ext.splat.rasterize import Backend, Rendered
from f3rm_ext.splat.schedule import Schedule, Stage
from f3rm_ext.splat.surface.options import Mode, RegularizationOptions
from f3rm_ext.splat.surface.regularizer import Regularizer
from f3rm_ext.splat.trainer_options import fit_trainer
from f3rm_ext.viewer.panel import QueryPanel

PREFIX = "gauss_params."
"""Of the parameters in checkpoints; splatfacto's."""


@dataclass
class SplatModelConfig(OwnModelConfig):
    """Splats aligned to surfaces."""

    _target: type = field(default_factory=lambda: SplatModel)
    regularization: Annotated[
        Literal["none", "density", "sdf", "dn-consistency", "dn_consistency"],
        tyro.conf.arg(aliases=["--regularization"]),
    ] = "dn-consistency"
    """What draws Gaussians to surfaces after the first half of the run. density: for objects, quick; sdf: for
    unbounded scenes; dn-consistency (or dn_consistency): density and agreement of normals with depth, slowest and
    smoothest; none."""
    surface: RegularizationOptions = field(default_factory=RegularizationOptions)
    """Constants of the regularisation; its steps are for a run of 15 000 and scale with the run."""
    densify: DensifyOptions = field(default_factory=DensifyOptions)
    """How Gaussians are added and removed; steps are for a run of 15 000 and scale with the run."""
    mip: MipOptions = field(default_factory=MipOptions)
    """Filters against aliasing."""

    start_from: Path | None = None
    """Splats to begin with: .ply, .spz, .splat, a checkpoint of this method or of splatfacto (.ckpt) or of SuGaR's
    coarse stage (.pt), or an output folder of 3DGS or SuGaR."""
    start_iteration: int | None = None
    """Which iteration of a folder that --pipeline.model.start-from names, ≥ 0; the newest by default."""
    start_frame: Literal["auto", "scene", "capture"] = "auto"
    """Frame of the splats to begin with. scene: nerfstudio's, as exports of this package and of splatfacto; capture:
    that of the capture's own poses before nerfstudio changed anything, e.g. COLMAP's. auto is capture for output
    folders of 3DGS and for checkpoints of SuGaR, else scene."""
    start_stage: Stage = "vanilla"
    """Stage to begin with; entropy and regularized need --pipeline.model.start-from."""
    memory: Annotated[MemoryOptions, tyro.conf.arg(name="")] = field(default_factory=MemoryOptions)
    """What is stored in how many bytes."""
    num_random: int = 50_000
    """Gaussians to begin with at random places where the capture has no points, or next to none, 1 or more."""
    sh_degree: Annotated[int, tyro.conf.arg(aliases=["--sh-degree"])] = 3
    """Degree of the colours' dependence on the direction, 0 (none) to 3."""
    sh_steps_per_degree: int = 1000
    """Steps after which the next degree of the colours is used, 1 or more."""
    background_color: Literal["random", "black", "white"] = "random"
    """What is behind the splats and behind transparent pixels of the images; random is black outside training."""
    ssim_weight: float = 0.2
    """Weight of 1 − SSIM in the loss of the picture, 0 to 1; the rest is the mean absolute difference."""
    near_plane: float = 0.01
    """Gaussians whose centres are nearer to a camera are not drawn, scene units, > 0."""
    backend: Backend = "auto"
    """What draws: gsplat (CUDA), numba (CPU), torch (anywhere, very slow), or auto, the one for the device."""
    seed: int = 0
    """Seed of the initial Gaussians and of the points at which surfaces are compared."""
    lpips_weights: Path | None = None
    """LPIPS weights file for evaluation off-line; by default torchvision's AlexNet, from TORCH_HOME or the network."""
    # Pictures of splats are drawn whole.
    eval_num_rays_per_chunk: tyro.conf.Suppress[int] = 4096

    def __post_init__(self) -> None:
        if self.regularization == "dn_consistency":
            self.regularization = "dn-consistency"
        if not 0 <= self.sh_degree <= MAX_SH_DEGREE:
            raise ConfigError(f"sh-degree is {self.sh_degree}, but colours have a degree from 0 to {MAX_SH_DEGREE}.")
        for name in ("num_random", "sh_steps_per_degree"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '-')} is {getattr(self, name)}, but has to be at least 1.")
        if not 0 <= self.ssim_weight <= 1:
            raise ConfigError(f"ssim-weight is {self.ssim_weight}, but it is a share: use 0 to 1.")
        if not self.near_plane > 0:
            raise ConfigError(f"near-plane is {self.near_plane}, but has to be above 0: 0.01 is usual.")
        if self.start_iteration is not None and (self.start_from is None or self.start_iteration < 0):
            raise ConfigError(
                f"start-iteration is {self.start_iteration}, but it has to be one, from 0 up, of the folder that "
                "--pipeline.model.start-from names: leave it out for the newest."
            )
        if self.start_stage != "vanilla" and self.start_from is None:
            raise ConfigError(
                f"start-stage {self.start_stage} continues with splats that are there already, and there are none: "
                "give them by --pipeline.model.start-from, or begin with vanilla."
            )

    def check_export(self, command: str, argv: Sequence[str]) -> None:
        """Refuses what ns-export cannot do with splats; see :func:`~f3rm_ext.engine.ns_export.check_export`."""
        check_export(command, argv, splats=True)

    def fit_optimizers(self, optimizers: dict[str, Any]) -> None:
        """Has the optimisers of a run keep what they keep as the memory options say.

        Args:
            optimizers: the trainer's, by parameter group; changed in place.
        """
        self.memory.fit(optimizers["features_rest"]["optimizer"])

    def fit_trainer(self, trainer: TrainerConfig) -> None:
        """Checks and adapts the trainer's options before anything is built; asks CUDA for what it takes at its start.

        Args:
            trainer: its options, changed in place.

        Raises:
            ConfigError: splats cannot be trained like this on this machine.
        """
        fit_trainer(trainer, self.memory, self.backend)


class SplatModel(QueryableSplats, Model):
    """Gaussians, and what a run does to them.

    Args:
        config: the options.
        scene_box: not looked at.
        num_train_data: number of training images.
        seed_points: places and colours (0 to 255) of the capture's points, scene frame; else places are drawn.
        metadata: of the training set; ``cameras`` says where places are drawn.
    """

    config: SplatModelConfig

    def populate_modules(self) -> None:
        """Places the first Gaussians."""
        threads.settle(numba=torch.device(self.kwargs.get("device") or "cpu").type == "cpu")
        config = self.config
        metadata = self.kwargs.get("metadata") or {}
        cameras: Cameras | None = metadata.get("cameras")
        self.extent = 1.0 if cameras is None else PinholeCameras.of(cameras).extent()
        self.gauss_params = nn.ParameterDict(
            {name: nn.Parameter(value) for name, value in self._first_gaussians(cameras).tensors().items()}
        )
        self.gauss_params["features_rest"].data = self.gauss_params["features_rest"].data.to(config.memory.sh_dtype)
        self.register_buffer("filter_3d", torch.zeros(self.num_gaussians))
        self.filter_3d: Tensor
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
        self.densifier: Densifier | None = None
        self._saved_training: dict[str, Any] = {}
        self._drawn: Rendered | None = None
        self._filter_stale = True
        self._loaded = False

    def _first_gaussians(self, cameras: Cameras | None) -> Gaussians:
        config = self.config
        generator = torch.Generator().manual_seed(config.seed)
        places = first_places(
            self.kwargs.get("seed_points"),
            (self.kwargs.get("metadata") or {}).get("points3D_source", "the capture"),
            None if cameras is None else PinholeCameras.of(cameras),
            config.num_random,
            config.densify.max_gaussians,
            generator,
        )
        self._beginning = places.described
        return initial_gaussians(places.means, places.rgb, config.sh_degree, 0.1 * self.extent, generator)

    # --- the Gaussians -----------------------------------------------------------------------------------------------

    @property
    def gaussians(self) -> Gaussians:
        """The Gaussians as they are optimised, without the 3D filter."""
        return Gaussians.of(dict(self.gauss_params.items()))

    @property
    def num_gaussians(self) -> int:
        """How many there are."""
        return len(self.gauss_params["means"])

    def set_gaussians(self, gaussians: Gaussians, filter_3d: Float[Tensor, " gaussians"] | None = None) -> Loss:
        """Replaces all Gaussians; parameters stay the same objects, so optimisers go on with them.

        Args:
            gaussians: any number of them; colours are brought to the model's SH degree.
            filter_3d: standard deviations of their 3D filter; 0 (not filtered yet) by default.

        Returns:
            What the model's SH degree and storage lose of their colours.
        """
        self.lifted.clear()
        rest, loss = converted(gaussians.features_rest, self.config.sh_degree, self.config.memory.sh_dtype)
        for name, value in replace(gaussians, features_rest=rest).tensors().items():
            dtype = rest.dtype if name == "features_rest" else torch.float32
            self.gauss_params[name].data = value.detach().to(self.device, dtype, copy=True)
        self.filter_3d = torch.zeros(len(gaussians)) if filter_3d is None else filter_3d
        self.filter_3d = self.filter_3d.to(self.device)
        return loss

    def get_param_groups(self) -> dict[str, list[nn.Parameter]]:
        """One group for each tensor of the Gaussians."""
        return {name: [parameter] for name, parameter in self.gauss_params.items()}  # type: ignore[misc]

    # --- training ----------------------------------------------------------------------------------------------------

    def get_training_callbacks(self, attributes: TrainingCallbackAttributes) -> list[TrainingCallback]:
        """Sets up the schedule; before each step filters and SH degree, after it growth, pruning and neighbours."""
        assert attributes.trainer is not None and attributes.pipeline is not None and attributes.optimizers is not None
        config, optimizers = self.config, attributes.optimizers
        manager: Any = attributes.pipeline.datamanager
        views = PinholeCameras.of(manager.train_dataset.cameras).to(self.device)
        self.extent = views.extent()
        last_step = attributes.trainer.config.max_num_iterations - 1
        schedule = Schedule.of(schedule_length(attributes.trainer.config), config.surface, config.start_stage)
        if config.start_from is not None and not self._loaded:
            from f3rm_ext.splat.start_from import read_start

            start = read_start(config.start_from, config.start_iteration)
            start = start.in_scene(getattr(manager, "train_dataparser_outputs", None), config.start_frame)
            loss = self.set_gaussians(start.seen_by(views, config.mip))
            CONSOLE.log(
                f"Starting from {self.num_gaussians} Gaussians of {start.source}, which lie in the frame of the "
                f"{start.frame}: {loss}.",
                markup=False,
            )
        elif not self._loaded:
            CONSOLE.log(self._beginning, markup=False)
        surface = schedule.surface(config.surface)
        surface.mode = cast(Mode, config.regularization)
        self.regularizer = Regularizer(surface)
        self.densifier = make_densifier(schedule.densify(config.densify), self.extent, schedule.last_growth())
        self.schedule = schedule
        self._restore_training()
        self.lifted.clear()  # Training goes on, and they would be those of other Gaussians.
        clearing = CacheClearing(config.memory.clear_every)

        def before(step: int) -> None:
            self.cost.before_step(self.device)
            self.step = step
            self.current_sh_degree = schedule.sh_degree(step, config.sh_degree, config.sh_steps_per_degree)
            if config.mip.due(step, schedule.total, self._filter_stale):
                self.filter_3d = smoothing_filter(self.gauss_params["means"].detach(), *views, options=config.mip)
            self._filter_stale = False

        def after(step: int) -> None:
            assert self.densifier is not None and self.regularizer is not None and self._drawn is not None
            params = self.gauss_params
            change = self.densifier.after_backward(schedule.at(step), self._drawn, params, optimizers)
            self._filter_stale = self._follow(change)
            remove = self.regularizer.prune_mask(schedule.at(step), self.gaussians)
            if remove is not None:
                self._filter_stale |= self._follow(self.densifier.prune(remove, params, optimizers))
            self._drawn = None
            self.cost.after_step(step, self.device)
            clearing.after_step(step, self.device)
            if step == last_step and hasattr(manager, "train_feature_source"):
                self.lift_features(manager.train_dataset, manager.train_feature_source())

        locations = (TrainingCallbackLocation.BEFORE_TRAIN_ITERATION, TrainingCallbackLocation.AFTER_TRAIN_ITERATION)
        return [
            TrainingCallback([location], call, update_every_num_iters=1)
            for location, call in zip(locations, (before, after), strict=True)
        ]

    def memory_levers(self) -> list[Lever]:
        """Options that lower what a training step takes."""
        growing = self.schedule.at(self.step) < self.schedule.last_growth()
        return list(levers(self.config, self.device.type, self.num_gaussians, growing))

    def _follow(self, change: Change) -> bool:
        """Has what is kept by Gaussian follow a change of their set. Returns whether there was one."""
        if not change.rows_changed:
            return False
        assert self.regularizer is not None and change.source is not None and change.fresh is not None
        self.filter_3d = change.carry(self.filter_3d)
        self.regularizer.after_change(torch.where(change.fresh, -1, change.source))
        return True

    def get_outputs(self, camera: Cameras, obb_box: OrientedBox | None = None) -> dict[str, Any]:  # type: ignore[override]
        """Draws one camera.

        Args:
            camera: of shape (1,), a pinhole camera.
            obb_box: what lies outside is not drawn.

        Returns:
            ``rgb`` (h, w, 3), ``depth`` (h, w, 1; along the camera's axis, divided by the accumulation) and
            ``accumulation`` (h, w, 1); outside training also ``normal`` and ``normal_from_depth`` as colours.
        """
        if not self.training:
            return self.seen(camera, {}, obb_box)
        view, scene = PinholeCameras.of(camera.to(self.device)), self._scene()
        assert self.densifier is not None and self.regularizer is not None
        needs = self.regularizer.needs(self.schedule.at(self.step))
        background = self._training_background()
        drawn = drawing.draw(
            scene,
            view,
            self.current_sh_degree,
            background,
            self._how,
            normals=needs.normals,
            absgrad=self.densifier.absgrad,
        )
        self.densifier.before_backward(self.schedule.at(self.step), drawn.screen)
        self._drawn = drawn.screen
        outputs = drawn.outputs()
        outputs.update(drawn=drawn, background=background, view=view)
        return outputs

    def _look(self, camera: Cameras, obb_box: OrientedBox | None = None) -> dict[str, Tensor]:
        view = PinholeCameras.of(camera.to(self.device))
        return drawing.pictures(
            self._scene(), view, self.current_sh_degree, self.background, self._how, self.guard, obb_box
        )

    def _scene(self) -> drawing.Scene:
        return drawing.Scene(self.gaussians, self.filter_3d, self.config.mip)

    @property
    def _how(self) -> drawing.RenderSettings:
        return drawing.RenderSettings(self.config.near_plane, self.config.backend)

    def _training_background(self) -> Float[Tensor, "3"]:
        if self.config.background_color != "random":
            return self.background
        generator = torch.Generator().manual_seed((self.config.seed << 32) + self.step)
        return torch.rand(3, generator=generator).to(self.device)

    def get_loss_dict(
        self, outputs: dict[str, Any], batch: dict[str, Any], metrics_dict: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Losses: rgb_loss, and those of the regularisation that are at work."""
        truth = self._truth(batch, outputs.get("background", self.background))
        mask = batch["mask"].to(self.device) if "mask" in batch else None
        losses = {"rgb_loss": photometric_loss(outputs["rgb"], truth, mask, self.config.ssim_weight)}
        if not self.training or self.regularizer is None:
            return losses
        drawn, view = outputs["drawn"], outputs["view"]
        step = self.schedule.at(self.step)
        generator = torch.Generator(self.device).manual_seed((self.config.seed << 32) + self.step)
        regularisers = self.regularizer.losses(
            step,
            self.gaussians,
            drawn.screen.radii > 0,
            view.viewmats[0],
            view.Ks[0],
            extent=self.extent,
            depth=drawn.screen.depth,
            alpha=drawn.screen.alpha,
            normals=drawn.normals,
            mask=None if mask is None else mask[..., 0],
            generator=generator,
        )
        return losses | regularisers

    def get_metrics_dict(self, outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, Tensor]:
        """psnr of what masks keep (absent where they keep nothing) and the number of Gaussians."""
        truth = self._truth(batch, outputs.get("background", self.background))
        kept = batch.get("mask")
        if "kept" in batch:
            kept = batch["kept"] if kept is None else kept & batch["kept"]
        metrics = {"gaussian_count": torch.tensor(float(self.num_gaussians))}
        if not masks.keeps_nothing(kept):
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
    def get_outputs_for_camera(self, camera: Cameras, obb_box: OrientedBox | None = None) -> dict[str, Tensor]:
        """Draws an image; on the viewer's render thread a failure gives a black image instead of a frozen page."""
        reset_peak(self.device)
        return self.guard.picture(
            camera, self.device, lambda: self.seen(camera, self.queries.extra_outputs(camera, obb_box), obb_box)
        )

    @torch.no_grad()
    def get_image_metrics_and_images(
        self, outputs: dict[str, Tensor], batch: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Metrics of a drawn image against the true one, and pictures to look at.

        Returns:
            psnr, ssim, lpips (where its weights can be had), l1, gaussian_count, mean_opacity,
            train_peak_memory_mib, train_it_per_s and eval_peak_memory_mib; and the images img (truth | drawn),
            accumulation, depth and the normals. Pixels that ``mask`` leaves out count for nothing and are grey; where
            it leaves out all of them the metrics of pictures are absent.
        """
        truth, mask = self._truth(batch, self.background), batch.get("mask")
        metrics = self.image_metrics(outputs["rgb"], truth, mask)
        metrics["gaussian_count"] = float(self.num_gaussians)
        metrics["mean_opacity"] = float(self.gaussians.alphas().mean())
        metrics.update(self.feature_metrics(batch))
        metrics.update(self.cost.metrics(self.device))
        images = comparison_images(outputs, truth, mask)
        return metrics, images | masks.shown(feature_images(self, outputs, batch), mask)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """What the checkpoint keeps beside parameters: numbers and tensors."""
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
        """The state of training parts, which come after the checkpoint or before it."""
        if "densifier" in self._saved_training and self.densifier is not None and self.regularizer is not None:
            about = self._saved_training["about"]
            self.schedule.require_stage(about["step"], about["regularization"], self.regularizer.options)
            self.densifier.load_state_dict(self._saved_training["densifier"])
            self.regularizer.load_state_dict(self._saved_training["regularizer"])
            self._saved_training = {}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Loads any number of Gaussians of any SH degree; what is lost by a lower degree is said.

        Raises:
            CheckpointError: there are no Gaussians in it.
        """
        if PREFIX + "means" not in state_dict:
            raise CheckpointError(
                "The checkpoint holds no Gaussians, so it is of another method: load a run of sugar-ext."
            )
        found = Gaussians.of({name.removeprefix(PREFIX): value for name, value in state_dict.items()})
        filter_3d = state_dict.get("filter_3d", torch.zeros(len(found)))
        loss = self.set_gaussians(found, filter_3d)
        ours, theirs = self.config.sh_degree, found.sh_degree
        if ours != theirs or loss.rounding:
            CONSOLE.log(f"The checkpoint's colours of SH degree {theirs} are opened as degree {ours}: {loss}.")
        self._loaded = True
        about = json.loads(state_dict.get("_extra_state", {}).get("about", "{}"))
        self.lifted.grow(about.get("features", ()), state_dict, "lifted.")
        self.lifted.to(self.device)
        own = {f"{PREFIX}{name}": value.data for name, value in self.gauss_params.items()}
        own["filter_3d"] = self.filter_3d
        return super().load_state_dict({**state_dict, **own}, *args, **kwargs)
