"""Options of ``f3rm-ext demo`` and ``f3rm-ext sugar run``, and those of single stages, passed on to their commands."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from f3rm_ext.data.stereo import DenseMode
from f3rm_ext.errors import ConfigError
from f3rm_ext.html.content import capture_name
from f3rm_ext.utils.ranges import Range, check_ranges

StageName = Literal[
    "sfm",
    "coarse",
    "clean",
    "mesh",
    "refine",
    "refined-mesh",
    "texture",
    "page",
    "eval-coarse",
    "eval-refined",
    "eval-mesh",
    "eval-texture",
]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""All stages, in the order in which they run."""
_TRAININGS = {"coarse", "refine"}
_FILES = {
    "sfm": {"images", "data", "output", "out", "output-dir"},
    "coarse": {"load-config", "data"},
    "mesh": {"load-config", "splats", "data", "out", "output"},
    "refine": {"load-config", "data", "mesh"},
    "texture": {"data", "mesh", "out", "output"},
    "page": {"load-config", "out", "output"},
}
"""Options by which the chain gives each stage its files."""
PASSED_ON = tuple(_FILES)
"""Stages with options of their own, written ``--STAGE.OPTION``."""
CAPTURE = "capture"
"""Folder in the output for the capture that is made of photos."""
Words = tuple[str, ...]
StageOptions = dict[str, Words]
"""Options of a command: names without dashes, and the words of their values."""


@dataclass
class DemoOptions:
    """Options of :class:`f3rm_ext.workflow.demo.DemoRun`."""

    data: Path | None = None
    """Capture: a folder with transforms.json or COLMAP's sparse/0. By default the demo makes a synthetic room."""
    images: Path | None = None
    """Folder of photos without poses, or a video, in place of --data: `f3rm-ext sfm process` finds the poses first."""
    out: Annotated[Path, tyro.conf.arg(aliases=["--output", "--output-dir"])] = Path("demo")
    """Folder for all files of the demo."""
    method: Literal["auto", "f3rm-ext-lite", "sugar-ext-lite"] = "auto"
    """f3rm-ext-lite trains a field; sugar-ext-lite trains splats, onto which features are lifted. auto chooses splats
    for up to 20 photos to train on, else a field."""
    steps: Annotated[int, Range(0)] = 0
    """Training steps, 1 or more; 0: 3000 (of 512 rays) for a field, 1200 (of one photo) for splats."""
    minutes: Annotated[float, Range(0, math.inf, above=True)] = 3.0
    """Minutes after which training is saved and stopped, even if steps are left, above 0."""
    extractors: tuple[str, ...] = ()
    """2D features to query, as for ns-train. The default is that of f3rm-ext-lite, which needs no weights."""
    scale: Annotated[float, Range(0, 1)] = 0.0
    """Factor on the image size, (0, 1]. The default 0 keeps the room as it is and reduces captures to about 400 px."""
    exemplar: str = ""
    """Query: IMAGE:x,y (a training image and a position in it, in pixels at the scale in use) or the name of a labelled
    object. By default the demo chooses one."""

    def __post_init__(self) -> None:
        if self.images is not None and self.data is not None:
            raise ConfigError("--images (photos without poses) and --data (a capture with poses) exclude each other.")
        if self.images is not None and not self.images.exists():
            raise ConfigError(f"{self.images} does not exist: check the path given with --images.")
        check_ranges(self)


@dataclass(kw_only=True)
class ChainOptions:
    """Options of :class:`f3rm_ext.workflow.chain.ChainRun`."""

    data: Path | None = None
    """The capture: a folder with transforms.json or COLMAP's sparse/0, or such a JSON file."""
    images: Path | None = None
    """Folder of photos without poses, or a video, in place of --data: `f3rm-ext sfm process` finds the poses first."""
    output: Annotated[Path, tyro.conf.arg(aliases=["--out", "--output-dir"])]
    """Folder for everything that is made."""
    dense_points: DenseMode | None = None
    """Whether the coarse splats start from points that stereo between the photos finds: auto, always or never. The
    default is auto, which decides by the points of the capture."""
    coarse_method: Literal["sugar-ext", "sugar-ext-lite"] | None = None
    """Method of the coarse splats. The default is sugar-ext with a GPU and sugar-ext-lite without."""
    regularization: Annotated[str | None, tyro.conf.arg(aliases=["-r"])] = None
    """Loss that pulls the coarse splats to surfaces: none, density, sdf, dn-consistency or planar. The default is that
    of the method."""
    clean: bool = False
    """Remove floaters from the coarse splats before the mesh is extracted, as `f3rm-ext splats clean` does."""
    skip_coarse: bool = False
    """Skip the coarse training and use the splats of --coarse-checkpoint."""
    coarse_checkpoint: Path | None = None
    """The splats to use: config.yml of a run, .ply, .spz, .sog or .splat, SuGaR's .pt, or an output folder of 3DGS or
    SuGaR."""
    splats_frame: Literal["auto", "scene", "capture"] = "auto"
    """Coordinates of splats from a file: scene, as `f3rm-ext export splats` writes them, or capture, as 3DGS and SuGaR
    do. auto means capture for folders and SuGaR's files, else scene."""
    mesh_method: Literal["tsdf", "level-set", "poisson-centres"] = "tsdf"
    """Algorithm that extracts the mesh."""
    vertices: Annotated[int | None, Range(4)] = None
    """Maximum number of vertices of the mesh, 4 or more. The default is 200,000, or 30,000 without a GPU. Texturing
    takes minutes per million triangles."""
    refinement_time: Literal["short", "medium", "long"] | None = None
    """Length of the refinement: 2,000, 7,000 or 15,000 steps. The default is long, or short without a GPU."""
    skip_refine: bool = False
    """Skip the refinement and texture the mesh as it was extracted."""
    texture_size: int | None = None
    """Side of the texture in pixels, 64 to 8192. The default is the power of two that fits the photos."""
    skip_page: bool = False
    """Skip the page of the splats."""
    skip_eval: bool = False
    """Skip all evaluations."""
    truth: Path | None = None
    """Ground-truth surface to compare the mesh with. The default is gt_mesh.npz of the capture, if it has one."""
    sh_degree: Annotated[int | None, Range(0, 3)] = None
    """Degree of the spherical harmonics in both trainings, 0 to 3."""
    optimize_memory: bool = False
    """Store spherical harmonics and their optimiser state in half the memory, in both trainings."""
    fragmentation: Literal["auto", "minimal", "normal", "aggressive"] | None = None
    """How often both trainings return unused cached memory to the GPU."""
    resolution_scale: Annotated[float | None, Range(0, 1, above=True)] = None
    """Factor on the size of the photos in both trainings, (0, 1]. The default is 1; without a GPU, photos of
    more than 500 px are reduced to about 400 px. The texture always uses the full size."""
    profile_tensors: bool = False
    """Record the tensors that take memory, in both trainings."""
    from_stage: StageName | None = None
    """Repeat this stage and those after it, even if nothing has changed."""
    until_stage: StageName | None = None
    """Stop after this stage."""
    passed_on: tyro.conf.Suppress[dict[str, StageOptions]] = field(default_factory=dict)
    """Options of single stages, by stage."""

    def __post_init__(self) -> None:
        if (self.data is None) == (self.images is None):
            given = "Both --data and --images are" if self.images else "Neither --data nor --images is"
            raise ConfigError(f"{given} given: --data takes a capture with poses, --images photos or a video without.")
        if self.images is None and "sfm" in (self.from_stage, self.until_stage):
            raise ConfigError("The stage sfm finds the poses of photos: give them with --images instead of --data.")
        if self.images is not None and self.skip_coarse:
            raise ConfigError("--coarse-checkpoint needs the poses that its splats were trained with: give --data.")
        if self.dense_points is not None and self.skip_coarse:
            raise ConfigError(
                "--dense-points affects the coarse training, which --skip-coarse leaves out: drop one of the two."
            )
        if self.clean and self.skip_coarse:
            raise ConfigError(
                "--clean removes floaters from coarse splats that this command trains, and --skip-coarse trains none: "
                "drop one of the two, or give the run that `f3rm-ext splats clean` writes as --coarse-checkpoint."
            )
        if self.skip_coarse != (self.coarse_checkpoint is not None):
            raise ConfigError(
                "--skip-coarse and --coarse-checkpoint must be given together: name the splats to start from, or leave "
                "both out to train them."
            )
        if self.regularization == "refinement":  # SuGaR's forks choose the refinement so; here it is a stage
            if not self.skip_coarse:
                raise ConfigError(
                    "--regularization refinement is no loss of coarse splats: drop it, as the refinement always runs."
                )
            self.regularization = None
        if self.regularization is not None and self.skip_coarse:
            raise ConfigError(
                "--regularization only affects the coarse training, which --skip-coarse leaves out: drop it."
            )
        check_ranges(self)
        first, last = self.from_stage or STAGES[0], self.until_stage or STAGES[-1]
        if STAGES.index(first) > STAGES.index(last):
            raise ConfigError(
                f"--from-stage {first} comes after --until-stage {last}: the stages are {', '.join(STAGES)}."
            )

    @property
    def capture(self) -> Path:
        """The capture with poses: the one given, or the one that the first stage makes of the photos."""
        return self.data if self.data is not None else self.output / CAPTURE

    @property
    def truth_file(self) -> Path:
        """The ground truth of the mesh: the one given, or where that of the capture would be."""
        return self.truth or self.capture / "gt_mesh.npz"

    @property
    def splats_are_a_file(self) -> bool:
        """Whether the coarse splats are given, and not as a run."""
        return self.coarse_checkpoint is not None and self.coarse_checkpoint.suffix not in (".yml", ".yaml")

    def left_out(self) -> set[StageName]:
        """Returns the stages that the options leave out; before poses are found, the truth may be missing, too."""
        omitted: dict[StageName, bool] = {
            "sfm": self.images is None,
            "coarse": self.skip_coarse,
            "clean": not self.clean,
            "refine": self.skip_refine,
            "refined-mesh": self.skip_refine,
            "page": self.skip_page or (self.skip_refine and self.splats_are_a_file),
            "eval-coarse": self.skip_eval or self.splats_are_a_file,
            "eval-refined": self.skip_eval or self.skip_refine,
            "eval-mesh": self.skip_eval or (self.truth is None and not self.truth_file.is_file()),
            "eval-texture": self.skip_eval,
        }
        return {name for name, is_omitted in omitted.items() if is_omitted}

    def stage_options(self, stage: StageName) -> StageOptions:
        """Returns the options of a stage's command: those that are given for it here, overridden by those passed on."""
        own: dict[str, object | None] = {}
        if stage in _TRAININGS:
            own = {
                "sh-degree": self.sh_degree,
                "optimize-memory": self.optimize_memory or None,
                "fragmentation": self.fragmentation,
                "resolution-scale": self.resolution_scale,
                "profile-tensors": self.profile_tensors or None,
            }
        match stage:
            case "coarse":
                own |= {"regularization": self.regularization, "dense-points": self.dense_points}
            case "mesh":
                frame = self.splats_frame if self.splats_are_a_file else None
                own = {"method": self.mesh_method, "vertices": self.vertices, "splats-frame": frame}
            case "refine":
                own |= {"refinement-time": self.refinement_time}
            case "texture":
                own = {"texture-size": self.texture_size}
            case "page":
                own = {"title": capture_name(self.images or self.capture)}
        given = {name: (str(value),) for name, value in own.items() if value is not None}
        return given | self.passed_on.get(stage, {})


def split_stage_options(arguments: Sequence[str]) -> tuple[list[str], dict[str, StageOptions]]:
    """Separates options of single stages from a command line.

    >>> split_stage_options(["--data", "room", "--coarse.max-num-iterations", "500", "--mesh.voxel=0.02"])
    (['--data', 'room'], {'coarse': {'max-num-iterations': ('500',)}, 'mesh': {'voxel': ('0.02',)}})
    >>> split_stage_options(["--coarse.optimize-memory", "--mesh.unbounded"])
    ([], {'coarse': {'optimize-memory': ('True',)}, 'mesh': {'unbounded': ()}})

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
        if not dot or "=" in stage:  # a dot in the value of --name=value makes no stage
            own.append(word)
            continue
        if stage not in PASSED_ON:
            raise ConfigError(
                f"{word} belongs to no stage: begin it with {', '.join(f'--{name}.' for name in PASSED_ON)}."
            )
        name, equals, value = rest.partition("=")
        target = None if equals else (stage, name.replace("_", "-"))
        passed.setdefault(stage, {})[name.replace("_", "-")] = (value,) if equals else ()
    for stage, options in passed.items():
        if names := sorted(_FILES[stage] & options.keys()):
            raise ConfigError(
                f"--{stage}.{names[0]} would replace a file that `sugar run` gives this stage: leave it out, or "
                "use the stage's own command."
            )
    for stage in _TRAININGS & passed.keys():
        # ns-train wants the value of a switch
        passed[stage] = {name: values or ("True",) for name, values in passed[stage].items()}
    return own, passed


def option_words(options: StageOptions) -> Words:
    """Returns options as words of a command line.

    >>> option_words({"crop-min": ("0", "0", "0")})
    ('--crop-min', '0', '0', '0')
    """
    return tuple(word for name, values in options.items() for word in (f"--{name}", *values))
