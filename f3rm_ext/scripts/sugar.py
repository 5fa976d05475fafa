"""``f3rm-ext sugar run``: from photos or a capture to a textured mesh, in stages that can be interrupted."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from f3rm_ext.errors import ConfigError
from f3rm_ext.scripts.switches import parse_command
from f3rm_ext.workflow.options import ChainOptions, StageName, option_words, split_stage_options

_QUESTIONS = ("text", "exemplar", "vector", "saved")
_FEATURES = "pipeline.model.features"


@dataclass(kw_only=True)
class Run(ChainOptions):
    """Trains splats, extracts a mesh, refines both, textures the mesh, makes a page of the splats, evaluates everything
    and writes a report.

    Each stage is a command of its own, which the report lists: f3rm-ext sfm process for photos without poses, ns-train
    sugar-ext, f3rm-ext export mesh, ns-train sugar-ext-refine, f3rm-ext export refined-mesh, f3rm-ext export texture,
    f3rm-ext export page, ns-eval, eval mesh and eval texture. If you run the same command again, it skips finished
    stages and resumes a training at its last checkpoint, even after a kill. If an option has changed, its stage and
    those that depend on it are repeated; the command says why.

    Options of single stages begin with the stage: --sfm.OPTION for f3rm-ext sfm process, --coarse.OPTION and
    --refine.OPTION for ns-train, --mesh.OPTION, --texture.OPTION and --page.OPTION for f3rm-ext export. `f3rm-ext sfm
    process --help` and the others list them.

    Typical calls:
      f3rm-ext sugar run --data room --output room-mesh
      f3rm-ext sugar run --images photos --output room-mesh --sfm.max-size 1600
      f3rm-ext sugar run --data room --output room-mesh --dense-points always
      f3rm-ext sugar run --data room --output room-mesh --refinement-time short --vertices 50000
      f3rm-ext sugar run --data room --output room-mesh --coarse.max-num-iterations 7000 --mesh.min-views 3
      f3rm-ext sugar run --data room --output room-mesh --from-stage texture --texture-size 4096
      f3rm-ext sugar run --data room --output room-mesh --refine.pipeline.model.features clip --page.text mug plant
      f3rm-ext sugar run --data garden --output garden-mesh --skip-coarse --coarse-checkpoint point_cloud.ply \\
        --splats-frame capture
    """

    @classmethod
    def parse(cls, arguments: Sequence[str], prog: str) -> "Run":
        """Reads a command line without the program's name: ``run``, own options, and options of single stages.

        Raises:
            ConfigError: an option is wrong.
            SystemExit: from tyro, after help (0) or wrong options (2).
        """
        if not arguments or arguments[0] in ("-h", "--help"):
            arguments = ["run", "--help"]
        if arguments[0] != "run":
            raise ConfigError(f"There is no command `{prog} {arguments[0]}`: type `{prog} run`.")
        own, passed_on = split_stage_options(arguments[1:])
        run = parse_command(cls, f"{prog} run", own)
        run.passed_on = passed_on
        run.check_stages()
        return run

    def check_stages(self) -> None:
        """Checks the options of stages other than trainings.

        Raises:
            ConfigError: an option cannot work.
            SystemExit: from tyro, after an unknown option.
        """
        from f3rm_ext.scripts.export_mesh import Mesh
        from f3rm_ext.scripts.export_page import Page
        from f3rm_ext.scripts.export_texture import Texture
        from f3rm_ext.scripts.sfm_process import Process
        from f3rm_ext.sfm.estimators import build_estimator

        if self.images is None and "sfm" in self.passed_on:
            raise ConfigError("--sfm.OPTION is for photos without poses: give them with --images instead of --data.")
        if self.images is not None:
            words = ["--images", str(self.images), "--output", str(self.capture)]
            words += option_words(self.stage_options("sfm"))
            config = parse_command(Process, "f3rm-ext sfm process", words).config
            config.check()
            build_estimator(config.method)
        needed: dict[StageName, tuple[type, str]] = {
            "mesh": (Mesh, "--load-config config.yml --out mesh.ply"),
            "texture": (Texture, "--data data --mesh mesh.ply --out mesh.glb"),
            "page": (Page, "--load-config config.yml --out page.html"),
        }
        for stage, (kind, words) in needed.items():
            parse_command(kind, f"f3rm-ext export {stage}", [*words.split(), *option_words(self.stage_options(stage))])
        self._check_questions()

    def _check_questions(self) -> None:
        """Raises ConfigError where a page is to answer questions about splats that get no features."""
        asked = next((name for name in _QUESTIONS if name in self.passed_on.get("page", {})), None)
        stage = "coarse" if self.skip_refine else "refine"
        is_trained = not (self.skip_refine and self.skip_coarse)
        if asked and is_trained and not self.skip_page and _FEATURES not in self.passed_on.get(stage, {}):
            raise ConfigError(
                f"--page.{asked} asks the splats of the stage {stage}, which get no features: add "
                f"--{stage}.{_FEATURES} EXTRACTOR, such as clip, or leave the question out."
            )

    def main(self) -> int:
        from rich.console import Console

        from f3rm_ext.workflow.chain import ChainRun

        run = ChainRun(self, Console())
        if self.skip_coarse and self.coarse_checkpoint is not None and self.coarse_checkpoint.suffix == ".ply":
            frame = "scene" if self.splats_frame == "auto" else self.splats_frame
            run.say(f"The splats are assumed to be in {frame} coordinates; --splats-frame changes that.")
        return run.main(_resume_command(sys.argv))


def _resume_command(argv: Sequence[str]) -> str:
    """The command line without --from-stage, which would repeat stages.

    >>> _resume_command(["/bin/f3rm-ext", "sugar", "run", "--from-stage", "mesh", "--data", "my room"])
    "f3rm-ext sugar run --data 'my room'"
    """
    words: list[str] = []
    skip = False
    for word in argv[1:]:
        if skip or word.startswith(("--from-stage=", "--from_stage=")):
            skip = False
            continue
        skip = word in ("--from-stage", "--from_stage")
        if not skip:
            words.append(word)
    return shlex.join(["f3rm-ext", *words])
