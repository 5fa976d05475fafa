"""Refinement: a mesh and the flat Gaussians on its triangles, optimised together, on nerfstudio's trainer."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.pinhole_dataset import PinholeDataset
from f3rm_ext.engine.arguments import find_option
from f3rm_ext.errors import CheckpointError, ConfigError, MeshError
from f3rm_ext.mesh.bound.gaussians import THICKNESS, BoundGaussians, bind
from f3rm_ext.mesh.bound.layout import PerTriangle
from f3rm_ext.mesh.bound.smoothness import TrianglePairs, VertexEdges, normal_inconsistency, roughness, triangle_pairs
from f3rm_ext.mesh.bound.start import photo_colors, read_start_mesh
from f3rm_ext.mesh.bound.subdivision import add_detail
from f3rm_ext.mesh.texture.photos import dataset_photos
from f3rm_ext.splat.gaussian_model import PREFIX, GaussianModel
from f3rm_ext.splat.gaussians import Gaussians, rgb_to_sh, sh_rest_count
from f3rm_ext.splat.memory.conversion import ConversionLoss, convert_harmonics
from f3rm_ext.splat.mip import MipOptions, sampling_intervals
from f3rm_ext.splat.options import GaussianOptions
from f3rm_ext.splat.start_from import read_start
from f3rm_ext.utils.ranges import Positive, Range

RefinementTime = Literal["short", "medium", "long"]
STEPS: dict[str, int] = {"short": 2_000, "medium": 7_000, "long": 15_000}
"""Steps of SuGaR's refinement."""
FREE = ("free_means", "free_scales", "free_quats")
"""Parameters of the Gaussians that belong to no triangle."""
PARAMETERS = ("vertices", "scales", "turns", "opacities", "features_dc", "features_rest", *FREE)
"""What is optimised, by its name in :class:`~f3rm_ext.mesh.bound.gaussians.BoundGaussians`."""
_FACES = "faces"


@dataclass
class BoundModelConfig(GaussianOptions):
    """Options of the refinement of a mesh with Gaussians bound to it."""

    _target: type = field(default_factory=lambda: BoundModel)
    mesh: Annotated[Path | None, tyro.conf.arg(aliases=["--mesh"])] = None
    """The mesh to refine: .ply, .obj or .glb. Checkpoints hold it, so later commands do not need the file."""
    mesh_frame: Literal["auto", "capture", "scene"] = "auto"
    """Coordinate frame of the mesh. capture is that of the capture's original poses, scene is nerfstudio's. auto takes
    what the file says, as those of `f3rm-ext export mesh` do, else capture."""
    refinement_time: Annotated[RefinementTime | None, tyro.conf.arg(aliases=["--refinement-time"])] = None
    """Length of the run: short is 2,000 steps, medium 7,000, long 15,000. By default --max-num-iterations says it."""
    gaussians_per_triangle: PerTriangle = 1
    """Flat Gaussians on each triangle: 1 for fine meshes, 3, 4 or 6 for coarse ones."""
    start_from: Path | None = None
    """Splats that the mesh was made of: a checkpoint (.ckpt, .pt) or a file. Those far from the mesh, where it has
    holes or ends, go on as free Gaussians; triangles are divided where splats are denser than they are. By default all
    Gaussians are on the mesh as it is."""
    free_beyond: Positive = 0.02
    """Distance from the mesh beyond which splats of --pipeline.model.start-from are free, as a share of their distance
    from the nearest camera, above 0."""
    initial_opacity: Annotated[float, Range(0, 1, above=True, below=True)] = 0.1
    """Opacity of the Gaussians at first, between 0 and 1."""
    normal_consistency: Annotated[float, Range(0)] = 0.1
    """Weight of the loss that aligns the normals of neighbouring triangles, 0 or more."""
    laplacian: Annotated[float, Range(0)] = 0.0
    """Weight of the mean distance of the vertices from the mean of their neighbours, in units of the extent of the
    scene, 0 or more. SuGaR has 5, off by default."""
    mip: MipOptions = field(default_factory=lambda: MipOptions(filter_3d=False))
    """Anti-aliasing filters. The 3D filter is for Gaussians with a thickness."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mip.filter_3d:
            raise ConfigError(
                "The 3D filter makes Gaussians without thickness transparent, and those on a mesh have none: leave "
                "it off (--pipeline.model.mip.filter-3d False)."
            )

    def fit_optimizers(self, optimizers: dict[str, Any]) -> None:
        """See the base; config files of earlier versions have no optimisers for free Gaussians."""
        for name in FREE:
            optimizers.setdefault(name, optimizers["vertices"])
        super().fit_optimizers(optimizers)

    def fit_trainer(self, trainer: TrainerConfig) -> None:
        """Sets the length of the run, see :meth:`fit_length`, and checks that there is a mesh unless the run resumes.

        Raises:
            ConfigError: no mesh is given.
            MeshError: there is no such mesh.
        """
        self.fit_length(trainer)
        if trainer.load_dir is None and trainer.load_checkpoint is None:
            if self.mesh is None:
                raise ConfigError(
                    "There is no mesh to refine: give one by --pipeline.model.mesh; `f3rm-ext export mesh` makes one "
                    "of a run."
                )
            if not self.mesh.is_file():
                raise MeshError(f"There is no mesh {self.mesh}: check --pipeline.model.mesh.")
        super().fit_trainer(trainer)

    def fit_length(self, trainer: TrainerConfig) -> None:
        """Sets the length of the run to --refinement-time, if given. Raises ConfigError where two lengths are given."""
        if self.refinement_time is not None:
            steps, given = STEPS[self.refinement_time], trainer.max_num_iterations
            is_given = given != STEPS["long"] or find_option(sys.argv, "--max-num-iterations")
            if given != steps and is_given:
                raise ConfigError(
                    f"--refinement-time {self.refinement_time} means {steps} steps, but --max-num-iterations is "
                    f"{given}: give one of the two."
                )
            trainer.max_num_iterations = steps


class BoundModel(GaussianModel):
    """A mesh whose vertices are optimised, with flat Gaussians on its triangles.

    It has no triangles until training starts or a checkpoint is loaded.
    """

    config: BoundModelConfig
    faces: Tensor
    """Vertex indices, (faces, 3)."""
    _pairs: TrianglePairs | None = None
    _edges: VertexEdges | None = None
    _known: tuple[object, Gaussians] | None = None

    def populate_modules(self) -> None:
        """Creates a model without triangles."""
        self.register_buffer(_FACES, torch.zeros(0, 3, dtype=torch.int64))
        super().populate_modules()

    def _initial_parameters(self, views: PinholeCameras | None) -> dict[str, Tensor]:
        widths = {"vertices": 3, "scales": 2, "turns": 2, "opacities": 1, "features_dc": 3}
        widths |= {"free_means": 3, "free_scales": 3, "free_quats": 4}
        rest = torch.zeros(0, sh_rest_count(self.config.sh_degree), 3)
        return {**{name: torch.zeros(0, width) for name, width in widths.items()}, "features_rest": rest}

    # --- the mesh ----------------------------------------------------------------------------------------------------

    @property
    def bound(self) -> BoundGaussians:
        """The mesh and the Gaussians on it, as optimised."""
        return BoundGaussians(**dict(self.gauss_params.items()), faces=self.faces, thickness=THICKNESS * self.extent)

    @property
    def gaussians(self) -> Gaussians:
        """The Gaussians as the present mesh places them; the same object until it changes, where no gradient flows."""
        if torch.is_grad_enabled():
            return self.bound.gaussians()
        state = [(value.data_ptr(), value._version) for value in (*self.gauss_params.values(), self.faces)]
        if self._known is None or self._known[0] != (state, self.extent):
            with torch.inference_mode(False), torch.no_grad():
                self._known = (state, self.extent), self.bound.gaussians()
        return self._known[1]

    def set_bound(self, bound: BoundGaussians) -> ConversionLoss:
        """Replaces mesh and Gaussians; returns what the SH degree and the storage of the model lose of the colours.

        The parameters stay the same objects, so optimisers keep working.
        """
        self.lifted.clear()
        rest, loss = convert_harmonics(bound.features_rest, self.config.sh_degree, self.config.memory.sh_dtype)
        for name in PARAMETERS:
            value = rest if name == "features_rest" else getattr(bound, name).float()
            self.gauss_params[name].data = value.detach().to(self.device, copy=True)
        self.faces = bound.faces.to(self.device)
        self.filter_3d = torch.zeros(len(bound), device=self.device)
        self._known = None
        return loss

    def _start(self, manager: Any, views: PinholeCameras) -> str:
        config = self.config
        assert config.mesh is not None

        def find_capture() -> CaptureFrame:
            return CaptureFrame.from_outputs(manager.train_dataparser_outputs, Path(manager.dataparser.config.data))

        start = read_start_mesh(config.mesh, config.mesh_frame, find_capture)
        thickness = THICKNESS * self.extent
        per_triangle, alpha = config.gaussians_per_triangle, config.initial_opacity
        free, given = None, len(start.faces)
        if config.start_from is not None:
            splats = self._splats(manager, views)
            start, far = add_detail(start, splats.means, views.positions.cpu(), config.free_beyond, per_triangle)
            free = splats[far]
        bound = bind(start.vertices, start.faces, start.corner_colors, per_triangle, config.sh_degree, alpha, thickness)
        visible = sampling_intervals(bound.gaussians().means.to(self.device), views, near=config.near_plane)[1]
        if not bool(visible.any()):
            other = "capture" if start.frame == "scene" else "scene"
            raise MeshError(
                f"No training camera sees any of the {len(start.faces)} triangles of {config.mesh}, taken to be in the "
                f"frame of the {start.frame}, so it is of another capture or in another frame: try "
                f"--pipeline.model.mesh-frame {other}."
            )
        dataset = getattr(manager, "train_dataset", None)
        if isinstance(dataset, PinholeDataset):
            CONSOLE.log(f"Taking the first colours of {len(bound.scales)} Gaussians from {len(dataset)} photos.")
            bound = replace(bound, features_dc=rgb_to_sh(photo_colors(bound, dataset_photos(dataset, None))))
        self.set_bound(bound if free is None else bound.join_free(free))
        parts = "" if len(start.faces) == given else f", divided into {len(start.faces)} where splats are dense"
        extra = "" if free is None else f" and {len(free)} free ones of {config.start_from}"
        return (
            f"Refining {given} triangles of {config.mesh}{parts}, in the frame of the {start.frame}, with "
            f"{len(bound.scales)} Gaussians on them{extra}."
        )

    def _splats(self, manager: Any, views: PinholeCameras) -> Gaussians:
        """Returns the splats to start from, on the CPU, float32 and of the model's SH degree."""
        config = self.config
        assert config.start_from is not None
        start = read_start(config.start_from, config.start_iteration).as_drawn()
        start = start.to_scene(getattr(manager, "train_dataparser_outputs", None), config.start_frame)
        gaussians = start.prepare_gaussians(views, config.mip).to("cpu")
        values = Gaussians.from_tensors({name: value.float() for name, value in gaussians.tensors().items()})
        return values.to_sh_degree(config.sh_degree)

    # --- training ----------------------------------------------------------------------------------------------------

    def get_training_callbacks(self, attributes: TrainingCallbackAttributes) -> list[TrainingCallback]:
        """Sets up the schedule, the mesh, and which triangles are neighbours."""
        callbacks = super().get_training_callbacks(attributes)
        self._pairs = triangle_pairs(self.faces)
        if self.config.laplacian > 0:
            self._edges = VertexEdges.of(self.faces, len(self.gauss_params["vertices"]))
        return callbacks

    def _regularization_losses(self, outputs: dict[str, Any], truth: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        if self._pairs is not None and self.config.normal_consistency > 0:
            inconsistency = normal_inconsistency(self.gauss_params["vertices"], self.faces, self._pairs)
            losses["normal_consistency"] = self.config.normal_consistency * inconsistency
        if self._edges is not None:
            rough = roughness(self.gauss_params["vertices"], self._edges)
            losses["laplacian"] = self.config.laplacian / self.extent * rough
        return losses

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _take(self, state_dict: Mapping[str, Any]) -> ConversionLoss:
        if _FACES not in state_dict or f"{PREFIX}vertices" not in state_dict:
            raise CheckpointError(
                "The checkpoint holds no mesh, so it is of another method: load a run of sugar-ext-refine."
            )
        # Checkpoints of earlier versions have no free Gaussians.
        state = {PREFIX + name: self.gauss_params[name].data[:0] for name in FREE} | dict(state_dict)
        values = {name: state[PREFIX + name] for name in PARAMETERS}
        return self.set_bound(BoundGaussians(**values, faces=state_dict[_FACES], thickness=THICKNESS * self.extent))
