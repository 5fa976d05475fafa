"""The demo: runs the commands a user would type, one after the other, and writes a report.

The commands run in one folder, which holds ``capture/`` (the synthetic room) or ``posed/`` (photos with their poses),
``runs/`` (training), ``logs/``, ``report.html`` and ``demo.json``. The latter records the finished stages, so the same
command continues where the last one stopped.
"""

import hashlib
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.html.content import ReportContent, Stage, capture_name, machine_facts
from f3rm_ext.html.page import build_page
from f3rm_ext.synthetic import SynthConfig
from f3rm_ext.utils.atomic_files import FolderLock, digest_of, write_atomic
from f3rm_ext.workflow.commands import Command, Outcome, Progress, progress_of, run_command
from f3rm_ext.workflow.records import lpips_reason, newest_checkpoint, read_json, read_scalars, steps_of
from f3rm_ext.workflow.requirements import check_requirements

if TYPE_CHECKING:
    from rich.console import Console

FIELD, SPLATS = "f3rm-ext-lite", "sugar-ext-lite"
Method = Literal["auto", "f3rm-ext-lite", "sugar-ext-lite"]
MOST_PHOTOS_FOR_SPLATS = 20
"""Captures of at most so many photos get splats. At 20 photos of the fox both have the same quality, and splats take
two thirds of the time (`benchmarks/defaults.py --only photos`)."""
STEPS = {FIELD: 3000, SPLATS: 1200}
"""Steps of training by default."""
EXTRACTOR = "dense-daisy"
"""What is lifted onto splats by default, as the field learns by default."""
STATE_NAME, REPORT_NAME = "demo.json", "report.html"
POSED = "posed"
"""Folder of the capture that is made of photos without poses."""
RAYS_PER_STEP = 512
"""Within a few minutes, many small steps train better than few large ones. After 100 s on one CPU core, the synthetic
room has 20.2 dB on held-out views with 512 rays, 19.0 dB with 1024 and 16.9 dB with 2048."""
LONG_SIDE_PX = 400
"""Images of captures are reduced to about this longest side by default."""
_STEP = re.compile(r"^\s*(\d+) \(\s*[\d.]+%\)")
_VIEW = re.compile(r"^View (\d+) of (\d+)")
_LARGE_PX = 1600


@dataclass
class DemoOptions:
    """Options of the demo, see :class:`f3rm_ext.scripts.demo.Demo`."""

    out: Path
    data: Path | None = None
    images: Path | None = None
    method: Method = "auto"
    steps: int = 0
    """0: those of the method."""
    minutes: float = 3.0
    extractors: tuple[str, ...] = ()
    scale: float = 0.0
    exemplar: str = ""
    room: SynthConfig = field(
        default_factory=lambda: SynthConfig(num_images=40, width=288, height=216, holdout_every=10)
    )


class DemoRun:
    """One call of the demo.

    Args:
        options: options of the demo.
        console: shows progress.
    """

    def __init__(self, options: DemoOptions, console: "Console") -> None:
        self.options, self.console = options, console
        self.out = options.out.absolute()
        self.state: dict[str, Any] = {}
        self.stages: list[Stage] = []
        self.method, self.steps = FIELD, STEPS[FIELD]

    def run(self) -> Path:
        """Runs all unfinished stages and writes the report.

        Returns:
            Path of the report.

        Raises:
            ConfigError: the folder holds other files, or another demo is running there.
            CommandError: one of the commands failed.
        """
        self._open_folder()
        lock = FolderLock(self.out / ".lock")
        if lock.is_held():
            raise ConfigError(f"Another demo is running in {self.options.out}: wait for it, or choose another --out.")
        with lock.hold():
            self.state = read_json(self.out / STATE_NAME)
            for note in check_requirements(self.out, training="fields", meshes=False, scores=True):
                self.console.print(f"  {note}", highlight=False, markup=False, soft_wrap=True)
            data = self._capture()
            self.method = self._choose_method(data)
            self.steps = self.options.steps or STEPS[self.method]
            run = self._train(data)
            if self.method == SPLATS:
                self._lift(run)
            metrics = self._evaluate(run)
            measured = self._measure(run)
            return self._report(data, run, metrics, measured)

    # --- stages ------------------------------------------------------------------------------------------------------

    @property
    def synthetic(self) -> bool:
        """Whether the demo makes its own room."""
        return self.options.data is None and self.options.images is None

    def _capture(self) -> str:
        """Makes the synthetic room or finds poses, if needed. Returns the capture's path as the commands name it."""
        if self.options.data is not None:
            return str(self.options.data.absolute())
        if self.options.images is not None:
            return self._pose(self.options.images.absolute())
        room, folder = self.options.room, self.out / "capture"
        wanted = {name: value for name, value in asdict(room).items() if name != "overwrite"}
        arguments = ["f3rm-ext", "scene", "synth", "capture"]
        default = asdict(SynthConfig())
        for name, value in wanted.items():
            if value != default[name]:
                arguments += ["--" + name.replace("_", "-"), str(value)]

        def images() -> Progress:
            done = len(list(self.out.glob(".capture.partial-*/images/*.png")))
            return done, room.num_images, f"{done} of {room.num_images} photos"

        found = read_json(folder / "scene.json")
        if found and found.get("options") != wanted:
            arguments.append("--overwrite")  # replaces synthetic captures only
        self._stage(
            "capture",
            "Making the room",
            arguments,
            key=json.dumps(wanted, sort_keys=True),
            finished=lambda: read_json(folder / "scene.json").get("options") == wanted,
            on_poll=images,
        )
        return "capture"

    def _pose(self, images: Path) -> str:
        """Makes a capture of photos without poses; photos that were added or changed make the command run again."""
        files = sorted(path for path in images.rglob("*") if path.is_file())
        stamps = " ".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)
        self._stage(
            "poses",
            "Finding camera poses",
            ["f3rm-ext", "sfm", "process", "--images", str(images), "--output", POSED],
            key=digest_of(stamps.encode()),
            finished=(self.out / POSED / "transforms.json").is_file,
            on_line=progress_of,
        )
        return POSED

    def _choose_method(self, data: str) -> str:
        """Returns the method to train, and says so where the photos decided: few are enough for splats, not a field."""
        if self.options.method != "auto":
            return self.options.method
        from f3rm_ext.capture.checks import read_transforms

        try:
            meta, _ = read_transforms(self.out / data)
        except CaptureError:
            return FIELD  # the training says what is wrong
        photos = len(meta["frames"])
        if self.synthetic or not 0 < photos <= MOST_PHOTOS_FOR_SPLATS:
            return FIELD
        self.console.print(
            f"  {photos} photos are few: training splats ({SPLATS}); --method {FIELD} trains a field", highlight=False
        )
        return SPLATS

    def _train(self, data: str) -> Path:
        """Trains or continues training. Returns the run folder, relative to ``out``."""
        scale = self.scale(data)
        key = self._run_key(data, scale)
        run = self._run_folder(data, key)
        name = run.parts[1]
        arguments = ["ns-train", self.method, "--data", data, "--output-dir", "runs", "--experiment-name", name]
        arguments += ["--timestamp", key, "--vis", "tensorboard", "--max-num-iterations", str(self.steps)]
        arguments += ["--steps-per-save", str(max(10, min(500, self.steps)))]
        arguments += ["--logging.local-writer.max-log-size", "0"]
        if self.method == FIELD:
            arguments += ["--pipeline.datamanager.train-num-rays-per-batch", str(RAYS_PER_STEP)]
        if self.method == FIELD and self.options.extractors:
            arguments += ["--pipeline.datamanager.features.extractors", *self.options.extractors]
        if scale != 1:
            arguments += ["--pipeline.datamanager.camera-res-scale-factor", f"{scale:g}"]
        reused = self._is_trained(run, key)
        if reused:
            self._say_reused("Training", f"{self.steps_done(run)} steps")
        else:
            self._train_on(arguments, run, key)
        done, record = self.steps_done(run), self._record("train", key)
        note = f"{done} steps"
        if done < self.steps:
            note += f" of {self.steps}: stopped at the limit of {self.options.minutes:g} min"
        if record.get("runs", 1) > 1:
            note += f"; in {record['runs']} runs"
        self.stages.append(Stage("Training", record.get("seconds", 0.0), _text(arguments), reused, note))
        return run

    def _run_folder(self, data: str, key: str) -> Path:
        """Returns the folder of a run, relative to ``out``: the one that is there, under any name, else a new one."""
        there = sorted((self.out / "runs").glob(f"*/{self.method}/{key}"))
        if there:
            return there[0].relative_to(self.out)
        name = "room" if self.synthetic else _plain(capture_name(self.options.images or Path(data)))
        return Path("runs", name, self.method, key)

    def _is_trained(self, run: Path, key: str) -> bool:
        """Whether all steps are done or the time is used up."""
        done = self.steps_done(run)
        return done > 0 and (done >= self.steps or self._time_left_s(key) < 1)

    def _time_left_s(self, key: str) -> float:
        return 60 * self.options.minutes - self._record("train", key).get("working_s", 0.0)

    def _train_on(self, arguments: list[str], run: Path, key: str) -> None:
        """Runs training until the steps are done or the time is used up."""
        record, done, planned = self._record("train", key), self.steps_done(run), self.steps
        resume = ["--load-dir", str(run / "nerfstudio_models")] if done else []
        if done:
            self.console.print(f"  continuing training after {done} steps", highlight=False)

        def steps(line: str) -> Progress | None:
            match = _STEP.match(line)
            return (int(match[1]), planned, f"step {match[1]} of {planned}") if match else None

        command = Command(
            "Training",
            [*arguments, *resume],
            self.out / "logs" / "train.log",
            on_line=steps,
            limit_s=max(1.0, self._time_left_s(key)),
        )
        start, outcome = time.monotonic(), Outcome(0.0, 0.0, False)
        try:
            outcome = run_command(command, self.out, self.console)
        finally:
            record = {
                "key": key,
                "seconds": record.get("seconds", 0.0) + time.monotonic() - start,
                "working_s": record.get("working_s", 0.0) + outcome.working_s,
                "runs": record.get("runs", 0) + 1,
            }
            self._keep("train", record)
        if not self.steps_done(run):
            raise ConfigError(
                f"Training was stopped after {self.options.minutes:g} min, before it saved a checkpoint: "
                "give it more time with --minutes."
            )

    def _lift(self, run: Path) -> None:
        """Lifts features onto splats; training that is stopped at its limit does not come to it."""
        extractors = self.options.extractors or (EXTRACTOR,)
        arguments = ["f3rm-ext", "features", "lift", "--load-config", str(run / "config.yml")]
        self._stage(
            "lift",
            "Lifting features onto the splats",
            [*arguments, "--extractors", *extractors],
            key=f"{self._checkpoint_key(run)} {' '.join(extractors)}",
            finished=lambda: True,
        )

    def _evaluate(self, run: Path) -> dict[str, float]:
        target = run / "eval.json"
        pictures = run / "eval"

        def views() -> Progress | None:
            done = len(list((self.out / pictures).glob("*img_*.png")))
            return (done, float("inf"), f"{done} views") if done else None

        arguments = ["ns-eval", "--load-config", str(run / "config.yml"), "--output-path", str(target)]
        arguments += ["--render-output-path", str(pictures)]
        self._stage(
            "eval",
            "Rendering and measuring held-out views",
            arguments,
            key=self._checkpoint_key(run),
            finished=lambda: bool(read_json(self.out / target).get("results")),
            on_poll=views,
        )
        return read_json(self.out / target)["results"]

    def _measure(self, run: Path) -> dict[str, Any]:
        target = run / "report"
        arguments = [sys.executable, "-m", "f3rm_ext.workflow.measure", "--load-config", str(run / "config.yml")]
        arguments += ["--out", str(target)]
        if self.options.exemplar:
            arguments += ["--exemplar", self.options.exemplar]

        def views(line: str) -> Progress | None:
            match = _VIEW.match(line)
            return (int(match[1]) - 1, int(match[2]), f"view {match[1]} of {match[2]}") if match else None

        self._stage(
            "query",
            "Querying by example",
            arguments,
            key=f"{self._checkpoint_key(run)} {self.options.exemplar}",
            finished=lambda: bool(read_json(self.out / target / "measure.json")),
            on_line=views,
        )
        return read_json(self.out / target / "measure.json")

    def _report(self, data: str, run: Path, metrics: dict[str, float], measured: dict[str, Any]) -> Path:
        name = "the room" if self.synthetic else capture_name(self.options.images or Path(data))
        content = ReportContent(
            method=self.method,
            title="A room that answers" if self.synthetic else f"{name}: a scene that answers",
            data_name=name,
            synthetic=self.synthetic,
            measured=measured,
            pictures=self.out / run / "report",
            metrics=metrics,
            lpips_note=lpips_reason(self.out / "logs" / "eval.log"),
            coverage=read_json(self.out / run / "coverage.json"),
            curves=read_scalars(self.out / run),
            stages=self.stages,
            folder=_relative(self.out),
            next_commands=[
                ("Explore it in the browser", f"ns-viewer --load-config {run / 'config.yml'}"),
                ("The same with your own photos", "f3rm-ext demo --images MY_PHOTOS --out my-demo"),
            ],
            facts=machine_facts(measured.get("device", "")),
        )
        path = self.out / REPORT_NAME
        write_atomic(path, build_page(content).encode(errors="backslashreplace"))
        return path

    # --- bookkeeping -------------------------------------------------------------------------------------------------

    def _stage(
        self,
        stage: str,
        name: str,
        arguments: list[str],
        *,
        key: str,
        finished: Callable[[], bool],
        on_line: Callable[[str], Progress | None] = lambda line: None,
        on_poll: Callable[[], Progress | None] = lambda: None,
    ) -> None:
        """Runs the command of a stage, unless it was run before with the same key and its output still exists."""
        record = self._record(stage, key)
        reused = bool(record.get("done")) and finished()
        if reused:
            self._say_reused(name)
        else:
            self._keep(stage, {"key": key, "done": False})
            log = self.out / "logs" / f"{stage}.log"
            outcome = run_command(Command(name, arguments, log, on_line, on_poll), self.out, self.console)
            record = {"key": key, "done": True, "seconds": outcome.seconds}
            self._keep(stage, record)
        self.stages.append(Stage(name, record["seconds"], _text(arguments), reused))

    def _record(self, stage: str, key: str) -> dict[str, Any]:
        record = self.state.get(stage, {})
        return record if record.get("key") == key else {}

    def _keep(self, stage: str, record: dict[str, Any]) -> None:
        self.state[stage] = record
        write_atomic(self.out / STATE_NAME, json.dumps(self.state, indent=1).encode())

    def _say_reused(self, name: str, detail: str = "") -> None:
        suffix = f" [dim]({detail})[/]" if detail else ""
        self.console.print(f"  [green]kept[/] {name}: done before{suffix}", highlight=False)

    def _open_folder(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--out {self.options.out} cannot be created ({error.strerror}): choose another."
            ) from error
        known = {".lock", "logs", "capture", POSED, "runs", STATE_NAME}
        if not (self.out / STATE_NAME).is_file() and any(path.name not in known for path in self.out.iterdir()):
            raise ConfigError(
                f"The folder {self.options.out} holds files that are not of a demo: choose a new one with --out."
            )

    def steps_done(self, run: Path) -> int:
        """Returns the number of steps in the newest checkpoint of a run; 0 without a checkpoint."""
        newest = newest_checkpoint(self.out / run)
        return steps_of(newest) if newest else 0

    def _checkpoint_key(self, run: Path) -> str:
        return f"{run} {self.steps_done(run)}"

    def _run_key(self, data: str, scale: float) -> str:
        """Names the run by a hash of the capture and of all options but the number of steps."""
        from f3rm_ext.capture.colmap_model import capture_files

        content = b"".join(path.read_bytes() for path in capture_files(self.out / data))
        text = json.dumps([self.method, RAYS_PER_STEP, str(data), self.options.extractors, scale]).encode()
        return hashlib.sha256(text + content).hexdigest()[:8]

    def scale(self, data: str) -> float:
        """Returns the factor on the image size: the option, or 1 for the room and about 400 px for captures."""
        if self.options.scale or self.synthetic:
            return self.options.scale or 1.0
        longest = longest_side_px(self.out / data)
        return 1.0 if longest <= LONG_SIDE_PX else max(0.01, round(LONG_SIDE_PX / longest, 2))


def fresh_folder(out: Path) -> Path:
    """Returns the first of ``out``, ``out-2``, ``out-3`` ... that does not exist."""
    number, candidate = 1, out
    while candidate.exists():
        number += 1
        candidate = out.with_name(f"{out.name}-{number}")
    return candidate


def longest_side_px(data: Path) -> float:
    """Returns the longest side of a capture's images as training loads them; 0 if the capture does not tell."""
    from f3rm_ext.capture.checks import read_transforms

    try:
        meta, folder = read_transforms(data)
    except CaptureError:
        return 0.0  # the training says what is wrong
    first = next(iter(meta["frames"]), {})
    sizes = [value for source in (meta, first) for value in (source.get("w"), source.get("h"))]
    longest = max((float(value) for value in sizes if isinstance(value, int | float)), default=0.0)
    # Of large images nerfstudio loads reduced copies from images_2, images_4 ... if these folders exist.
    halvings = 0
    while longest > _LARGE_PX and (folder / f"images_{2 ** (halvings + 1)}").is_dir():
        halvings, longest = halvings + 1, longest / 2
    return longest


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text) or "capture"


def _text(arguments: list[str]) -> str:
    return Command("", arguments, Path()).text


def _relative(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return path.name
