"""The stages of ``f3rm-ext sugar run``, from photos or a capture to a textured mesh and a page of splats."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from f3rm_ext.engine.checkpoint import folder_of, newest_first
from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.atomic_files import hash_file
from f3rm_ext.workflow.manifest import Record, identify
from f3rm_ext.workflow.options import STAGES, ChainOptions, StageName, StageOptions, Words
from f3rm_ext.workflow.stages import PICTURES, POSES, Stage, hash_path, pose_stage, scores_file, view_stage

TITLES: dict[StageName, str] = {
    "sfm": POSES,
    "coarse": "Coarse splats",
    "clean": "Coarse splats without floaters",
    "mesh": "Mesh",
    "refine": "Refined splats",
    "refined-mesh": "Refined mesh",
    "texture": "Texture",
    "page": "Page of the splats",
    "eval-coarse": "Evaluation of the coarse splats",
    "eval-refined": "Evaluation of the refined splats",
    "eval-mesh": "Evaluation of the mesh",
    "eval-texture": "Evaluation of the texture",
}
_BY_PHOTOS = ("eval-coarse", "eval-refined", "eval-texture")
"""Evaluations that compare with held-out photos."""
MESH, REFINED_MESH, TEXTURED, PAGE = "mesh.ply", "refined-mesh.ply", "textured.glb", "page.html"


@dataclass(frozen=True)
class ChainStages:
    """Builds the stages.

    What a stage needs of earlier ones comes from their records, so :meth:`build` is consumed while they run.
    """

    options: ChainOptions
    folder: Path
    """Output, absolute."""
    records: Mapping[str, Record]
    """Records of the finished stages."""

    def build(self) -> Iterator[Stage]:
        """Yields the stages in order up to --until-stage; each is built after those before it have finished."""
        makers: tuple[Callable[[], Stage], ...] = (
            self._sfm,
            self._coarse,
            self._clean,
            self._mesh,
            self._refine,
            self._refined_mesh,
            self._texture,
            self._page,
            lambda: self._eval_splats("eval-coarse", self._last_coarse),
            lambda: self._eval_splats("eval-refined", "refine"),
            self._eval_mesh,
            self._eval_texture,
        )
        for name, make in zip(STAGES, makers, strict=True):
            lacks_photos = name in _BY_PHOTOS and any(record.holds_out_nothing for record in self.records.values())
            if name not in self.options.left_out() and not lacks_photos:
                yield make()
            if name == self.options.until_stage:  # also where it is left out
                return

    def _stage(
        self,
        name: StageName,
        program: str,
        options: StageOptions,
        inputs: dict[str, str],
        words: Words,
        outputs: dict[str, Path] | None = None,
        pictures: Path | None = None,
    ) -> Stage:
        return Stage(name, TITLES[name], tuple(program.split()), options, inputs, words, outputs or {}, pictures)

    # --- making ------------------------------------------------------------------------------------------------------

    def _sfm(self) -> Stage:
        assert self.options.images is not None
        options, start_over = self.options.stage_options("sfm"), self.options.from_stage == "sfm"
        return pose_stage(self.options.images, self.options.capture.absolute(), options, start_over)

    def _coarse(self) -> Stage:
        options, program = self.options.stage_options("coarse"), f"ns-train {self.options.coarse_method}"
        return self._stage("coarse", program, options, self._photos, self._data())

    def _clean(self) -> Stage:
        checkpoint = Path(self.records["coarse"].outputs["checkpoint"].path)
        run = self.folder / "clean" / checkpoint.stem  # a run of splats has one step
        return self._stage(
            "clean",
            "f3rm-ext splats clean",
            {},
            self._photos | {"coarse splats": self._digest("coarse", "checkpoint")},
            ("--load-config", self._config("coarse"), "--out", str(run)),
            {"config": run / "config.yml", "checkpoint": run / "nerfstudio_models" / checkpoint.name},
        )

    def _mesh(self) -> Stage:
        words, inputs = self._splats()
        options, path = self.options.stage_options("mesh"), self.folder / MESH
        words = (*words, "--out", str(path))
        return self._stage("mesh", "f3rm-ext export mesh", options, self._photos | inputs, words, {"mesh": path})

    def _refine(self) -> Stage:
        options = self.options.stage_options("refine")
        inputs = self._photos | {"mesh": self._digest("mesh", "mesh")}
        words = (*self._data(), "--mesh", str(self.folder / MESH))
        if not self.options.skip_coarse:  # those far from the mesh are kept
            inputs["coarse splats"] = self._digest(self._last_coarse, "checkpoint")
            coarse = self.folder / self.records[self._last_coarse].outputs["checkpoint"].path
            words = (*words, "--pipeline.model.start-from", str(coarse))
        return self._stage("refine", "ns-train sugar-ext-refine", options, inputs, words)

    def _refined_mesh(self) -> Stage:
        path, program = self.folder / REFINED_MESH, "f3rm-ext export refined-mesh"
        words, inputs = self._refined_splats()
        return self._stage("refined-mesh", program, {}, inputs, (*words, "--out", str(path)), {"mesh": path})

    def _texture(self) -> Stage:
        options, path = self.options.stage_options("texture"), self.folder / TEXTURED
        mesh, inputs = self._final_mesh()
        words = (*self._data(), "--mesh", str(mesh), "--out", str(path))
        return self._stage("texture", "f3rm-ext export texture", options, self._photos | inputs, words, {"mesh": path})

    def _page(self) -> Stage:
        """The page of the refined splats, or of the coarse ones without a refinement."""
        words, inputs = self._splats() if self.options.skip_refine else self._refined_splats()
        options, path = self.options.stage_options("page"), self.folder / PAGE
        words = (*words, "--out", str(path))
        return self._stage("page", "f3rm-ext export page", options, self._photos | inputs, words, {"page": path})

    # --- measuring ---------------------------------------------------------------------------------------------------

    def _eval_splats(self, name: StageName, training: StageName) -> Stage:
        if name == "eval-coarse" and self.options.skip_coarse:
            (_, config), inputs = self._splats()
        else:
            config, inputs = self._config(training), {TITLES[training].lower(): self._digest(training, "checkpoint")}
        return view_stage(name, TITLES[name], self.folder, config, inputs)

    def _eval_mesh(self) -> Stage:
        truth = self.options.truth_file
        if not truth.is_file():
            raise ConfigError(f"There is no ground truth {truth}: check --truth.")
        mesh, inputs = self._final_mesh()
        inputs |= {"truth": hash_file(truth)}
        scores = scores_file(self.folder, "eval-mesh")
        words = (str(mesh), "--truth", str(truth.absolute()), "--out", str(scores))
        # Only parts that cameras see can be reconstructed. Occlusion is known for the capture's own mesh alone.
        seen = ("--seen-from", str(self.options.capture.absolute())) if self.options.truth is None else ()
        return self._stage("eval-mesh", "f3rm-ext eval mesh", {}, inputs, (*words, *seen), {"scores": scores})

    def _eval_texture(self) -> Stage:
        scores = scores_file(self.folder, "eval-texture")
        pictures = scores.parent / PICTURES
        words = (str(self.folder / TEXTURED), *self._data(), "--out", str(scores), "--pictures", str(pictures))
        inputs = self._photos | {"textured mesh": self._digest("texture", "mesh")}
        return self._stage("eval-texture", "f3rm-ext eval texture", {}, inputs, words, {"scores": scores}, pictures)

    # --- parts -------------------------------------------------------------------------------------------------------

    @cached_property
    def _photos(self) -> dict[str, str]:
        """Hash of the capture, which exists when the first training begins."""
        return {"capture": identify(self.options.capture)["digest"]}

    @property
    def _last_coarse(self) -> StageName:
        """The stage that writes the coarse splats of which the rest is made."""
        return "clean" if self.options.clean else "coarse"

    def _data(self) -> Words:
        return ("--data", str(self.options.capture.absolute()))

    def _digest(self, stage: StageName, output: str) -> str:
        return self.records[stage].outputs[output].digest

    def _config(self, stage: StageName) -> str:
        return str(self.folder / self.records[stage].outputs["config"].path)

    def _final_mesh(self) -> tuple[Path, dict[str, str]]:
        if self.options.skip_refine:
            return self.folder / MESH, {"mesh": self._digest("mesh", "mesh")}
        return self.folder / REFINED_MESH, {"refined mesh": self._digest("refined-mesh", "mesh")}

    def _refined_splats(self) -> tuple[Words, dict[str, str]]:
        """The refined splats as options of a command, and their hash."""
        return ("--load-config", self._config("refine")), {"refined splats": self._digest("refine", "checkpoint")}

    def _splats(self) -> tuple[Words, dict[str, str]]:
        """The coarse splats as options of a command, and their hash."""
        splats = self.options.coarse_checkpoint
        if splats is None:
            stage = self._last_coarse
            return ("--load-config", self._config(stage)), {"coarse splats": self._digest(stage, "checkpoint")}
        if not splats.exists():
            raise ConfigError(f"There is no {splats}: check --coarse-checkpoint.")
        if not self.options.splats_are_a_file:
            saved = newest_first(folder_of(splats))
            if not saved:
                raise ConfigError(f"The run of {splats} has no checkpoint: give one that was saved at least once.")
            return ("--load-config", str(splats.absolute())), {"coarse splats": hash_file(saved[0][1])}
        return ("--splats", str(splats.absolute()), *self._data()), {"coarse splats": hash_path(splats)}
