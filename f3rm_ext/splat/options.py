"""Options of splats: their bounds, the exports and trainers they go with, and what they can give up for memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tyro
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.utils.rich_utils import CONSOLE

from f3rm_ext import compat
from f3rm_ext.engine.launch import processes
from f3rm_ext.engine.ns_export import check_export
from f3rm_ext.engine.optimizers import schedule_length
from f3rm_ext.engine.options import OwnModelConfig
from f3rm_ext.errors import ConfigError
from f3rm_ext.memory.options import MemoryOption, QualityImpact, RunState, halve
from f3rm_ext.model_components.exposure import ExposureOption
from f3rm_ext.splat.densify import DensifyOptions
from f3rm_ext.splat.gaussians import MAX_SH_DEGREE
from f3rm_ext.splat.memory.allocator import SETTING, VARIABLE, request_expandable_segments
from f3rm_ext.splat.memory.options import MemoryOptions
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.rasterize import Backend
from f3rm_ext.splat.regularization.options import Mode, RegularizationOptions
from f3rm_ext.splat.schedule import Schedule, Stage
from f3rm_ext.splat.sharding import check_sharding
from f3rm_ext.utils.ranges import Count, Positive, Range, check_ranges

_FEWEST_POINTS = 10_000
"""Surface regularisation needs at least this many points per step."""


@dataclass
class GaussianOptions(OwnModelConfig):
    """Options of every model of Gaussians."""

    mip: MipOptions = field(default_factory=MipOptions)
    """Anti-aliasing filters."""
    start_from: Path | None = None
    """Splats to start from: a .ply, .spz, .sog or .splat file, a checkpoint of this method or of splatfacto (.ckpt) or
    of SuGaR's coarse stage (.pt), or an output folder of 3DGS or SuGaR."""
    start_iteration: Annotated[int, Range(0)] | None = None
    """Iteration to load from the folder given by --pipeline.model.start-from, 0 or more; the newest by default."""
    start_frame: Literal["auto", "scene", "capture"] = "auto"
    """Coordinate frame of the splats to start from. scene is nerfstudio's, which exports of this package and of
    splatfacto use. capture is that of the capture's original poses, e.g. COLMAP's. auto selects capture for
    output folders of 3DGS and checkpoints of SuGaR, else scene."""
    memory: Annotated[MemoryOptions, tyro.conf.arg(name="")] = field(default_factory=MemoryOptions)
    """Precision in which Gaussians and their optimiser state are stored."""
    sh_degree: Annotated[int, tyro.conf.arg(aliases=["--sh-degree"]), Range(0, MAX_SH_DEGREE)] = 3
    """Degree of the spherical harmonics of view-dependent colours, 0 (no dependence) to 3."""
    sh_steps_per_degree: Count = 1000
    """Steps between increases of the SH degree in use, 1 or more; scales with the length of the run."""
    background_color: Literal["auto", "random", "black", "white"] = "auto"
    """Colour behind the splats and behind transparent pixels of the images. Outside training, random is the mean
    colour of the photos, or black if they are transparent. auto is black or white if a quarter of the pixels of opaque
    photos is, so that no Gaussians have to make it up, else random."""
    ssim_weight: Annotated[float, Range(0, 1)] = 0.2
    """Weight of 1 − SSIM in the photometric loss, 0 to 1; the mean absolute error has the remaining weight."""
    exposure: ExposureOption = "off"
    """Gains of the three colours of each training photo, for captures whose exposure or white balance varies; scene and
    exports have their mean. auto models them if exposures vary, by EXIF or by what photos show of the same places, on
    always, off never."""
    near_plane: Positive = 0.01
    """Gaussians whose centres are nearer to the camera are not rendered, scene units, > 0."""
    backend: Backend = "auto"
    """Rasteriser: gsplat (CUDA), numba (CPU), torch (any device, very slow), or auto to match the device."""
    seed: int = 0
    """Seed of the initial Gaussians, of random backgrounds and of the points of the regularisation."""
    lpips_weights: Path | None = None
    """File of LPIPS weights, for evaluation offline; by default torchvision's AlexNet, from TORCH_HOME or the
    network."""
    # Images of splats are rendered whole.
    eval_num_rays_per_chunk: tyro.conf.Suppress[int] = 4096

    def __post_init__(self) -> None:
        check_ranges(self, "pipeline.model.")
        if self.start_iteration is not None and self.start_from is None:
            raise ConfigError(
                "--pipeline.model.start-iteration needs the folder that it is an iteration of: give it by "
                "--pipeline.model.start-from, or leave it out."
            )

    def schedule(self, steps: int) -> Schedule:
        """Returns the schedule of a run of this many steps."""
        return Schedule.from_options(steps, RegularizationOptions())

    def check_export(self, command: str, argv: Sequence[str]) -> None:
        """Refuses exports that ns-export cannot make of splats; see :func:`~f3rm_ext.engine.ns_export.check_export`."""
        check_export(command, argv, splats=True)

    def memory_options(self, state: RunState) -> list[MemoryOption]:
        """Returns options that lower the memory of a training step."""
        memory, degree, cuda = self.memory, self.sh_degree, state.device_type == "cuda"
        harmonics, clearing = degree > 0, memory.fragmentation
        rows = (
            (cuda and not memory.grow_segments, QualityImpact.NONE, "expandable-segments", "False", "True"),
            (cuda and clearing != "aggressive", QualityImpact.NONE, "fragmentation", clearing, "aggressive"),
            (harmonics and not memory.optimize_memory, QualityImpact.PRECISION, "optimize-memory", "False", "True"),
            (harmonics and memory.moments != "int8", QualityImpact.PRECISION, "sh-moments", memory.moments, "int8"),
            (harmonics, QualityImpact.DETAIL, "sh-degree", degree, degree - 1),
        )
        return [
            MemoryOption(impact, f"pipeline.model.{name}", *values) for there, impact, name, *values in rows if there
        ]

    def fit_optimizers(self, optimizers: dict[str, Any]) -> None:
        """Applies the memory options to the optimisers of a run."""
        self.memory.fit(optimizers["features_rest"]["optimizer"])

    def fit_trainer(self, trainer: TrainerConfig) -> None:
        """Checks and adapts the trainer's options, in place, and sets up CUDA's allocator, before anything is built.

        Raises:
            ConfigError: splats cannot be trained with these options on this machine.
        """
        if trainer.mixed_precision or trainer.use_grad_scaler:
            trainer.mixed_precision = trainer.use_grad_scaler = False
            CONSOLE.print("Splats train in single precision: mixed precision and the gradient scaler are off.")
        if trainer.machine.device_type == "cuda":
            if self.memory.grow_segments and request_expandable_segments() == "late":
                CONSOLE.print(
                    f"[yellow]CUDA is running already, too late for expandable segments: set {VARIABLE}={SETTING}."
                )
            if self.backend in ("auto", "gsplat"):
                compat.check_gsplat_kernels()  # Compiling the kernels starts CUDA.
        manager = cast(Any, trainer.pipeline.datamanager)
        manager.fit(schedule_length(trainer))
        if self.start_from is not None or trainer.load_dir is not None or trainer.load_checkpoint is not None:
            manager.stereo_points = "never"  # Gaussians are given


@dataclass
class SplatOptions(GaussianOptions):
    """Options of :class:`~f3rm_ext.splat.model.SplatModelConfig`, whose name runs store."""

    regularization: Annotated[
        Literal["none", "density", "sdf", "dn-consistency", "dn_consistency", "planar"],
        tyro.conf.arg(aliases=["--regularization"]),
    ] = "planar"
    """Loss that pulls Gaussians to surfaces in the later part of the run. planar flattens Gaussians and makes their
    planes agree with normals, nearby views and photos. The others are SuGaR's: density is quick and suits objects; sdf
    suits unbounded scenes; dn-consistency (or dn_consistency) adds agreement of normals with depth to density. none
    turns the regularisation off."""
    surface: RegularizationOptions = field(default_factory=RegularizationOptions)
    """Constants of the regularisation. Steps are for a run of 15,000 steps and scale with its length."""
    densify: DensifyOptions = field(default_factory=DensifyOptions)
    """How Gaussians are added and removed. Steps are for a run of 15,000 steps and scale with its length."""
    start_stage: Stage = "vanilla"
    """First stage of the run. entropy and regularized need --pipeline.model.start-from."""
    num_random: Count = 50_000
    """Number of random initial Gaussians for a capture with fewer than 100 points, 1 or more."""
    clean: bool = False
    """Remove floaters after the last step, as `f3rm-ext splats clean` does: several passes over the training photos,
    on the CPU. Those that go are in removed.ply, in the run's folder."""
    shard_gaussians: bool = False
    """Divide the Gaussians over the GPUs of the run, for scenes that outgrow one. Regularisation, features and viewer
    must be off, and all images must have one size."""

    @property
    def regularization_options(self) -> RegularizationOptions:
        """The constants of the regularisation, with the regularisation they are for."""
        return replace(self.surface, mode=cast(Mode, self.regularization))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.regularization == "dn_consistency":
            self.regularization = "dn-consistency"
        if self.start_stage != "vanilla" and self.start_from is None:
            raise ConfigError(
                f"start-stage {self.start_stage} needs splats to continue with: give them by "
                "--pipeline.model.start-from, or start with vanilla."
            )

    def schedule(self, steps: int) -> Schedule:
        return Schedule.from_options(steps, self.regularization_options, self.start_stage)

    def memory_options(self, state: RunState) -> list[MemoryOption]:
        options, samples, limit = super().memory_options(state), self.surface.samples, self.densify.max_gaussians
        if self.shard_gaussians:  # divided Gaussians have colours in float32
            options = [option for option in options if not option.name.endswith("optimize-memory")]
        if self.regularization not in ("none", "planar"):
            options += halve(QualityImpact.NOISE, "pipeline.model.surface.samples", samples, _FEWEST_POINTS)
        if state.growing:
            # A lower limit removes no Gaussians, but stops growth.
            lower = max(1, int(0.8 * min(state.gaussians, limit or state.gaussians)))
            now = f"{limit or 'without limit'}, {state.gaussians} there"
            options.append(MemoryOption(QualityImpact.DETAIL, "pipeline.model.densify.max-gaussians", now, lower))
        return options

    def fit_trainer(self, trainer: TrainerConfig) -> None:
        if self.clean and processes(trainer.machine) > 1:
            raise ConfigError(
                "--pipeline.model.clean works in a single process, and this run has several: leave it out, and run "
                "`f3rm-ext splats clean` afterwards."
            )
        super().fit_trainer(trainer)
        if self.shard_gaussians:
            check_sharding(trainer)
