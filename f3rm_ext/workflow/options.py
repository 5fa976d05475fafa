"""Options of the chain, and options of single stages that are passed on to their commands."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from f3rm_ext.data.stereo import DenseMode
from f3rm_ext.errors import ConfigError

StageName = Literal[
    "sfm",
    "coarse",
    "mesh",
    "refine",
    "refined-mesh",
    "texture",
    "eval-coarse",
    "eval-refined",
    "eval-mesh",
    "eval-texture",
]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""In the order in which they run."""
PASSED_ON = ("sfm", "coarse", "mesh", "refine", "texture")
"""Stages with options of their own, written ``--STAGE.OPTION``."""
_TRAININGS = {"coarse", "refine"}
CAPTURE = "capture"
"""Folder of the capture that is made of photos, in the output."""
Words = tuple[str, ...]
StageOptions = dict[str, Words]
"""Options of a command: names without dashes, and the words of their values."""


@dataclass(kw_only=True)
class ChainOptions:
    """Options of :class:`f3rm_ext.workflow.runner.Chain`."""

    data: Path | None = None
    """The capture: a folder with transforms.json or COLMAP's sparse/0, or such a JSON file."""
    images: Path | None = None
    """Folder of photos without poses, in place of --data: `f3rm-ext sfm process` finds the poses first."""
    output: Annotated[Path, tyro.conf.arg(aliases=["--out"])]
    """Folder for everything that is made."""
    dense_points: DenseMode | None = None
    """When the coarse splats begin at points that stereo between the photos finds: auto, always or never. By default
    auto, which decides by the points that the capture has."""
    coarse_method: Literal["sugar-ext", "sugar-ext-lite"] | None = None
    """Method of the coarse splats. By default sugar-ext with a GPU, and sugar-ext-lite without."""
    regularization: Annotated[str | None, tyro.conf.arg(aliases=["-r"])] = None
    """Loss that pulls the coarse splats to surfaces: none, density, sdf, dn-consistency or planar. By default that of
    the method."""
    skip_coarse: bool = False
    """Train no coarse splats and take those of --coarse-checkpoint."""
    coarse_checkpoint: Path | None = None
    """The splats to take: config.yml of a run, .ply, .spz or .splat, SuGaR's .pt, or a folder of 3DGS or SuGaR."""
    splats_frame: Literal["auto", "scene", "capture"] = "auto"
    """Frame of the splats of a file: scene, as `f3rm-ext export splats` writes them, or capture, as 3DGS and SuGaR do.
    auto takes capture for folders and SuGaR's files, else scene."""
    mesh_method: Literal["tsdf", "level-set", "poisson-centres"] = "tsdf"
    """How the surface is found."""
    vertices: int | None = None
    """Most vertices of the mesh, 4 or more. By default 200,000, without a GPU 30,000. Texturing takes minutes for each
    million of triangles."""
    refinement_time: Literal["short", "medium", "long"] | None = None
    """Length of the refinement: 2,000, 7,000 or 15,000 steps. By default long, without a GPU short."""
    skip_refine: bool = False
    """Texture the mesh as it was extracted."""
    texture_size: int | None = None
    """Side of the texture in pixels, 64 to 8192. By default the power of two that fits the photos."""
    skip_eval: bool = False
    """Measure nothing."""
    truth: Path | None = None
    """True surface to measure the mesh against. By default gt_mesh.npz of the capture, if it has one."""
    sh_degree: int | None = None
    """Degree of the spherical harmonics in both trainings, 0 to 3."""
    optimize_memory: bool = False
    """Store harmonics and their optimiser in half of the memory, in both trainings."""
    fragmentation: Literal["auto", "minimal", "normal", "aggressive"] | None = None
    """How often both trainings return unused memory to the GPU."""
    resolution_scale: float | None = None
    """Factor on the size of the photos in both trainings, above 0 to 1. By default 1; without a GPU, larger photos are
    reduced to about 400 px. The texture takes them as they are."""
    profile_tensors: bool = False
    """Record what the memory of both trainings is made of."""
    from_stage: StageName | None = None
    """Do this stage and those after it again, even if nothing has changed."""
    until_stage: StageName | None = None
    """End after this stage."""
    passed_on: tyro.conf.Suppress[dict[str, StageOptions]] = field(default_factory=dict)
    """Options of single stages, by stage."""

    def __post_init__(self) -> None:
        if (self.data is None) == (self.images is None):
            raise ConfigError(
                "Give either --data (a capture with poses) or --images (a folder of photos without poses), and not "
                f"{'both' if self.images else 'neither'}."
            )
        if self.images is None and "sfm" in (self.from_stage, self.until_stage):
            raise ConfigError("The stage sfm finds poses of photos: give them with --images in place of --data.")
        if self.images is not None and self.skip_coarse:
            raise ConfigError("--coarse-checkpoint needs the poses that the splats were trained on: give --data.")
        if self.dense_points is not None and self.skip_coarse:
            raise ConfigError(
                "--dense-points are where coarse splats begin, and --skip-coarse leaves these out: drop one of the two."
            )
        if self.skip_coarse != (self.coarse_checkpoint is not None):
            raise ConfigError(
                "--skip-coarse and --coarse-checkpoint go together: give the splats to start from, or leave both "
                "out to train them."
            )
        if self.regularization == "refinement" and self.skip_coarse:
            self.regularization = None  # SuGaR's forks choose the refinement so; here it is a stage
        if self.regularization is not None and self.skip_coarse:
            raise ConfigError("--regularization is of the coarse splats, which --skip-coarse leaves out: drop it.")
        if self.vertices is not None and self.vertices < 4:
            raise ConfigError(f"--vertices is {self.vertices}: use 4 or more.")
        first, last = self.from_stage or STAGES[0], self.until_stage or STAGES[-1]
        if STAGES.index(first) > STAGES.index(last):
            raise ConfigError(
                f"--from-stage {first} comes after --until-stage {last}: the stages are {', '.join(STAGES)}."
            )

    @property
    def capture(self) -> Path:
        """The capture with poses: the one given, or the one that the first stage makes of the photos."""
        return self.data if self.data is not None else self.output / CAPTURE

    def of_stage(self, stage: str, own: StageOptions) -> StageOptions:
        """Returns the options of a stage's command: its own, and those passed on, which win."""
        return own | self.passed_on.get(stage, {})

    def of_trainings(self) -> StageOptions:
        """Returns the options that both trainings get."""
        given: dict[str, object | None] = {
            "sh-degree": self.sh_degree,
            "optimize-memory": self.optimize_memory or None,
            "fragmentation": self.fragmentation,
            "resolution-scale": self.resolution_scale,
            "profile-tensors": self.profile_tensors or None,
        }
        return {name: (str(value),) for name, value in given.items() if value is not None}


def split_passed_on(arguments: Sequence[str]) -> tuple[list[str], dict[str, StageOptions]]:
    """Separates options of single stages from a command line.

    >>> split_passed_on(["--data", "room", "--coarse.max-num-iterations", "500", "--mesh.voxel=0.02"])
    (['--data', 'room'], {'coarse': {'max-num-iterations': ('500',)}, 'mesh': {'voxel': ('0.02',)}})
    >>> split_passed_on(["--coarse.optimize-memory", "--mesh.unbounded"])
    ([], {'coarse': {'optimize-memory': ('True',)}, 'mesh': {'unbounded': ()}})

    Args:
        arguments: the words typed.

    Raises:
        ConfigError: an option is of a stage that has none, or replaces what the chain itself decides.
    """
    own: list[str] = []
    passed: dict[str, StageOptions] = {}
    target: tuple[str, str] | None = None
    for word in arguments:
        if not word.startswith("--") and word not in ("-r", "-h"):
            if target is None:
                own.append(word)
            else:
                passed[target[0]][target[1]] += (word,)
            continue
        target = None
        stage, dot, rest = word.removeprefix("--").partition(".")
        if not dot or "=" in stage:
            own.append(word)
            continue
        if stage not in PASSED_ON:
            raise ConfigError(
                f"{word} is an option of no stage: begin it with {', '.join(f'--{name}.' for name in PASSED_ON)}."
            )
        name, equals, value = rest.partition("=")
        target = None if equals else (stage, name.replace("_", "-"))
        passed.setdefault(stage, {})[name.replace("_", "-")] = (value,) if equals else ()
    for stage in _TRAININGS & passed.keys():
        if "load-config" in passed[stage]:
            raise ConfigError(
                f"--{stage}.load-config would replace all options of this stage, also those that say where its files "
                "are: give the options themselves."
            )
        # ns-train wants the value of a switch
        passed[stage] = {name: values or ("True",) for name, values in passed[stage].items()}
    return own, passed


def words_of(options: StageOptions) -> Words:
    """Returns options as words of a command line.

    >>> words_of({"crop-min": ("0", "0", "0")})
    ('--crop-min', '0', '0', '0')
    """
    return tuple(word for name, values in options.items() for word in (f"--{name}", *values))
