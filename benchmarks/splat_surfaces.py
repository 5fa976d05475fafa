r"""Quality of `sugar-ext-lite` where the surface is known: what regularisation, storage and filters do.

Runs of equal steps on a capture in the format of NeRF-synthetic with `gt_points.npz` (points on the true surface), or
in nerfstudio's with `gt_mesh.npz` (that of `f3rm-ext scene synth`):

1. regularisation none, density, dn-consistency and planar: held-out PSNR, and the distance from the surface of Gaussian
   centres and of the points that rendered depth stands for (chamfer distances in the capture's units, see
   :func:`chamfer`),
2. spherical harmonics stored as float16 beside float32, and of other degrees than 2, over some seeds,
3. without mip filters beside with them, evaluated at the size of training and larger and smaller (`f3rm-ext
   eval scales`).

    python benchmarks/splat_surfaces.py --data chair
    python benchmarks/splat_surfaces.py --data room --only none density dn-consistency planar --seeds 1 \
        --steps 6000 --begin 20000 --max-gaussians 40000

prints each row and writes results/splat_surfaces.json, which keeps the rows of other captures. Runs that are there
already are only measured again.
"""

import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trimesh
import tyro
from commands import call
from processes import write_report
from scipy.spatial import KDTree

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.engine.opening import open_run
from f3rm_ext.splat.regularization.frames import pixel_rays

HERE = Path(__file__).parent
METHOD = "sugar-ext-lite"
MODEL = "--pipeline.model."


def chamfer(centres: np.ndarray, surface: np.ndarray) -> dict[str, float]:
    """Mean distance from the centres to the surface (accuracy), from the surface to the centres (completeness), and
    their sum; and the median distance to the surface, of which strays far out take no notice.

    Args:
        centres: (n, 3).
        surface: (m, 3), points on the true surface.
    """
    off = KDTree(surface).query(centres)[0]
    completeness = float(KDTree(centres).query(surface)[0].mean())
    accuracy = float(off.mean())
    return {
        "accuracy": accuracy,
        "completeness": completeness,
        "chamfer": accuracy + completeness,
        "median": float(np.median(off)),
    }


def surface_points(data: Path) -> np.ndarray:
    """Points on the true surface, (m, 3), in the frame of the capture: those given, or a million on its mesh."""
    if (data / "gt_points.npz").exists():
        return np.load(data / "gt_points.npz")["points"]
    mesh = np.load(data / "gt_mesh.npz")
    made = trimesh.Trimesh(mesh["vertices"], mesh["faces"], process=False)
    return np.asarray(trimesh.sample.sample_surface(made, 1_000_000, seed=0)[0])


def in_capture(means: np.ndarray, run: Path) -> np.ndarray:
    """Centres (n, 3) from the scene's frame to the capture's, which differ by what the data parser did."""
    done = json.loads((run / "dataparser_transforms.json").read_text())
    transform = np.array(done["transform"])
    return (means / done["scale"] - transform[:, 3]) @ transform[:, :3]


@torch.no_grad()
def depth_points(run: Path, name: str, most: int = 300_000, min_alpha: float = 0.5) -> np.ndarray:
    """Points that a rendered depth of the training views stands for, (n, 3), in the capture's frame.

    Args:
        run: folder of the run.
        name: output of the model, ``depth`` or ``plane_depth``.
        most: points, drawn at random if there are more.
        min_alpha: accumulation of pixels that count.
    """
    opened = open_run(run / "config.yml", lambda config: True, "which has no splats")
    manager: Any = opened.pipeline.datamanager
    model, cameras = opened.pipeline.model, manager.train_dataset.cameras
    views, found = PinholeCameras.of(cameras), []
    for index in range(len(cameras)):
        outputs = model.get_outputs_for_camera(cameras[index : index + 1])
        depth, solid = outputs[name][..., 0], outputs["accumulation"][..., 0] > min_alpha
        h, w = depth.shape
        x, y = pixel_rays(h, w, views.Ks[index])
        rays = torch.stack([x.expand(h, w), y[:, None].expand(h, w), torch.ones(h, w)], dim=-1)
        local = (rays * depth[..., None])[solid & (depth > 0)]
        viewmat = views.viewmats[index]
        found.append((local - viewmat[:3, 3]) @ viewmat[:3, :3])
    points = torch.cat(found).numpy()
    drawn = np.random.default_rng(0).permutation(len(points))[:most]
    return in_capture(points[drawn], run)


@dataclass
class SplatSurfaces:
    """Compares regularisations, storages and filters."""

    data: Path
    """A capture in the format of NeRF-synthetic with gt_points.npz, or in nerfstudio's with gt_mesh.npz."""
    work: Path = Path("splat_surfaces")
    """Folder of the runs."""
    steps: int = 3000
    """Steps of each run."""
    scale: float = 0.25
    """Factor on the image size."""
    begin: int = 8_000
    """Gaussians that a run begins with."""
    max_gaussians: int = 20_000
    """Most Gaussians of a run."""
    seeds: int = 3
    """Runs of none, of float16 and of each degree, which differ by their seeds."""
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
            ("planar", "planar", []),
            ("float16", "none", [f"{MODEL}sh-storage", "float16"]),
            *((f"degree {degree}", "none", ["--sh-degree", str(degree)]) for degree in (3, 1, 0)),
            ("no mip filters", "none", off),
        ]
        captures = json.loads(self.out.read_text())["captures"] if self.out.exists() else {}
        rows = {row["run"]: row for row in captures.get(self.data.name, {}).get("rows", ())}
        for name, mode, options in runs:
            if self.only and name not in self.only:
                continue
            seeds = self.seeds if name in ("none", "float16") or name.startswith("degree") else 1
            found = [self._run(name, mode, options, seed) for seed in range(seeds)]
            rows[name] = found[0] | {"psnrs": [row["psnr"] for row in found]}
            print(rows[name], flush=True)
            captures[self.data.name] = {
                "steps": self.steps,
                "scale": self.scale,
                "rows": [rows[name] for name, *_ in runs if name in rows],
            }
            report = {
                "python": platform.python_version(),
                "captures": captures,
            }
            write_report(report, self.out)

    def _run(self, name: str, mode: str, options: list[str], seed: int) -> dict[str, Any]:
        """Trains where there is no such run, and measures; surfaces and sizes only with the first seed."""
        folder = self.work / "out" / self.data.name / METHOD / (name.replace(" ", "-") + (f"-{seed}" if seed else ""))
        last = folder / "nerfstudio_models" / f"step-{self.steps - 1:09d}.ckpt"
        started = time.perf_counter()
        trained = not last.exists()
        if trained:
            command = ["ns-train", METHOD, "--output-dir", self.work / "out", "--experiment-name", self.data.name]
            command += ["--timestamp", folder.name, "--vis", "tensorboard", "--max-num-iterations", self.steps]
            command += ["--pipeline.datamanager.camera-res-scale-factor", self.scale, f"{MODEL}regularization", mode]
            command += [f"{MODEL}num-random", self.begin, f"{MODEL}densify.max-gaussians", self.max_gaussians]
            command += [f"{MODEL}seed", seed, "--machine.seed", 42 + seed, *options]
            command += ["blender-data"] * (self.data / "transforms_train.json").exists()
            call([*command, "--data", self.data.resolve()])
        row: dict[str, Any] = {"run": name, "steps": self.steps}
        if trained:
            row["train_s"] = time.perf_counter() - started
        answers = self.work / f"{self.data.name}-{folder.name}.json"
        call(["ns-eval", "--load-config", folder / "config.yml", "--output-path", answers])
        results = json.loads(answers.read_text())["results"]
        row |= {key: results[key] for key in ("psnr", "ssim", "lpips", "gaussian_count") if key in results}
        if seed:
            return row
        state = torch.load(last, weights_only=True, map_location="cpu")["pipeline"]
        means = state["_model.gauss_params.means"].numpy()
        surface = surface_points(self.data)
        row |= chamfer(in_capture(means, folder), surface)
        row |= {output: chamfer(depth_points(folder, output), surface) for output in ("depth", "plane_depth")}
        if name in ("none", "no mip filters"):
            scales = self.work / f"{self.data.name}-{folder.name}-scales.json"
            call(["f3rm-ext", "eval", "scales", "--load-config", folder / "config.yml", "--out", scales])
            kept = ("scale", "psnr", "ssim", "lpips")
            entries = json.loads(scales.read_text())["scales"]
            row["scales"] = [{key: entry[key] for key in kept if key in entry} for entry in entries]
        return row


if __name__ == "__main__":
    tyro.cli(SplatSurfaces).main()
