"""``f3rm-ext demo``: trains, evaluates and queries a scene in stages, and writes a report."""

import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from f3rm_ext.errors import ConfigError
from f3rm_ext.html.content import ReportContent, capture_name, machine_facts
from f3rm_ext.html.content import Stage as StageRow
from f3rm_ext.html.demo_page import build_page
from f3rm_ext.synthetic import SynthConfig
from f3rm_ext.workflow.defaults import choose_scale, longest_side_px
from f3rm_ext.workflow.manifest import Record, identify
from f3rm_ext.workflow.options import DemoOptions, StageOptions
from f3rm_ext.workflow.page import shorten
from f3rm_ext.workflow.records import read_json, read_scalars
from f3rm_ext.workflow.runner import StageRunner, check_requirements
from f3rm_ext.workflow.stages import Stage, pose_stage, scores_file, view_stage

if TYPE_CHECKING:
    from rich.console import Console

FIELD, SPLATS = "f3rm-ext-lite", "sugar-ext-lite"
PAGE = "page.html"
_VIEWS = "eval-views"
MOST_PHOTOS_FOR_SPLATS = 20
"""Captures with at most so many photos to train on get splats. At 20 photos the fox is 1.2 dB better as a field and the
house 0.7 dB better as splats, which take two thirds of the time (`benchmarks/defaults.py --only photos`)."""
STEPS = {FIELD: 3000, SPLATS: 1200}
"""Steps of training by default."""
EXTRACTOR = "dense-daisy"
"""What is lifted onto splats by default, as the field learns by default."""
ROOM = SynthConfig(num_images=40, width=288, height=216, holdout_every=10)
RAYS_PER_STEP = 512
"""Within a few minutes, many small steps train better than few large ones. After 100 s on one CPU core, the synthetic
room has 20.2 dB on held-out views with 512 rays, 19.0 dB with 1024 and 16.9 dB with 2048."""


class DemoRun(StageRunner):
    """One call of ``f3rm-ext demo``."""

    command, option = "f3rm-ext demo", "--out"

    def __init__(self, options: DemoOptions, console: "Console") -> None:
        super().__init__(options.out, console)
        self.options = options
        self.is_synthetic = options.data is None and options.images is None
        self.run_note = ""
        """Remark on the training, for the report."""

    def run(self) -> Path:
        """See :meth:`StageRunner.run`."""
        with self.open_folder(None):
            data = self._make_capture()
            capture = identify(data)
            method = self._choose_method(capture["train_photos"])
            run, inputs = self._train(method, data, capture["digest"])
            config = str(run / "config.yml")
            if method == SPLATS:
                extractors = self.options.extractors or (EXTRACTOR,)
                program, words = ("f3rm-ext", "features", "lift"), ("--load-config", config)
                title = "Lifting features onto the splats"
                self.run_stage(Stage("lift", title, program, {"extractors": extractors}, inputs, words))
                inputs = inputs | {"features": " ".join(extractors)}
            if not self.records["train"].holds_out_nothing:
                title = "Rendering and measuring held-out views"
                self.run_stage(view_stage(_VIEWS, title, self.folder, config, inputs))
            measured = self.folder / "query" / "measure.json"
            exemplar: StageOptions = {"exemplar": (self.options.exemplar,)} if self.options.exemplar else {}
            program = (sys.executable, "-m", "f3rm_ext.workflow.measure")
            words, outputs = ("--load-config", config, "--out", str(measured.parent)), {"measure": measured}
            self.run_stage(Stage("query", "Querying by example", program, exemplar, inputs, words, outputs))
            if method == SPLATS:
                self._make_splats_page(config, inputs, read_json(measured))
            return self.write_report(self._page(method, run, measured))

    def check_requirements(self) -> list[str]:
        """See :meth:`StageRunner.check_requirements`."""
        training = "splats" if self.options.method == SPLATS else "fields"
        return check_requirements(self.folder, training=training, meshes=self.is_synthetic, scores=True)

    def _make_capture(self) -> Path:
        """Makes the synthetic room or finds poses, if needed. Returns the capture."""
        options = self.options
        if options.data is not None:
            return options.data.absolute()
        if options.images is not None:
            capture = self.folder / "posed"
            self.run_stage(pose_stage(options.images, capture, {}))
            return capture
        capture, default = self.folder / "capture", asdict(SynthConfig())
        room = {name.replace("_", "-"): (str(value),) for name, value in asdict(ROOM).items() if value != default[name]}
        words = (str(capture), *(("--overwrite",) if (capture / "scene.json").exists() else ()))
        outputs = {"scene": capture / "scene.json", "poses": capture / "transforms.json"}
        self.run_stage(Stage("capture", "Making the room", ("f3rm-ext", "scene", "synth"), room, {}, words, outputs))
        return capture

    def _choose_method(self, photos: int) -> str:
        """Returns the method to train, and says so if it is chosen because there are few photos."""
        if self.options.method != "auto":
            return self.options.method
        if self.is_synthetic or not 0 < photos <= MOST_PHOTOS_FOR_SPLATS:
            return FIELD
        self.say(f"{photos} photos are few: training splats ({SPLATS}); --method {FIELD} trains a field.")
        return SPLATS

    def _train(self, method: str, data: Path, digest: str) -> tuple[Path, dict[str, str]]:
        """Trains, or resumes a training that has steps and time left.

        Returns the run folder, and what names its result as an input of later stages.

        Raises:
            ConfigError: the time was over before the first checkpoint.
        """
        options, minutes = self.options, self.options.minutes
        steps = options.steps or STEPS[method]
        decided: StageOptions = {}
        if method == FIELD:
            decided["pipeline.datamanager.train-num-rays-per-batch"] = (str(RAYS_PER_STEP),)
            if options.extractors:
                decided["pipeline.datamanager.features.extractors"] = options.extractors
        scale = self._scale(data)
        if scale != 1 or self.options.scale:  # by itself a method may reduce photos
            decided["pipeline.datamanager.camera-res-scale-factor"] = (f"{scale:g}",)
        words = ("--data", str(data), "--max-num-iterations", str(steps))
        words = (*words, "--steps-per-save", str(max(10, min(500, steps))))
        name = "room" if self.is_synthetic else capture_name(options.images or data)

        stage = Stage("train", "Training", ("ns-train", method), decided, {"capture": digest}, words, is_rewritten=True)
        stage = replace(stage, experiment=re.sub(r"[^A-Za-z0-9_-]+", "_", name) or "capture")
        record = self.manifest.get_record("train", stage.decided, stage.inputs)
        step = stage.steps_done(self.folder, record)
        left_s = 60 * minutes - record.working_s
        if not step or (step < steps and left_s >= 1):
            stage = replace(stage, limit_s=max(1.0, left_s), remainder=f"{step} of {steps} steps are done")
        record = self.run_stage(stage)
        step = stage.steps_done(self.folder, record)
        if not step:
            raise ConfigError(
                f"Training was stopped after {minutes:g} min, before it saved a checkpoint: give it more time with "
                "--minutes."
            )
        self.run_note = f"{step} steps"
        if step < steps:
            self.run_note += f" of {steps}: stopped at the limit of {minutes:g} min"
        return stage.run_folder(self.folder, record), {"training": f"{record.key}, {step} steps"}

    def _make_splats_page(self, config: str, inputs: dict[str, str], measured: dict[str, Any]) -> None:
        """Makes a page of the splats that asks what the report asks."""
        path, options = self.folder / PAGE, {"title": (self._name,)}
        query = measured.get("query") or {}
        if "exemplar" in query:
            name = re.sub(r"[^\w .+-]+", " ", query["object"] or "").strip()
            options["exemplar"] = (f"{name}={query['exemplar']}" if name else query["exemplar"],)
        words = ("--load-config", config, "--out", str(path))
        program = ("f3rm-ext", "export", "page")
        self.run_stage(Stage("page", "Making a page of the splats", program, options, inputs, words, {"page": path}))

    def _scale(self, data: Path) -> float:
        """Returns the factor on the image size: the option, or 1 for the room and about 400 px for captures."""
        return self.options.scale or (1.0 if self.is_synthetic else choose_scale(longest_side_px(data)))

    @property
    def _name(self) -> str:
        given = self.options.images or self.options.data
        return "the room" if given is None else capture_name(given)

    def _page(self, method: str, run: Path, measured: Path) -> str:
        measure: dict[str, Any] = read_json(measured)
        views = self.records.get(_VIEWS)
        content = ReportContent(
            method=method,
            title="A room that answers" if self.is_synthetic else f"{self._name}: a scene that answers",
            data_name=self._name,
            synthetic=self.is_synthetic,
            measured=measure,
            pictures=measured.parent,
            metrics=read_json(scores_file(self.folder, _VIEWS)).get("results", {}) if views else {},
            lpips_note=" ".join(views.notes) if views else "",
            coverage=read_json(run / "coverage.json"),
            splats_page=PAGE if "page" in self.records else "",
            curves=read_scalars(run),
            stages=[self._row(name, record) for name, record in self.records.items()],
            folder=os.path.relpath(self.folder) if self.folder.is_relative_to(Path.cwd()) else self.folder.name,
            next_commands=[
                ("Explore it in the browser", shorten(f"ns-viewer --load-config {run / 'config.yml'}", self.folder)),
                ("The same with your own photos", "f3rm-ext demo --images MY_PHOTOS --out my-demo"),
            ],
            facts=machine_facts(measure.get("device", "")),
        )
        return build_page(content)

    def _row(self, name: str, record: Record) -> StageRow:
        notes = [self.run_note] if name == "train" else []
        notes += [f"in {record.runs} runs"] if record.runs > 1 else []
        command = shorten(record.command, self.folder)
        return StageRow(record.title, record.seconds, command, name in self.kept, "; ".join(notes))
