"""Feature-distillation radiance field: nerfacto's geometry and colour with a feature field beside them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Float
from nerfstudio.cameras.camera_optimizers import CameraOptimizer, CameraOptimizerConfig
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle, RaySamples
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.model_components.losses import interlevel_loss, ray_samples_to_sdist
from nerfstudio.model_components.ray_samplers import ProposalNetworkSampler
from nerfstudio.model_components.renderers import AccumulationRenderer, DepthRenderer, RGBRenderer
from nerfstudio.model_components.scene_colliders import NearFarCollider
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor, nn
from torch.nn import functional

from f3rm_ext.data.background import Background, photo_background
from f3rm_ext.engine.cost import TrainingCost
from f3rm_ext.engine.ns_export import check_export
from f3rm_ext.engine.options import OwnModelConfig
from f3rm_ext.errors import ConfigError
from f3rm_ext.features.space import ExtraOutput
from f3rm_ext.memory.options import MemoryOption, QualityImpact, RunState, halve
from f3rm_ext.model_components import masks
from f3rm_ext.model_components.chunked_rendering import ChunkedRenderer, default_chunk
from f3rm_ext.model_components.exposure import ExposureOption, choices, judge, make_exposures, saturate
from f3rm_ext.model_components.image_metrics import ImageMetrics
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.model_components.visualization import comparison_images, feature_images
from f3rm_ext.nerf.contraction import measure_reach_factor, piecewise_sampler
from f3rm_ext.nerf.feature_field import FeatureField
from f3rm_ext.nerf.feature_metrics import feature_metrics
from f3rm_ext.nerf.fields import GridOptions, ProposalField, SceneField, UnitCube, choose_init_density, render_normals
from f3rm_ext.nerf.hash_backends import Backend, resolve_backend
from f3rm_ext.nerf.losses import DepthSupervision, FeatureLoss, cosine, distortion_loss, feature_loss, feature_pairs
from f3rm_ext.nerf.memory_options import MIN_CHUNK, field_options
from f3rm_ext.nerf.queryable import QueryableField
from f3rm_ext.utils import threads
from f3rm_ext.utils.ranges import Count, Positive, Range, check_ranges
from f3rm_ext.viewer.panel import QueryPanel


@dataclass
class ProposalOptions:
    """One proposal network and its number of samples."""

    num_samples: Count = 256
    """Samples per ray of this network, 8 to 1024."""
    hidden_dim: Count = 16
    """Width of its single hidden layer, 1 or more."""
    grid: GridOptions = field(
        default_factory=lambda: GridOptions(
            num_levels=5, features_per_level=2, base_res=16, max_res=128, log2_hashmap_size=17
        )
    )
    """Hash grid of this proposal network."""

    def __post_init__(self) -> None:
        check_ranges(self, "pipeline.model.proposals.")
        check_ranges(self.grid, "pipeline.model.proposals.grid.")


@dataclass
class F3rmModelConfig(OwnModelConfig):
    """Feature-distillation radiance field."""

    _target: type = field(default_factory=lambda: F3rmModel)
    backend: Backend = "auto"
    """Implementation of the hash grids: tcnn (tiny-cuda-nn, CUDA), triton (CUDA), numba (CPU) or torch (any device,
    slow). By default, the fastest one that works. All compute the same function of the same parameters."""
    near_plane: Positive = 0.05
    """Distance at which rays start, in training and in pictures, > 0, in scene units (cameras lie within about ±1)."""
    far_plane: Positive = 1000.0
    """Distance at which rays end, > near-plane, in scene units; space beyond contraction-radius is contracted."""
    background_color: Background | Literal["auto"] = "auto"
    """Colour behind the scene. auto is random for partly transparent images, black or white where a quarter of the
    photos is, else that of the last sample of each ray."""
    contract_scene: bool = True
    """Contract space outside the scene box (for unbounded captures) instead of leaving it empty."""
    contraction_radius: Positive | Literal["auto"] = 1.0
    """Largest coordinate that is not contracted, scene units, > 0; samples along rays spread out beyond it. auto is 1,
    about that of the farthest camera, or more where cameras look one way at points that are far away."""

    grid: GridOptions = field(default_factory=GridOptions)
    """Hash grid for density and colour."""
    hidden_dim: Count = 64
    """Width of the density network, 1 or more."""
    color_hidden_dim: Count = 64
    """Width of the colour network, 1 or more."""
    exposure: ExposureOption = "off"
    """Gains of the three colours of each training photo, for captures whose exposure or white balance varies; scene and
    exports have their mean. auto models them if exposures vary, by EXIF or by what photos show of the same places, on
    always, off never."""
    appearance_dim: Annotated[int, Range(0)] = 0
    """Length of a per-image code from which the colour network learns how a photo differs from others, as in nerfacto;
    0 for none. Renderings take the mean code, which costs quality in short runs: prefer exposure."""
    init_density: Positive | Literal["auto"] = 0.01
    """Initial density everywhere, per scene unit, > 0; auto takes 1 per distance of the cameras, from which short runs
    find plain surfaces instead of colours behind everything, but 0.01 before a black or white background."""
    num_samples: Count = 48
    """Samples per ray of the scene field, 8 to 512."""
    proposals: tuple[ProposalOptions, ...] = field(
        default_factory=lambda: (
            ProposalOptions(num_samples=256, grid=GridOptions(5, 2, 16, 128, 17)),
            ProposalOptions(num_samples=96, grid=GridOptions(5, 2, 16, 256, 17)),
        )
    )
    """Proposal networks in the order in which they refine the samples; at least one."""
    proposal_update_every: Count = 5
    """Steps between updates of the proposal networks after warm-up, 1 or more."""
    proposal_warmup: Annotated[int, Range(0)] = 5000
    """Steps over which the interval between those updates grows from 1 to its final value, 0 or more."""
    proposal_anneal_steps: Annotated[int, Range(0)] = 1000
    """Steps over which sampling sharpens from uniform to the proposals' weights, 0 or more."""
    interlevel_loss_mult: Annotated[float, Range(0)] = 1.0
    """Weight of the proposal loss, 0 or more."""
    distortion_loss_mult: Annotated[float, Range(0)] = 0.002
    """Weight of the distortion loss, which concentrates the density along each ray, 0 or more;
    0 turns it off."""
    depth_loss_mult: Annotated[float, Range(0)] = 0.0
    """Weight of the depth loss at the first step, 0 or more; 0 turns it off. It draws light to the depth that stereo
    finds in the photos, so that short runs find surfaces, also in few photos."""
    depth_loss_steps: Count = 1000
    """Steps over which that weight falls to 0, 1 or more, so that errors of stereo do not stay."""
    camera_optimizer: CameraOptimizerConfig = field(default_factory=lambda: CameraOptimizerConfig(mode="SO3xR3"))
    """Pose refinement. Only the colour loss moves the poses; the feature loss does not."""
    render_normals: bool = False
    """Also render normals, from the gradient of the density; takes more memory and time."""

    feature_grid: GridOptions = field(
        default_factory=lambda: GridOptions(
            num_levels=12, features_per_level=8, base_res=16, max_res=128, log2_hashmap_size=19
        )
    )
    """Hash grid of the feature field, shared by all heads."""
    feature_hidden_dim: Count = 64
    """Width of each head's network, and number of hidden values rendered per ray, 1 or more."""
    feature_num_hidden: Count = 2
    """Number of hidden layers of each head's network, 1 or more."""
    feature_pe_frequencies: Annotated[int, Range(0)] = 6
    """Number of frequencies of an additional positional encoding; 0 for none."""
    feature_loss: FeatureLoss = "mse"
    """Loss between rendered features and the features of the images."""
    feature_loss_mult: Annotated[float, Range(0)] = 1e-3
    """Weight of each feature loss, 0 or more."""
    feature_samples_per_ray: Annotated[int, Range(0)] = 0
    """Render features only at the K samples of a ray that have the largest weights; 0 takes all samples."""
    detach_weights: bool = True
    """Keep the feature loss from changing the density, as in LERF. In F3RM, the feature loss changes it."""
    output_features: bool = False
    """Also output `feature` (and `feature_NAME`) with all D channels. An image then takes h × w × D × 4 bytes."""

    eval_num_rays_per_chunk: Annotated[int, Range(0)] = 0
    """Rays rendered at once outside training; 0 means 32768 on CUDA and 4096 on the CPU.
    When memory runs out, the number is halved automatically."""
    lpips_weights: Path | None = None
    """File with LPIPS or AlexNet weights for evaluation.
    By default, torchvision's AlexNet: from $TORCH_HOME if present, otherwise downloaded."""

    def __post_init__(self) -> None:
        if not self.proposals:
            raise ConfigError("There is no proposal network: give at least one in `proposals`.")
        check_ranges(self, "pipeline.model.")
        check_ranges(self.grid, "pipeline.model.grid.")
        check_ranges(self.feature_grid, "pipeline.model.feature-grid.")

    def memory_options(self, state: RunState) -> list[MemoryOption]:
        return list(
            field_options(
                self.num_samples,
                [proposal.num_samples for proposal in self.proposals],
                self.feature_samples_per_ray if state.has_features else None,
                {"grid": self.grid} | ({"feature-grid": self.feature_grid} if state.has_features else {}),
            )
        )

    def picture_memory_options(self, state: RunState) -> list[MemoryOption]:
        chunk = self.eval_num_rays_per_chunk or default_chunk(torch.device(state.device_type))
        return list(halve(QualityImpact.NONE, "pipeline.model.eval-num-rays-per-chunk", chunk, MIN_CHUNK))

    def check_export(self, command: str, argv: Sequence[str]) -> None:
        """Refuses ns-export commands that cannot export a field; see :mod:`f3rm_ext.engine.ns_export`."""
        check_export(command, argv, splats=False, normals=self.render_normals)


class F3rmModel(QueryableField):
    """Density, colour and distilled features along rays.

    Args:
        metadata: of the training set. ``feature_specs`` lists the features to distil; without it the model has no
            heads until a checkpoint brings them. ``feature_ray_fraction`` is the share of rays with features, (0, 1].
    """

    config: F3rmModelConfig

    def populate_modules(self) -> None:
        device = torch.device(self.kwargs.get("device") or "cpu")
        threads.settle(numba=device.type == "cpu")
        config = self.config
        resolve_backend(config.backend, device)  # A backend that does not work says so now.
        metadata = self.kwargs.get("metadata") or {}
        self.feature_ray_fraction = float(metadata.get("feature_ray_fraction", 1.0))
        self.choices: dict[str, str | float] = {}
        background = config.background_color
        if background == "auto":
            background = self.choices["background_color"] = photo_background(metadata).choose("last_sample")
        init_density = config.init_density
        if init_density == "auto":
            init_density = self.choices["init_density"] = choose_init_density(background, metadata)
        radius = config.contraction_radius
        if radius == "auto":
            radius = self.choices["contraction_radius"] = measure_reach_factor(metadata)
        cube = UnitCube(self.scene_box.aabb, config.contract_scene, radius)
        self.field = SceneField(
            cube,
            config.grid,
            hidden_dim=config.hidden_dim,
            color_hidden_dim=config.color_hidden_dim,
            appearance_dim=config.appearance_dim,
            num_images=self.num_train_data,
            init_density=init_density,
            backend=config.backend,
        )
        self.proposal_networks = nn.ModuleList(
            ProposalField(cube, proposal.grid, proposal.hidden_dim, init_density, config.backend)
            for proposal in config.proposals
        )
        self.feature_field = FeatureField(
            metadata.get("feature_specs", ()),
            cube,
            config.feature_grid,
            hidden_dim=config.feature_hidden_dim,
            num_hidden=config.feature_num_hidden,
            pe_frequencies=config.feature_pe_frequencies,
            samples_per_ray=config.feature_samples_per_ray,
            detach_weights=config.detach_weights,
            backend=config.backend,
        )
        self.camera_optimizer: CameraOptimizer = config.camera_optimizer.setup(
            num_cameras=self.num_train_data, device="cpu"
        )
        measure = metadata.get("measure_ray_depths")
        self.depth_supervision = DepthSupervision(measure, config.depth_loss_mult, config.depth_loss_steps)
        self.exposures = make_exposures(config.exposure, self.num_train_data, metadata)
        self.choices |= choices(config.exposure, self.exposures)
        self.density_fns = [cast(ProposalField, network).density for network in self.proposal_networks]
        self.proposal_sampler = ProposalNetworkSampler(
            num_proposal_samples_per_ray=tuple(proposal.num_samples for proposal in config.proposals),
            num_nerf_samples_per_ray=config.num_samples,
            num_proposal_network_iterations=len(config.proposals),
            single_jitter=True,
            initial_sampler=piecewise_sampler(radius),
            update_sched=self._proposal_update_interval,
        )
        self.collider = NearFarCollider(config.near_plane, config.far_plane, reset_near_plane=False)
        if metadata.get("masked_pixels") == "background" and background == "last_sample":
            background = "random"  # Empty space has no last sample to learn a colour from.
        self.renderer_rgb = RGBRenderer(background_color=background)
        self.renderer_accumulation = AccumulationRenderer()
        self.renderer_depth = DepthRenderer(method="median")
        self.renderer_expected_depth = DepthRenderer(method="expected")
        self.image_metrics = ImageMetrics(config.lpips_weights)
        self.chunked = ChunkedRenderer(config.eval_num_rays_per_chunk)
        self.guard = OutputGuard()
        self.needs_autograd = config.render_normals
        self.queries = QueryPanel(self)
        self.cost = TrainingCost()

    def get_param_groups(self) -> dict[str, list[nn.Parameter]]:
        """Returns parameters by optimiser: proposal_networks, fields, feature_field, camera_opt, exposure."""
        groups = {
            "proposal_networks": list(self.proposal_networks.parameters()),
            "fields": list(self.field.parameters()),
            "feature_field": list(self.feature_field.parameters()),
        }
        self.camera_optimizer.get_param_groups(param_groups=groups)
        if self.exposures is not None:
            groups["exposure"] = list(self.exposures.parameters())
        return groups

    def _proposal_update_interval(self, step: int) -> float:
        every = self.config.proposal_update_every
        return float(np.clip(np.interp(step, [0, self.config.proposal_warmup], [0, every]), 1, every))

    def get_training_callbacks(self, attributes: TrainingCallbackAttributes) -> list[TrainingCallback]:
        """Returns callbacks that anneal the proposal weights (mip-NeRF 360, eq. 18) and measure each step's cost."""
        if self.exposures is not None and attributes.pipeline is not None:
            dataset = cast(Any, attributes.pipeline.datamanager).train_dataset
            self.exposures.start(dataset.metadata.get("measure_stops"))

        def begin_step(step: int) -> None:
            self.depth_supervision.begin_step(step, self.device)
            self.cost.step_pre_backward(self.device)
            progress = min(1.0, step / max(1, self.config.proposal_anneal_steps))
            slope = 10.0
            self.proposal_sampler.set_anneal(slope * progress / ((slope - 1.0) * progress + 1.0))
            # The sampler knows the last step from its own callback, so after a resume it would take it for the first.
            self.proposal_sampler._step = max(0, step - 1)

        def end_step(step: int) -> None:
            self.proposal_sampler.step_cb(step)
            if self.exposures is not None:
                self.exposures.project()
            self.cost.step_post_backward(step, self.device)

        return [
            TrainingCallback([TrainingCallbackLocation.BEFORE_TRAIN_ITERATION], begin_step, update_every_num_iters=1),
            TrainingCallback([TrainingCallbackLocation.AFTER_TRAIN_ITERATION], end_step, update_every_num_iters=1),
        ]

    @property
    def background(self) -> Float[Tensor, "3"]:
        """The colour behind the scene, 0 to 1, in renderings of the trained model."""
        return self.renderer_rgb.blend_background(torch.zeros(4, device=self.device))

    def memory_options(self) -> list[MemoryOption]:
        state = RunState(self.device.type, self.num_train_data, has_features=bool(self.feature_field.names))
        return self.config.memory_options(state)

    def get_extra_state(self) -> str:
        """Returns the training cost and the sampler's counter as JSON, for the checkpoint."""
        sampler = self.proposal_sampler
        return json.dumps({**self.cost.state(), "steps_since_proposal_update": sampler._steps_since_update})

    def set_extra_state(self, state: str) -> None:
        values = json.loads(state)
        self.cost.restore(values)
        self.proposal_sampler._steps_since_update = int(values["steps_since_proposal_update"])

    def get_outputs(
        self, ray_bundle: RayBundle | Cameras, extra: Mapping[str, ExtraOutput] | None = None
    ) -> dict[str, Any]:
        """Renders rays.

        Args:
            extra: further outputs by name, computed from hidden values rendered along the rays; ignored in training.

        Returns:
            ``rgb`` (n, 3; in training as the photo shows it); ``accumulation``, ``depth`` (median) and
            ``expected_depth`` (n, 1), depths along the ray in scene units. In training also ``features`` by head for
            the first rays, and the samples that the losses need. Otherwise also ``feature_pca``, ``prop_depth_i``, the
            optional outputs and those of ``extra``.
        """
        assert isinstance(ray_bundle, RayBundle)
        if self.training:
            # The trainer's autocast would round directions to half precision.
            with torch.autocast(self.device.type, enabled=False):
                self.camera_optimizer.apply_to_raybundle(ray_bundle)
        ray_samples: RaySamples
        ray_samples, weights_list, samples_list = self.proposal_sampler(ray_bundle, density_fns=self.density_fns)
        frustums = ray_samples.frustums
        positions = torch.addcmul(frustums.origins, frustums.directions, (frustums.starts + frustums.ends) / 2)
        density, geometry = self.field.density(positions)
        weights = ray_samples.get_weights(density)
        directions = functional.normalize(ray_bundle.directions, dim=-1)
        cameras = ray_bundle.camera_indices if self.training else None
        colors = self.field.color(directions, geometry, None if cameras is None else cameras.view(-1))
        outputs: dict[str, Any] = {
            "rgb": self.renderer_rgb(rgb=colors, weights=weights),
            "accumulation": self.renderer_accumulation(weights=weights),
        }
        with torch.no_grad():
            outputs["depth"] = self.renderer_depth(weights=weights, ray_samples=ray_samples)
            outputs["expected_depth"] = self.renderer_expected_depth(weights=weights, ray_samples=ray_samples)
        if self.training:
            if self.exposures is not None and cameras is not None:
                behind = 1 - outputs["accumulation"] if self.renderer_rgb.background_color == "white" else None
                outputs["rgb"] = self.exposures(outputs["rgb"], cameras.view(-1), behind)
            outputs["weights_list"] = [*weights_list, weights]
            outputs["ray_samples_list"] = [*samples_list, ray_samples]
            count = math.ceil(self.feature_ray_fraction * len(weights))
            outputs["features"] = {
                name: self.feature_field.head(name).decode(hidden)
                for name, hidden in self.feature_field.render_hidden(positions[:count], weights[:count]).items()
            }
        else:
            self._add_optional_outputs(outputs, positions, weights, extra or {})
            for index, (samples, level_weights) in enumerate(zip(samples_list, weights_list, strict=True)):
                outputs[f"prop_depth_{index}"] = self.renderer_depth(weights=level_weights, ray_samples=samples)
        return outputs

    def _add_optional_outputs(
        self, outputs: dict[str, Tensor], positions: Tensor, weights: Tensor, extra: Mapping[str, ExtraOutput]
    ) -> None:
        hidden: dict[str, Tensor] = {}

        def get_hidden(name: str) -> Tensor:
            if not hidden:
                hidden.update(self.feature_field.render_hidden(positions, weights))
            return hidden[name]

        for index, name in enumerate(self.feature_field.names):
            head = self.feature_field.head(name)
            suffix = f"_{name}" if index else ""
            self.guard.add(outputs, f"feature_pca{suffix}", lambda name=name, head=head: head.display(get_hidden(name)))
            if self.config.output_features:
                self.guard.add(outputs, f"feature{suffix}", lambda name=name, head=head: head.decode(get_hidden(name)))
        for name, compute in extra.items():
            if (value := compute(outputs, get_hidden)) is not None:
                outputs[name] = value
        if self.config.render_normals:
            self.guard.add(outputs, "normals", lambda: render_normals(self.field, positions, weights))

    def get_metrics_dict(self, outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, Tensor]:
        """Returns training metrics: psnr, distortion, and the mean cosine similarity of each feature."""
        target = self.renderer_rgb.blend_background(batch["image"].to(self.device))
        kept = batch["kept"].to(self.device) if "kept" in batch else None
        metrics: dict[str, Any] = {}
        if not masks.is_empty(kept):
            metrics["psnr"] = masks.psnr(outputs["rgb"].detach(), target, kept)
        if self.training and self.config.distortion_loss_mult:
            edges = ray_samples_to_sdist(outputs["ray_samples_list"][-1]).detach()
            metrics["distortion"] = distortion_loss(outputs["weights_list"][-1][..., 0], edges)
        self.camera_optimizer.get_metrics_dict(metrics)
        for name, rendered, wanted in feature_pairs(outputs.get("features", {}), batch.get("features") or {}, kept):
            metrics[f"feature_cosine_{name}"] = cosine(rendered.detach(), wanted).mean()
        return metrics

    def get_loss_dict(
        self, outputs: dict[str, Any], batch: dict[str, Any], metrics_dict: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Returns the losses: rgb, interlevel, depth, distortion, one per feature, and the pose regulariser."""
        predicted, target = self.renderer_rgb.blend_background_for_loss_computation(
            pred_image=outputs["rgb"],
            pred_accumulation=outputs["accumulation"],
            gt_image=batch["image"].to(self.device),
        )
        if self.training and self.exposures is not None:
            predicted = saturate(predicted, target)
        losses = {"rgb_loss": functional.mse_loss(predicted, target)}
        if not self.training:
            return losses
        losses["interlevel_loss"] = self.config.interlevel_loss_mult * interlevel_loss(
            outputs["weights_list"], outputs["ray_samples_list"]
        )
        losses.update(self.depth_supervision.losses(outputs["weights_list"][-1], outputs["ray_samples_list"][-1]))
        if metrics_dict is not None and "distortion" in metrics_dict:
            losses["distortion_loss"] = self.config.distortion_loss_mult * metrics_dict["distortion"]
        kept = batch["kept"].to(self.device) if "kept" in batch else None
        for name, rendered, wanted in feature_pairs(outputs.get("features", {}), batch.get("features") or {}, kept):
            loss = feature_loss(rendered, wanted, self.config.feature_loss)
            losses[f"feature_loss_{name}"] = self.config.feature_loss_mult * loss
        self.camera_optimizer.get_loss_dict(losses)
        return losses

    def loss_terms(
        self, losses: Mapping[str, Tensor], outputs: Mapping[str, Any], batch: Mapping[str, Any]
    ) -> dict[str, int | Tensor]:
        """Returns the number of rays that each loss is the mean over, for the mean over the rays of all GPUs."""
        terms: dict[str, int | Tensor] = dict.fromkeys(losses, len(outputs["rgb"]))
        targets = batch.get("features") or {}
        for name, rendered in outputs["features"].items():
            count: int | Tensor = min(len(rendered), len(targets.get(name, ())))
            terms[f"feature_loss_{name}"] = count if "kept" not in batch else batch["kept"][:count].sum()
        return terms

    def get_image_metrics_and_images(
        self, outputs: dict[str, Tensor], batch: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Compares a rendered image with the photo.

        Args:
            batch: ``image`` and, if there are any, ``mask``, ``camera``, ``exif_stops`` and ``feature_maps``.

        Returns:
            Metrics: psnr, ssim, l1; lpips if its weights are available; feature_cosine_NAME and feature_mse_NAME (at
            patch centres, in the distilled space); train_peak_memory_mib, train_it_per_s and eval_peak_memory_mib; with
            modelled exposures also those of :func:`~f3rm_ext.model_components.exposure.judge`.

            Images: img (photo | rendering), accumulation, depth and feature_pca (2D features | rendering).

            Pixels outside ``mask`` do not count and are grey. If it keeps no pixel, image metrics are absent.
        """
        truth, mask = self.renderer_rgb.blend_background(batch["image"].to(self.device)), batch.get("mask")
        outputs, exposure_metrics = judge(self.exposures, outputs, truth, batch)
        metrics = self.image_metrics(outputs["rgb"], truth, mask) | exposure_metrics
        metrics.update(feature_metrics(self, batch))
        metrics.update(self.cost.metrics(self.device))
        images = comparison_images(outputs, truth, mask)
        return metrics, images | masks.grey_out(feature_images(self, outputs, batch), mask)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads parameters and warns of heads that the checkpoint lacks."""
        for name in self.feature_field.names:
            if f"feature_field.heads.{name}.decoder.weight" not in state_dict:
                CONSOLE.log(f"[yellow]The checkpoint has no feature '{name}': it starts from scratch.")
        return super().load_state_dict(state_dict, *args, **kwargs)
