r"""Refined meshes beside the free splats that they come from: held-out quality, time and memory of every stage.

    python benchmarks/refinement.py --data room
    python benchmarks/refinement.py --data fox --variants "6 a triangle=--pipeline.model.gaussians-per-triangle 6"

1. *free*: `sugar-ext-lite` without regularisation; *free, twice*: the same with the steps of both stages together,
2. *mesh*: `f3rm-ext export mesh` of it,
3. *refined*: `sugar-ext-refine` of that mesh, with as many steps as the free splats, and each of the variants,
4. *textured*: `f3rm-ext export texture` of the mesh, of the refined mesh and, where there is one, of the true mesh,
   with `f3rm-ext eval texture` on the held-out photos at their full size.

prints each row and writes results/refinement.json, which keeps the rows of other captures. Rows that are there already
are left as they are: remove them, or the file, to measure again. Runs that are there already are only measured.
"""

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from processes import call, read_report, write_report

from f3rm_ext.mesh.mesh_files import read_provenance

HERE = Path(__file__).parent
MODEL = "--pipeline.model."
METRICS = ("psnr", "ssim", "lpips", "gaussian_count", "train_it_per_s", "train_peak_memory_mib")


@dataclass
class Refinement:
    """Compares refined meshes with free splats."""

    data: Path
    """A capture with transforms.json."""
    work: Path = Path("refinement")
    """Folder of runs and meshes."""
    steps: int = 1000
    """Steps of the free run, and of each refinement."""
    scale: float = 0.25
    """Factor on the image size."""
    max_gaussians: int = 25_000
    """Most Gaussians of the free run."""
    vertices: int = 12_500
    """Most vertices of the mesh; a closed one has twice as many triangles."""
    sh_degree: int = 3
    """Of all runs."""
    options: str = ""
    """Options of all refinements."""
    variants: tuple[str, ...] = ()
    """Other refinements, as NAME=OPTIONS of ns-train."""
    texture: bool = True
    """Texture the meshes."""
    others: tuple[str, ...] = ()
    """Other meshes to texture, as NAME=FILE."""
    only: tuple[str, ...] = ()
    """Names of the rows to measure; by default all."""
    out: Path = HERE / "results" / "refinement.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Runs everything that is missing."""
        self.work.mkdir(parents=True, exist_ok=True)
        free = ["--max-num-iterations", self.steps, *self._free()]
        self._row("free", lambda: self._trained("free", "sugar-ext-lite", free))
        mesh = self.work / f"{self.data.name}-mesh.ply"
        self._row("mesh", lambda: self._mesh(mesh))
        named: dict[str, str] = {"refined": ""}
        for variant in self.variants:
            name, _, options = variant.partition("=")
            named[name] = options
        for name, options in named.items():
            words = ["--max-num-iterations", self.steps, "--mesh", mesh, f"{MODEL}start-from", self._checkpoint("free")]
            words += shlex.split(self.options) + shlex.split(options)
            self._row(name, lambda name=name, words=words: self._trained(name, "sugar-ext-refine", words))
        twice = ["--max-num-iterations", 2 * self.steps, *self._free()]
        self._row("free, twice", lambda: self._trained("free, twice", "sugar-ext-lite", twice))
        if not self.texture:
            return
        refined = self.work / f"{self.data.name}-refined.ply"
        if not refined.exists() and (not self.only or "refined mesh, textured" in self.only):
            config = self._folder("refined", "sugar-ext-refine") / "config.yml"
            call(["f3rm-ext", "export", "refined-mesh", "--load-config", config, "--out", refined])
        truth = self.data / "gt_mesh.ply"
        others = {name: Path(file) for name, file in (other.split("=", 1) for other in self.others)}
        for name, surface in {"mesh": mesh, "refined mesh": refined, "true mesh": truth, **others}.items():
            if surface.exists():
                self._row(f"{name}, textured", lambda surface=surface: self._textured(surface))

    def _free(self) -> list[object]:
        return [f"{MODEL}regularization", "none", f"{MODEL}densify.max-gaussians", self.max_gaussians]

    def _folder(self, name: str, method: str) -> Path:
        return self.work / "out" / self.data.name / method / name.replace(" ", "-").replace(",", "")

    def _checkpoint(self, name: str) -> Path:
        folder = self._folder(name, "sugar-ext-lite")
        return folder / "nerfstudio_models" / f"step-{self.steps - 1:09d}.ckpt"

    def _trained(self, name: str, method: str, options: list[object]) -> dict[str, Any]:
        """Trains where there is no such run, and measures."""
        folder = self._folder(name, method)
        row: dict[str, Any] = {}
        if not any(folder.glob("nerfstudio_models/*.ckpt")):
            started = time.perf_counter()
            command = ["ns-train", method, "--output-dir", self.work / "out", "--experiment-name", self.data.name]
            command += ["--timestamp", folder.name, "--vis", "tensorboard", "--steps-per-save", 10**6]
            command += ["--pipeline.datamanager.camera-res-scale-factor", self.scale, "--sh-degree", self.sh_degree]
            call([*command, "--pipeline.datamanager.num-downscales", 0, *options, "--data", self.data.resolve()])
            row["seconds"] = time.perf_counter() - started
        answers = self.work / f"{self.data.name}-{folder.name}.json"
        call(["ns-eval", "--load-config", folder / "config.yml", "--output-path", answers])
        results = json.loads(answers.read_text())["results"]
        return row | {key: results[key] for key in METRICS if key in results}

    def _mesh(self, out: Path) -> dict[str, Any]:
        if not out.exists():
            config = self._folder("free", "sugar-ext-lite") / "config.yml"
            command = ["f3rm-ext", "export", "mesh", "--load-config", config, "--out", out]
            call([*command, "--vertices", self.vertices])
        return _cost(out)

    def _textured(self, mesh: Path) -> dict[str, Any]:
        out = self.work / f"{self.data.name}-{mesh.stem}.glb"
        if not out.exists():
            call(["f3rm-ext", "export", "texture", "--data", self.data, "--mesh", mesh, "--output", out])
        scores = out.with_suffix(".json")
        command = ["f3rm-ext", "eval", "texture", out, "--data", self.data, "--out", scores]
        call([*command, "--pictures", out.with_suffix("")])
        found, said = json.loads(scores.read_text()), read_provenance(out)
        kept = {key: found[key] for key in ("psnr", "psnr_covered", "coverage")}
        return {**_cost(out), **kept, **{key: said[key] for key in ("texture_px", "charts", "places", "unseen")}}

    def _row(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        captures = read_report(self.out).get("captures", {})
        there = [row["run"] for row in captures.get(self.data.name, {}).get("rows", ())]
        if name in there or (self.only and name not in self.only):
            return
        row = {"run": name, **measure()}
        print(row, flush=True)
        captures = read_report(self.out).get("captures", {})  # another process may have added rows meanwhile
        capture = captures.setdefault(self.data.name, {"steps": self.steps, "scale": self.scale, "rows": []})
        capture["rows"].append(row)
        write_report({"captures": captures}, self.out)


def _cost(mesh: Path) -> dict[str, Any]:
    said = read_provenance(mesh)
    return {"seconds": float(said["seconds"]), "peak_mib": float(said["peak_mib"])}


if __name__ == "__main__":
    tyro.cli(Refinement).main()
