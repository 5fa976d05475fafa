r"""Meshes of splats beside the true surface: every regularisation with every extractor, with times and memory.

    python benchmarks/mesh_extraction.py --captures chair tabletop room
    python benchmarks/mesh_extraction.py --captures room --modes --true-depth
    python benchmarks/mesh_extraction.py --captures room --modes "planar, full size"

The room and the tabletop of docs/benchmarks.md are copies: benchmarks/sparse_points.py gives them points of structure
from motion, and `f3rm-ext sfm points` dense ones.

Trains `sugar-ext-lite` once per capture and regularisation, extracts a mesh with every extractor, and measures it with
`f3rm-ext eval mesh`. A capture has `gt_mesh.npz` or `gt_points.npz`; its settings are those of its name in
:data:`SETTINGS`, or the last ones. All regularisations but planar share the steps before the first of them begins, as
these are the same. `--true-depth` fuses the true depth of the training views instead of rendered depth: no run can do
better with this extractor. Each row is printed and written to results/mesh_extraction.json at once. What is there
already is not made again; delete the rows to have them anew.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from PIL import Image
from processes import call, read_report, write_report

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.mesh.extraction import extract_mesh
from f3rm_ext.mesh.mesh_files import read_provenance, write_mesh
from f3rm_ext.mesh.options import ExtractionOptions
from f3rm_ext.mesh.scenes import SurfaceScene
from f3rm_ext.mesh.views import RenderedView, SceneViews, pinhole
from f3rm_ext.scripts.eval_mesh import EvalMesh
from f3rm_ext.splat.regularization.options import RegularizationOptions
from f3rm_ext.splat.schedule import FULL_STEPS

HERE = Path(__file__).parent
METHOD = "sugar-ext-lite"
MODEL = "--pipeline.model."
MODES = ("none", "dn-consistency", "planar", "density", "sdf")
FULL_SIZE = "planar, full size"
"""Goes on with planar for half as many steps more, on photos of full size."""
Vector = tuple[float, float, float]


@dataclass(frozen=True)
class Settings:
    """How a capture is trained and measured."""

    steps: int
    """Training steps."""
    scale: float
    """Factor on the image size."""
    begin: int
    """Gaussians that a run begins with."""
    most: int
    """Most Gaussians of a run."""
    thresholds: tuple[float, ...] = ()
    """Distances of the F-scores; by default those of eval mesh."""
    crop: tuple[Vector, Vector] | None = None
    """Lowest and highest corner of what is measured."""


SETTINGS = {
    "chair": Settings(2000, 0.5, 8_000, 20_000, (0.02, 0.04)),
    # The objects, without the table, which the truth leaves out: a table that is right up to the threshold must not
    # count as wrong.
    "tabletop": Settings(2000, 0.5, 20_000, 30_000, (0.005, 0.01), ((-0.45, -0.35, 0.01), (0.45, 0.45, 0.3))),
    # 1 % of the extent of the room is 0.0755 m.
    "room": Settings(3000, 0.5, 20_000, 30_000, (0.05, 0.0755)),
}
EXTRACTORS: dict[str, str] = {
    "tsdf": "--method tsdf --depth median --no-thin-parts",
    "tsdf, planes": "--method tsdf --depth planes",
    "tsdf, planes, 3 views": "--method tsdf --depth planes --min-views 3",
    "tsdf, planes and stereo": "--method tsdf --depth planes --stereo-width 320",
    "level-set": "--method level-set --depth median --points 300000 --poisson-depth 9",
    "poisson-centres": "--method poisson-centres --poisson-depth 9",
}
"""Options of ``f3rm-ext export mesh``."""


def true_views(outputs: DataparserOutputs, data: Path, every: int) -> tuple[SceneViews, CaptureFrame]:
    """The training views with their true depth, one of every so many pixels in each direction."""
    frame = CaptureFrame.from_outputs(outputs, data)
    meta = json.loads((data / "transforms.json").read_text())
    frames = {Path(entry["file_path"]).name: entry for entry in meta["frames"]}
    unit = meta.get("depth_unit_scale_factor", 1e-3) * frame.scale
    cameras = PinholeCameras.of(pinhole(outputs.cameras, 1 / every))

    def render(index: int) -> RenderedView:
        photo = Path(outputs.image_filenames[index])
        entry = frames[photo.name]
        depth = data / entry.get("depth_file_path", f"depth/{photo.stem}.png")
        height, width = int(cameras.heights[index]), int(cameras.widths[index])
        part = (slice(every // 2, every * height, every), slice(every // 2, every * width, every))
        color = np.asarray(Image.open(photo).convert("RGB"))[part]
        return RenderedView(np.array(color), np.asarray(Image.open(depth)).astype(np.float32)[part] * unit)

    return SceneViews(cameras, render), frame


@dataclass
class MeshExtraction:
    """Compares extractors and regularisations by their meshes."""

    captures: tuple[Path, ...]
    """Captures, with gt_mesh.npz or gt_points.npz."""
    modes: tuple[str, ...] = MODES
    """Regularisations."""
    extractors: tuple[str, ...] = tuple(EXTRACTORS)
    """Extractors; none only trains."""
    true_depth: bool = False
    """Fuse the true depth too."""
    every: int = 2
    """Take one of so many pixels of the true depth."""
    work: Path = Path("mesh_extraction")
    """Folder of runs and meshes."""
    out: Path = HERE / "results" / "mesh_extraction.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Trains, extracts and measures what is not there yet."""
        self.work.mkdir(parents=True, exist_ok=True)
        for data in self.captures:
            settings = SETTINGS.get(data.name, SETTINGS["room"])
            if self.true_depth and not self._has(data, "true depth", "tsdf"):
                self._write(data, settings, self._true_depth(data, settings))
            for mode in self.modes:
                run, facts = self._trained(data, settings, mode)
                for name in self.extractors:
                    if not self._has(data, mode, name):
                        mesh = self.work / f"{data.name}-{mode}-{name.replace(', ', '-')}.ply"
                        files = ["--load-config", run / "config.yml", "--output", mesh]
                        call(["f3rm-ext", "export", "mesh", *files, *EXTRACTORS[name].split()])
                        row = {"run": mode, "method": name, **facts, **self._score(data, settings, mesh)}
                        self._write(data, settings, row)

    def _trained(self, data: Path, settings: Settings, mode: str) -> tuple[Path, dict[str, float]]:
        """Returns the folder of a run, which is trained unless it is there, and its figures."""
        answers = self.work / f"{data.name}-{mode}.json"
        run = self._folder(data, mode)
        if not answers.exists():
            # What all share lasts until the first regularisation begins.
            shared = round(RegularizationOptions().entropy_start / FULL_STEPS * settings.steps)
            seconds: float = 0.0
            options: list[object] = [f"{MODEL}regularization", mode]
            steps = settings.steps
            if mode == FULL_SIZE:
                planar, facts = self._trained(data, settings, "planar")
                seconds = facts["train_s"]
                options = [f"{MODEL}regularization", "planar", "--load-dir", planar / "nerfstudio_models"]
                settings = replace(settings, scale=1.0, steps=2 * steps, most=2 * settings.most)
                steps += steps // 2
            elif mode != "planar":
                seconds = self._train(data, settings, "shared", shared, [f"{MODEL}regularization", "none"])
                options += ["--load-dir", self._folder(data, "shared") / "nerfstudio_models"]
            seconds += self._train(data, settings, mode, steps, options)
            evaluated = self.work / f"{data.name}-{mode}-eval.json"
            call(["ns-eval", "--load-config", run / "config.yml", "--output-path", evaluated])
            results = json.loads(evaluated.read_text())["results"]
            facts = {key: results[key] for key in ("psnr", "ssim", "gaussian_count")} | {"train_s": seconds}
            answers.write_text(json.dumps(facts))
        return run, json.loads(answers.read_text())

    def _folder(self, data: Path, name: str) -> Path:
        return self.work / "out" / data.name / METHOD / name

    def _train(self, data: Path, settings: Settings, name: str, steps: int, options: Sequence[object]) -> float:
        """Trains up to a step unless that is done. Returns the seconds that it took."""
        clock = self._folder(data, name) / "seconds.json"
        if not clock.exists():
            command = ["ns-train", METHOD, "--output-dir", self.work / "out", "--experiment-name", data.name]
            command += ["--timestamp", name, "--vis", "tensorboard", "--max-num-iterations", steps]
            command += ["--schedule-steps", settings.steps, f"{MODEL}num-random", settings.begin]
            command += ["--pipeline.datamanager.camera-res-scale-factor", settings.scale]
            command += [f"{MODEL}densify.max-gaussians", settings.most, *options]
            command += ["blender-data"] * (data / "transforms_train.json").exists()
            began = time.perf_counter()
            call([*command, "--data", data.resolve()])
            clock.write_text(json.dumps(time.perf_counter() - began))
        return json.loads(clock.read_text())

    def _true_depth(self, data: Path, settings: Settings) -> dict[str, Any]:
        outputs = CaptureDataParserConfig(data=data).setup().get_dataparser_outputs("train")
        views, frame = true_views(outputs, data, self.every)
        began = time.perf_counter()
        mesh = extract_mesh(SurfaceScene(views, None, frame, {}), ExtractionOptions(thin_parts=False)).mesh
        mesh.vertices = frame.to_capture(np.asarray(mesh.vertices))
        out = self.work / f"{data.name}-true-depth.ply"
        write_mesh(out, mesh, {"made_by": "f3rm-ext export mesh", "seconds": time.perf_counter() - began})
        return {"run": "true depth", "method": "tsdf", **self._score(data, settings, out)}

    def _score(self, data: Path, settings: Settings, mesh: Path) -> dict[str, Any]:
        truth, scores = data / "gt_mesh.npz", mesh.with_suffix(".json")
        low, high = settings.crop or (None, None)
        EvalMesh(
            mesh=mesh,
            truth=truth if truth.exists() else data / "gt_points.npz",
            seen_from=data if truth.exists() else None,
            thresholds=settings.thresholds,
            crop_min=low,
            crop_max=high,
            points=300_000,
            out=scores,
        ).main()
        found, said = json.loads(scores.read_text()), read_provenance(mesh)
        kept = ("accuracy", "completeness", "chamfer", "normal_consistency", "scores")
        cost = {key: float(said[key]) for key in ("seconds", "peak_mib") if key in said}
        return {**{key: found[key] for key in kept}, **cost}

    def _has(self, data: Path, run: str, method: str) -> bool:
        rows = read_report(self.out).get("captures", {}).get(data.name, {}).get("rows", ())
        return any((row["run"], row["method"]) == (run, method) for row in rows)

    def _write(self, data: Path, settings: Settings, row: dict[str, Any]) -> None:
        print(row, flush=True)
        captures = read_report(self.out).get("captures", {})
        rows = captures.get(data.name, {}).get("rows", [])
        order = ["true depth", *MODES, FULL_SIZE]
        rows = sorted([*rows, row], key=lambda one: (order.index(one["run"]), list(EXTRACTORS).index(one["method"])))
        captures[data.name] = {**asdict(settings), "rows": rows}
        write_report({"captures": captures}, self.out)


if __name__ == "__main__":
    tyro.cli(MeshExtraction).main()
