r"""Meshes from trained runs beside the true surface: every extractor, with times and memory.

    python benchmarks/mesh_extraction.py --data room --true-depth
    python benchmarks/mesh_extraction.py --data room --runs none=RUN/config.yml dn-consistency=RUN/config.yml
    python benchmarks/mesh_extraction.py --data tabletop --crop-min -0.45 -0.35 0.004 --crop-max 0.45 0.45 0.3 \
        --thresholds 0.005 0.01 --runs ...

The capture has `gt_mesh.npz` or `gt_points.npz`. Runs are named by what distinguishes them. `--true-depth` fuses the
true depth of the training views instead of rendered depth: no run can do better with this extractor. Each row is
printed and written to results/mesh_extraction.json, which keeps the rows of other captures and runs.
"""

import datetime
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from commands import call
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from PIL import Image

from f3rm_ext.capture.dataparser import CaptureDataParserConfig
from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.splat.cameras import PinholeCameras
from f3rm_ext.surface.extraction import ExtractionOptions, extract_mesh
from f3rm_ext.surface.mesh_files import read_provenance, write_mesh
from f3rm_ext.surface.scenes import SurfaceScene
from f3rm_ext.surface.views import RenderedView, SceneViews, pinhole

HERE = Path(__file__).parent
METHODS = ("tsdf", "level-set", "poisson-centres")
Vector = tuple[float, float, float]


def true_views(outputs: DataparserOutputs, data: Path, every: int) -> tuple[SceneViews, CaptureFrame]:
    """The training views with their true depth, one of every so many pixels in each direction."""
    frame = CaptureFrame.of_outputs(outputs, data)
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

    data: Path
    """The capture, with gt_mesh.npz or gt_points.npz."""
    runs: tuple[str, ...] = ()
    """Runs as NAME=config.yml."""
    methods: tuple[str, ...] = METHODS
    """Extractors."""
    true_depth: bool = False
    """Fuse the true depth too."""
    every: int = 2
    """Take one of so many pixels of the true depth."""
    thresholds: tuple[float, ...] = ()
    """Distances of the F-scores; by default those of eval-mesh."""
    crop_min: Vector | None = None
    """See eval-mesh."""
    crop_max: Vector | None = None
    """See eval-mesh."""
    poisson_depth: int = 9
    """See export mesh."""
    points: int = 500_000
    """Rays of level-set."""
    work: Path = Path("mesh_extraction")
    """Folder of the meshes."""
    out: Path = HERE / "results" / "mesh_extraction.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Extracts and measures."""
        self.work.mkdir(parents=True, exist_ok=True)
        if self.true_depth:
            self._write(self._true_depth())
        for named in self.runs:
            name, config = named.split("=", 1)
            for method in self.methods:
                out = self.work / f"{self.data.name}-{name}-{method}.ply"
                command = ["f3rm-ext", "export", "mesh", "--load-config", config, "--out", out, "--method", method]
                call([*command, "--poisson-depth", self.poisson_depth, "--points", self.points])
                self._write({"run": name, "method": method, **self._score(out)})

    def _true_depth(self) -> dict[str, Any]:
        outputs = CaptureDataParserConfig(data=self.data).setup().get_dataparser_outputs("train")
        views, frame = true_views(outputs, self.data, self.every)
        began = time.perf_counter()
        mesh = extract_mesh(SurfaceScene(views, None, frame, {}), ExtractionOptions()).mesh
        mesh.vertices = frame.to_capture(np.asarray(mesh.vertices))
        out = self.work / f"{self.data.name}-true-depth.ply"
        write_mesh(out, mesh, {"made_by": "f3rm-ext export mesh", "seconds": time.perf_counter() - began})
        return {"run": "true depth", "method": "tsdf", **self._score(out)}

    def _score(self, mesh: Path) -> dict[str, Any]:
        truth = self.data / "gt_mesh.npz"
        scores = mesh.with_suffix(".json")
        command = ["f3rm-ext", "eval-mesh", mesh, "--out", scores, "--points", 300_000]
        if truth.exists():
            command += ["--truth", truth, "--seen-from", self.data]
        else:
            command += ["--truth", self.data / "gt_points.npz"]
        for option, values in (
            ("--thresholds", self.thresholds),
            ("--crop-min", self.crop_min),
            ("--crop-max", self.crop_max),
        ):
            command += [option, *values] if values else []
        call(command)
        found, said = json.loads(scores.read_text()), read_provenance(mesh)
        kept = ("accuracy", "completeness", "chamfer", "normal_consistency", "scores")
        cost = {key: float(said[key]) for key in ("seconds", "peak_mib") if key in said}
        return {**{key: found[key] for key in kept}, **cost}

    def _write(self, row: dict[str, Any]) -> None:
        print(row, flush=True)
        captures = json.loads(self.out.read_text())["captures"] if self.out.exists() else {}
        rows = {(old["run"], old["method"]): old for old in captures.get(self.data.name, ())}
        rows[row["run"], row["method"]] = row
        captures[self.data.name] = list(rows.values())
        report = {"date": datetime.date.today().isoformat(), "machine": platform.machine(), "captures": captures}
        self.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(MeshExtraction).main()
