"""What the plain command gives beside the best option, on captures from which something was taken or to which it came.

    python benchmarks/defaults.py --data CAPTURES                 # a folder with chair, fox, tabletop, dtu_scan24
    python benchmarks/defaults.py --data CAPTURES --only masks fox

makes the captures, trains each with the default and with every option that the default did not take by itself, and
prints a row for each run. results/defaults.json keeps the rows; a run whose row is there is not
repeated. Held-out views are judged by `ns-eval`: only pixels that masks keep count.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from changed_captures import (
    Maker,
    building,
    make_capture,
    passer_by,
    with_few,
    with_masks,
    with_sparse_points,
    without_points,
)
from PIL import Image
from processes import read_report, write_report
from rich.console import Console
from scipy.ndimage import binary_erosion

from f3rm_ext.query.run import load_run
from f3rm_ext.workflow.commands import Command, run_command
from f3rm_ext.workflow.demo import MOST_PHOTOS_FOR_SPLATS, RAYS_PER_STEP, STEPS

HERE = Path(__file__).parent
FIELD, SPLATS = "f3rm-ext-lite", "sugar-ext-lite"
MASKED = "--pipeline.datamanager.masked-pixels"
DENSE = "--pipeline.datamanager.stereo-points"
DEPTH = "--pipeline.model.depth-loss-mult"
SEED = 42
"""First seed of a case's runs; nerfstudio's default."""
FEW, SHORT, MANY = 300, 800, 2000
"""Steps of the shortest runs, of those of fields of few photos, and of long ones."""
CONSOLE = Console(stderr=True)


@dataclass(frozen=True)
class Case:
    """A capture and the ways to train on it."""

    name: str
    change: str
    """What was taken from the capture, or added."""
    make: Maker
    """Makes the capture, given the folder of all captures and the one to write."""
    method: str
    options: dict[str, tuple[str, ...]]
    """Alternatives to the default, by the words of the table: a flag and its value, or another method."""
    scale: float
    """Factor on the image size."""
    steps: Mapping[str, int] = field(default_factory=lambda: {FIELD: FEW, SPLATS: FEW})
    """Training steps by method."""
    mesh: bool = False
    """Measures the mesh, too."""
    seeds: int = 1
    """Number of runs, whose mean figures make the row."""

    @property
    def key(self) -> str:
        """Names the case."""
        return f"{self.name}, {self.change}, {self.method}"


CAPTURES = [("house", "dtu_scan24", 0.5), ("fox", "fox", 0.25), ("tabletop", "tabletop", 0.375)]
"""Names, folders, and factors on the image size at which a photo is about 200 pixels wide."""

# --- cases -----------------------------------------------------------------------------------------------------------


def mask_cases() -> list[Case]:
    """Captures with masks of an object, and with masks of passers-by."""
    captures: list[tuple[str, str, Maker, float]] = [
        ("chair", "masks of the object", lambda data, out: make_capture(data / "chair", out, 128, 5), 1),
        ("house", "masks of the object", with_masks("dtu_scan24", building), 0.33),
        ("fox", "masks of passers-by", with_masks("fox", passer_by), 0.2),
        ("tabletop", "masks of passers-by", with_masks("tabletop", passer_by), 0.25),
    ]
    return [
        Case(
            name,
            change,
            make,
            method,
            {f"masked-pixels {value}": (MASKED, value) for value in ("ignore", "background")},
            scale,
        )
        for name, change, make, scale in captures
        for method in (FIELD, SPLATS)
    ]


def photo_cases() -> list[Case]:
    """Captures of few photos and of more, as the demo trains them."""
    counts = [("fox", "fox", 11, 0.2), ("fox", "fox", 20, 0.2), ("fox", "fox", 45, 0.2)]
    counts += [("house", "dtu_scan24", 11, 0.33), ("house", "dtu_scan24", 20, 0.33), ("house", "dtu_scan24", 44, 0.33)]
    return [
        Case(
            name,
            f"{count} photos",
            with_few(folder, count),
            SPLATS if count <= MOST_PHOTOS_FOR_SPLATS else FIELD,
            {method: (method,) for method in (FIELD, SPLATS)},
            scale,
            STEPS,
        )
        for name, folder, count, scale in counts
    ]


def depth_cases() -> list[Case]:
    """Fields of few photos and of many, which learn the depth that stereo finds."""
    return [
        Case(
            name,
            change,
            make,
            FIELD,
            {f"depth-loss-mult {value}": (DEPTH, value) for value in ("0.05", "0.0")},
            scale,
            {FIELD: SHORT},
        )
        for name, folder, scale in CAPTURES
        for change, make in (("15 photos", with_few(folder, 15)), ("no points", without_points(folder)))
    ]


def point_cases() -> list[Case]:
    """Captures without points, and with those of structure from motion."""
    modes = {"no points": ("never",), "sparse points": ("never", "always")}
    taken = [(name, "no points", without_points(folder), scale) for name, folder, scale in CAPTURES]
    taken += [("chair", "no points", lambda data, out: make_capture(data / "chair", out, 200, 5), 0.5)]
    taken += [(name, "sparse points", with_sparse_points(folder), scale) for name, folder, scale in CAPTURES]
    return [
        Case(
            f"{name} at {scale * share:g}" + f", {MANY} steps" * long,
            change,
            make,
            SPLATS,
            {f"dense-points {mode}": (DENSE, mode) for mode in modes[change]},
            scale * share,
            {SPLATS: MANY if long else FEW},
            long,
            3 if long and share == 1 and change == "no points" else 1,
        )
        for long in (False, True)
        for share in (1, 2)
        for name, change, make, scale in taken
        if not long or name == "tabletop"  # whose true surface is known
    ]


MESH = ("--thresholds", "0.005", "--crop-min", "-0.45", "-0.35", "0.01", "--crop-max", "0.45", "0.45", "0.3")
"""How the mesh of the tabletop is judged: what stands on the table, to 5 mm, as in mesh_extraction.py."""
ARGUMENTS = {
    FIELD: ("--pipeline.datamanager.train-num-rays-per-batch", RAYS_PER_STEP)
    + ("--pipeline.datamanager.features.extractors",),
    SPLATS: (),
}
"""Small runs, for two processor cores."""
CASES = mask_cases() + photo_cases() + depth_cases() + point_cases()


@dataclass
class Defaults:
    """Measures defaults beside options."""

    data: Path
    """Folder of the captures."""
    only: tuple[str, ...] = ()
    """Words that the names of cases must contain, all of them; by default all cases are run."""
    work: Path = Path("defaults")
    """Folder of captures and runs."""
    out: Path = HERE / "results" / "defaults.json"
    """Where the figures are written."""
    rows: list[dict[str, Any]] = field(default_factory=list, init=False)

    def main(self) -> None:
        """Runs what is not measured yet."""
        self.rows = read_report(self.out).get("rows", [])
        for case in CASES:
            if all(word in case.key for word in self.only):
                default = self._measured(case, "default", ())
                for option in set(case.options) - set(default["takes"]):
                    self._measured(case, option, case.options[option])

    def _measured(self, case: Case, option: str, arguments: Sequence[str]) -> dict[str, Any]:
        """Returns the row of a run, which is added if it is not there."""
        place = {"capture": case.name, "change": case.change, "method": case.method, "option": option}
        for row in self.rows:
            if place.items() <= row.items():
                return row
        capture = self.work / "captures" / plain(f"{case.name} {case.change}")
        if not (capture / "transforms.json").exists():
            case.make(self.data.absolute(), capture)
        method = arguments[0] if len(arguments) == 1 else case.method
        options = [*arguments[len(arguments) % 2 :], "--resolution-scale", case.scale]
        options += ["--max-num-iterations", case.steps[method], *ARGUMENTS[method]]
        folder = self.work / "runs" / plain(case.key)
        names = [plain(option) if case.seeds == 1 else f"{plain(option)}-{SEED + i}" for i in range(case.seeds)]
        runs = [folder / method / name for name in names]
        figures = [
            self._train(case, capture, run, [*options, "--machine.seed", SEED + i]) for i, run in enumerate(runs)
        ]
        row: dict[str, Any] = {**place, **{key: np.mean([each[key] for each in figures]) for key in figures[0]}}
        if case.seeds > 1:
            row["runs"] = figures
        config = (runs[0] / "config.yml").read_text()
        row["takes"] = [name for name, given in case.options.items() if option == "default" and took(config, given)]
        self.rows.append(row)
        write_report({"python": platform.python_version(), "rows": self.rows}, self.out)
        print(row, flush=True)
        return row

    def _train(self, case: Case, capture: Path, run: Path, options: Sequence[object]) -> dict[str, float]:
        """Trains once and returns the figures of the run."""
        command = [
            "ns-train",
            run.parent.name,
            "--data",
            capture,
            "--output-dir",
            run.parents[2],
            "--vis",
            "tensorboard",
        ]
        command += ["--experiment-name", run.parents[1].name, "--timestamp", run.name, *options]
        figures = {"train_s": self._run(command)}
        pictures = run / "pictures"
        judge = ["ns-eval", "--load-config", run / "config.yml", "--output-path", run / "eval.json"]
        self._run([*judge, "--render-output-path", pictures] if "masks" in case.change else judge)
        results = json.loads((run / "eval.json").read_text())["results"]
        figures |= {key: results[key] for key in ("psnr", "ssim", "lpips") if key in results}
        if "masks" in case.change:
            figures["inner_psnr"] = inner_psnr(run / "config.yml", pictures)
        if case.mesh:
            figures["f_score"] = self._mesh(capture, run)
        return figures

    def _mesh(self, capture: Path, run: Path) -> float:
        """Returns the F-score of the mesh of a run."""
        mesh, report = run / "mesh.ply", run / "mesh.json"
        self._run(["f3rm-ext", "export", "mesh", "--load-config", run / "config.yml", "--out", mesh])
        truth = self.data / "tabletop" / "gt_mesh.npz"
        self._run(["f3rm-ext", "eval", "mesh", mesh, "--truth", truth, "--seen-from", capture, "--out", report, *MESH])
        return json.loads(report.read_text())["scores"][0]["f_score"]

    def _run(self, command: Sequence[object]) -> float:
        """Runs a command and returns its seconds."""
        name, *arguments = map(str, command)
        log = self.work / "log.txt"
        return run_command(Command(name, [name, *arguments], log), Path.cwd(), CONSOLE).seconds


def inner_psnr(config: Path, pictures: Path) -> float:
    """Returns the mean PSNR of the pixels that are kept together with their four neighbours.

    Photos mix an object's outermost pixels with what is behind them.

    Args:
        config: config.yml of a run on a capture with masks.
        pictures: those that `ns-eval` has written: photo and rendering of each test photo, side by side.
    """
    run, values = load_run(config), []
    for index, file in enumerate(sorted(pictures.glob("*img*"))):
        photo, rendered = np.split(np.asarray(Image.open(file).convert("RGB")) / 255, 2, axis=1)
        kept = run.photo_mask("test", index)
        inside = np.full(photo.shape[:2], True) if kept is None else np.asarray(binary_erosion(kept), bool)
        values.append(-10 * np.log10(np.mean((photo - rendered)[inside] ** 2)))
    return float(np.mean(values))


def took(config: str, arguments: Sequence[str]) -> bool:
    """Returns whether a run's config.yml has an option (a flag and its value, or a method) by itself."""
    if len(arguments) == 1:
        return f"method_name: {arguments[0]}\n" in config
    flag, value = arguments
    return f" {flag.rsplit('.', 1)[-1].replace('-', '_')}: {value}\n" in config


def plain(text: str) -> str:
    """A name for a folder."""
    return "-".join(text.replace(",", "").split())


if __name__ == "__main__":
    tyro.cli(Defaults).main()
