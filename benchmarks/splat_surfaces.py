"""Quality of `sugar-ext-lite` on an object with a known surface: what regularisation, storage and filters do.

Runs of equal steps on a capture in the format of NeRF-synthetic with `gt_points.npz` (points on the true surface):

1. regularisation none, density and dn-consistency: held-out PSNR, and the distance of Gaussian centres from the surface
   (chamfer distances in scene units, see :func:`chamfer`),
2. spherical harmonics stored as float16 beside float32,
3. without mip filters beside with them, evaluated at the size of training and larger and smaller (`f3rm-ext
   eval-scales`).

    python benchmarks/splat_surfaces.py --data chair

prints each row and writes results/splat_surfaces.json. Runs that are there already are only measured again.
"""

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from scipy.spatial import KDTree

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
METHOD = "sugar-ext-lite"
MODEL = "--pipeline.model."


def chamfer(centres: np.ndarray, surface: np.ndarray) -> dict[str, float]:
    """Mean distance from the centres to the surface (accuracy), from the surface to the centres (completeness), and
    their sum.

    Args:
        centres: (n, 3).
        surface: (m, 3), points on the true surface.
    """
    accuracy = float(KDTree(surface).query(centres)[0].mean())
    completeness = float(KDTree(centres).query(surface)[0].mean())
    return {"accuracy": accuracy, "completeness": completeness, "chamfer": accuracy + completeness}


@dataclass
class SplatSurfaces:
    """Compares regularisations, storages and filters."""

    data: Path
    """A capture in the format of NeRF-synthetic with gt_points.npz."""
    work: Path = Path("splat_surfaces")
    """Folder of the runs."""
    steps: int = 3000
    """Steps of each run."""
    scale: float = 0.25
    """Factor on the image size."""
    only: tuple[str, ...] = ()
    """Names of the runs to make; by default all."""
    out: Path = HERE / "results" / "splat_surfaces.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Runs everything."""
        filters = (f"{MODEL}mip.filter-2d", f"{MODEL}mip.filter-3d")
        off = [part for name in filters for part in (name, "False")]
        runs: list[tuple[str, str, list[str]]] = [
            ("none", "none", []),
            ("density", "density", []),
            ("dn-consistency", "dn-consistency", []),
            ("float16", "none", [f"{MODEL}sh-storage", "float16"]),
            ("no mip filters", "none", off),
        ]
        before = json.loads(self.out.read_text())["rows"] if self.out.exists() else []
        rows = {row["run"]: row for row in before}
        for name, mode, options in runs:
            if self.only and name not in self.only:
                continue
            rows[name] = self._run(name, mode, options)
            print(rows[name], flush=True)
            report = {
                "date": datetime.date.today().isoformat(),
                "machine": platform.machine(),
                "python": platform.python_version(),
                "options": {"steps": self.steps, "scale": self.scale},
                "rows": [rows[name] for name, *_ in runs if name in rows],
            }
            self.out.write_text(json.dumps(report, indent=1) + "\n")

    def _run(self, name: str, mode: str, options: list[str]) -> dict[str, Any]:
        folder = self.work / "out" / "chair" / METHOD / name.replace(" ", "-")
        last = folder / "nerfstudio_models" / f"step-{self.steps - 1:09d}.ckpt"
        started = time.perf_counter()
        trained = not last.exists()
        if trained:
            command = ["ns-train", METHOD, "--output-dir", self.work / "out", "--experiment-name", "chair"]
            command += ["--timestamp", folder.name, "--vis", "tensorboard", "--max-num-iterations", self.steps]
            command += ["--pipeline.datamanager.camera-res-scale-factor", self.scale, f"{MODEL}regularization", mode]
            command += [*options, "blender-data", "--data", self.data.resolve()]
            self._call(command)
        row: dict[str, Any] = {"run": name, "steps": self.steps}
        if trained:
            row["train_s"] = time.perf_counter() - started
        answers = self.work / f"{folder.name}.json"
        self._call(["ns-eval", "--load-config", folder / "config.yml", "--output-path", answers])
        results = json.loads(answers.read_text())["results"]
        row |= {key: results[key] for key in ("psnr", "ssim", "lpips", "gaussian_count") if key in results}
        state = torch.load(last, weights_only=True, map_location="cpu")["pipeline"]
        surface = np.load(self.data / "gt_points.npz")["points"]
        row |= chamfer(state["_model.gauss_params.means"].numpy(), surface)
        if name in ("none", "no mip filters"):
            scales = self.work / f"{folder.name}-scales.json"
            self._call(["f3rm-ext", "eval-scales", "--load-config", folder / "config.yml", "--out", scales])
            kept = ("scale", "psnr", "ssim", "lpips")
            entries = json.loads(scales.read_text())["scales"]
            row["scales"] = [{key: entry[key] for key in kept if key in entry} for entry in entries]
        return row

    def _call(self, command: list[Any]) -> None:
        parts = [str(part) for part in command]
        subprocess.run([str(BIN / parts[0]), *parts[1:]], check=True, env=dict(os.environ), stdout=sys.stderr)


if __name__ == "__main__":
    tyro.cli(SplatSurfaces).main()
