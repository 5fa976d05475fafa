"""The stages of the chain: each is one command that a user could type, with what it needs and what it writes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from f3rm_ext.errors import ConfigError
from f3rm_ext.utils.atomic_files import digest_of, digest_of_file
from f3rm_ext.workflow.manifest import Record, identify
from f3rm_ext.workflow.options import ChainOptions, StageName, StageOptions, Words, words_of
from f3rm_ext.workflow.records import newest_checkpoint

TITLES: dict[StageName, str] = {
    "sfm": "Camera poses",
    "coarse": "Coarse splats",
    "mesh": "Mesh",
    "refine": "Refined splats",
    "refined-mesh": "Refined mesh",
    "texture": "Texture",
    "eval-coarse": "Evaluation of the coarse splats",
    "eval-refined": "Evaluation of the refined splats",
    "eval-mesh": "Evaluation of the mesh",
    "eval-texture": "Evaluation of the texture",
}
MESH, REFINED_MESH, TEXTURED = "mesh.ply", "refined-mesh.ply", "textured.glb"
SCORES, PICTURES = "scores.json", "pictures"
_TRAINING = ("--vis", "tensorboard", "--logging.local-writer.max-log-size", "0")


@dataclass(frozen=True)
class Stage:
    """A stage, ready to be run."""

    name: StageName
    program: Words
    """Its command without options."""
    options: StageOptions
    """What decides its result."""
    inputs: dict[str, str]
    """Hashes of what it is made of, by name."""
    places: Words = ()
    """Options that say where files are."""
    outputs: dict[str, Path] = field(default_factory=dict)
    """Files it writes; a training's are known only afterwards."""
    pictures: Path | None = None
    """Folder whose pictures show its progress."""

    @property
    def is_training(self) -> bool:
        """Whether it leaves checkpoints from which it goes on."""
        return self.program[0] == "ns-train"

    @property
    def decided(self) -> dict[str, str]:
        """The options as the manifest keeps them."""
        method = {"method": self.program[1]} if self.is_training else {}
        return method | {f"--{name}": " ".join(values) for name, values in self.options.items()}

    def run_folder(self, folder: Path, record: Record) -> Path:
        """Returns the run folder of a training."""
        return folder / "runs" / self.name / self.program[1] / record.key

    def command(self, folder: Path, record: Record) -> Words:
        """Returns the command to type.

        Args:
            folder: output of the chain.
            record: of this stage.
        """
        words = (*self.program, *self.places, *words_of(self.options))
        if not self.is_training:
            return words
        words = (*words, "--output-dir", str(folder / "runs"), "--experiment-name", self.name)
        words = (*words, "--timestamp", record.key, *_TRAINING)
        run = self.run_folder(folder, record)
        return (*words, "--load-dir", str(run / "nerfstudio_models")) if newest_checkpoint(run) else words

    def written(self, folder: Path, record: Record) -> dict[str, Path]:
        """Returns the files that it has written."""
        if not self.is_training:
            return self.outputs
        run = self.run_folder(folder, record)
        checkpoint = newest_checkpoint(run)
        return {"config": run / "config.yml", **({"checkpoint": checkpoint} if checkpoint else {})}


@dataclass(frozen=True)
class Chain:
    """What the stages are made from.

    Attributes of finished stages come from their records, so :meth:`stages` is consumed while they run.
    """

    options: ChainOptions
    folder: Path
    """Output of the chain, absolute."""
    records: Mapping[str, Record]
    """Of finished stages."""

    def stages(self) -> Iterator[Stage]:
        """Yields the stages in order; each is built after those before it have finished."""
        makers: tuple[Callable[[], Stage | None], ...] = (
            self._sfm,
            self._coarse,
            self._mesh,
            self._refine,
            self._refined_mesh,
            self._texture,
            lambda: self._eval_splats("eval-coarse", "coarse"),
            lambda: self._eval_splats("eval-refined", "refine"),
            self._eval_mesh,
            self._eval_texture,
        )
        for make in makers:
            stage = make()
            if stage is not None:
                yield stage

    # --- making ------------------------------------------------------------------------------------------------------

    def _sfm(self) -> Stage | None:
        images, out = self.options.images, self.options.capture.absolute()
        if images is None:
            return None
        options = self.options.of_stage("sfm", {})
        inputs = {"photos": digest_of_path(images)}
        if "masks" in options:
            inputs["masks"] = digest_of_path(Path(" ".join(options["masks"])))
        places = ("--images", str(images.absolute()), "--output", str(out))
        outputs = {"poses": out / "transforms.json", "points": out / "sparse_pc.ply"}
        return Stage("sfm", ("f3rm-ext", "sfm", "process"), options, inputs, places, outputs)

    def _coarse(self) -> Stage | None:
        if self.options.skip_coarse:
            return None
        own: StageOptions = {}
        if self.options.regularization:
            own["regularization"] = (self.options.regularization,)
        if self.options.dense_points:
            own["dense-points"] = (self.options.dense_points,)
        options = self.options.of_stage("coarse", self.options.of_trainings() | own)
        return Stage("coarse", ("ns-train", str(self.options.coarse_method)), options, self._photos(), self._data())

    def _mesh(self) -> Stage:
        places, inputs = self._splats()
        own: StageOptions = {"method": (self.options.mesh_method,), "vertices": (str(self.options.vertices),)}
        if places[0] == "--splats":
            own["splats-frame"] = (self.options.splats_frame,)
        return Stage(
            "mesh",
            ("f3rm-ext", "export", "mesh"),
            self.options.of_stage("mesh", own),
            self._photos() | inputs,
            (*places, "--out", str(self.folder / MESH)),
            {"mesh": self.folder / MESH},
        )

    def _refine(self) -> Stage | None:
        if self.options.skip_refine:
            return None
        time = {"refinement-time": (self.options.refinement_time,)} if self.options.refinement_time else {}
        options = self.options.of_stage("refine", self.options.of_trainings() | time)
        inputs = self._photos() | {"mesh": self._digest("mesh", "mesh")}
        places = (*self._data(), "--mesh", str(self.folder / MESH))
        if not self.options.skip_coarse:  # what is far from the mesh goes on as it was
            inputs["coarse splats"] = self._digest("coarse", "checkpoint")
            coarse = self.folder / self.records["coarse"].outputs["checkpoint"].path
            places = (*places, "--pipeline.model.start-from", str(coarse))
        return Stage("refine", ("ns-train", "sugar-ext-refine"), options, inputs, places)

    def _refined_mesh(self) -> Stage | None:
        if self.options.skip_refine:
            return None
        places = ("--load-config", self._config("refine"), "--out", str(self.folder / REFINED_MESH))
        inputs = {"refined splats": self._digest("refine", "checkpoint")}
        outputs = {"mesh": self.folder / REFINED_MESH}
        return Stage("refined-mesh", ("f3rm-ext", "export", "refined-mesh"), {}, inputs, places, outputs)

    def _texture(self) -> Stage:
        size = {"texture-size": (str(self.options.texture_size),)} if self.options.texture_size else {}
        mesh, inputs = self._final_mesh()
        return Stage(
            "texture",
            ("f3rm-ext", "export", "texture"),
            self.options.of_stage("texture", size),
            self._photos() | inputs,
            (*self._data(), "--mesh", str(mesh), "--out", str(self.folder / TEXTURED)),
            {"mesh": self.folder / TEXTURED},
        )

    # --- measuring ---------------------------------------------------------------------------------------------------

    def _eval_splats(self, name: StageName, training: StageName) -> Stage | None:
        if self.options.skip_eval:
            return None
        if training == "coarse" and self.options.skip_coarse:
            splats = self.options.coarse_checkpoint
            if splats is None or splats.name != "config.yml":
                return None  # splats of a file have no run to evaluate
            config, inputs = str(splats.absolute()), self._splats()[1]
        elif training == "refine" and self.options.skip_refine:
            return None
        else:
            config = self._config(training)
            inputs = {TITLES[training].lower(): self._digest(training, "checkpoint")}
        scores, pictures = self._scores(name), self._scores(name).parent / PICTURES
        places = ("--load-config", config, "--output-path", str(scores), "--render-output-path", str(pictures))
        return Stage(name, ("ns-eval",), {}, inputs, places, {"scores": scores}, pictures)

    def _eval_mesh(self) -> Stage | None:
        truth = self.options.truth or self.options.capture / "gt_mesh.npz"
        if self.options.skip_eval or (self.options.truth is None and not truth.is_file()):
            return None
        if not truth.is_file():
            raise ConfigError(f"There is no true surface {truth}: check --truth.")
        mesh, inputs = self._final_mesh()
        inputs |= {"truth": digest_of_file(truth)}
        scores = self._scores("eval-mesh")
        places: Words = (str(mesh), "--truth", str(truth.absolute()), "--out", str(scores))
        # Only parts that cameras see can be found; what hides them is known of the capture's own mesh.
        seen = ("--seen-from", str(self.options.capture.absolute())) if self.options.truth is None else ()
        return Stage("eval-mesh", ("f3rm-ext", "eval", "mesh"), {}, inputs, (*places, *seen), {"scores": scores})

    def _eval_texture(self) -> Stage | None:
        if self.options.skip_eval:
            return None
        scores, pictures = self._scores("eval-texture"), self._scores("eval-texture").parent / PICTURES
        places = (str(self.folder / TEXTURED), *self._data(), "--out", str(scores), "--pictures", str(pictures))
        inputs = self._photos() | {"textured mesh": self._digest("texture", "mesh")}
        return Stage("eval-texture", ("f3rm-ext", "eval", "texture"), {}, inputs, places, {"scores": scores}, pictures)

    # --- parts -------------------------------------------------------------------------------------------------------

    @cached_property
    def _capture(self) -> str:
        """Hash of the capture, which exists when the first training begins."""
        return identify(self.options.capture)["digest"]

    def _photos(self) -> dict[str, str]:
        return {"capture": self._capture}

    def _data(self) -> Words:
        return ("--data", str(self.options.capture.absolute()))

    def _scores(self, name: str) -> Path:
        return self.folder / "eval" / name.removeprefix("eval-") / SCORES

    def _digest(self, stage: StageName, output: str) -> str:
        return self.records[stage].outputs[output].digest

    def _config(self, stage: StageName) -> str:
        return str(self.folder / self.records[stage].outputs["config"].path)

    def _final_mesh(self) -> tuple[Path, dict[str, str]]:
        if self.options.skip_refine:
            return self.folder / MESH, {"mesh": self._digest("mesh", "mesh")}
        return self.folder / REFINED_MESH, {"refined mesh": self._digest("refined-mesh", "mesh")}

    def _splats(self) -> tuple[Words, dict[str, str]]:
        """The coarse splats as options of a command, and their hash."""
        splats = self.options.coarse_checkpoint
        if splats is None:
            return ("--load-config", self._config("coarse")), {"coarse splats": self._digest("coarse", "checkpoint")}
        if not splats.exists():
            raise ConfigError(f"There is no {splats}: check --coarse-checkpoint.")
        if splats.suffix in (".yml", ".yaml"):
            checkpoint = newest_checkpoint(splats.parent)
            if checkpoint is None:
                raise ConfigError(f"The run of {splats} has no checkpoint: give one that was saved at least once.")
            return ("--load-config", str(splats.absolute())), {"coarse splats": digest_of_file(checkpoint)}
        return ("--splats", str(splats.absolute()), *self._data()), {"coarse splats": digest_of_path(splats)}


def digest_of_path(path: Path) -> str:
    """Returns a hash of a file's content, or of the names, sizes and times of a folder's files."""
    if path.is_file():
        return digest_of_file(path)
    files = sorted(item for item in path.rglob("*") if item.is_file())
    facts = [(str(item.relative_to(path)), item.stat().st_size, item.stat().st_mtime_ns) for item in files]
    return digest_of(repr(facts).encode())
