r"""Confidence where the surface is known: does it tell good places from bad ones, and is its advice worth following?

    f3rm-ext scene synth room --width 120 --height 90
    python benchmarks/confidence.py rank --data room
    python benchmarks/confidence.py advise --data room --hidden bookshelf

rank trains splats from the photos alone (the points of the capture are left out), and compares the order of the
Gaussians, and of the vertices of their mesh, by confidence with their order by distance from the true surface, nearest
first (Spearman's rank correlation). Beside it stand what else one could go by: opacity, and the number of views.

advise leaves out the photos that show something, trains without them, and takes the ten photos that are advised; beside
them ten at random of the poses that were tried, and ten at random places in random directions. With each ten it trains
anew. The photos that were left out judge, by the pixels that show what was hidden.

Both print rows and write results/confidence.json, which keeps the rows of other captures.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from commands import call
from PIL import Image
from processes import write_report
from scipy.stats import rankdata

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.confidence import confidence
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.export.clean import read_photo
from f3rm_ext.export.confidence import capture_pose
from f3rm_ext.export.splats import SplatRun, load_splat_run
from f3rm_ext.mesh.extraction import extract_mesh
from f3rm_ext.mesh.options import ExtractionOptions
from f3rm_ext.mesh.scenes import run_scene
from f3rm_ext.query.run import load_run
from f3rm_ext.splat.next_best_view import choose, propose, survey
from f3rm_ext.synthetic import SynthConfig
from f3rm_ext.synthetic.cameras import focal_length_px
from f3rm_ext.synthetic.render import LitScene, render
from f3rm_ext.synthetic.world import build_world, light_world
from f3rm_ext.utils.open3d_library import RayCaster

RESULT = Path(__file__).parent / "results" / "confidence.json"
METHOD = "sugar-ext-lite"


def without_points(data: Path, out: Path, frames: Sequence[dict[str, Any]] | None = None) -> Path:
    """Makes a copy of a synthetic capture that names no points, and perhaps only some of its frames."""
    meta = json.loads((data / "transforms.json").read_text())
    meta.pop("ply_file_path", None)
    if frames is not None:
        meta["frames"] = list(frames)
        for split, name in (("train", "train"), ("test", "val"), ("test", "test")):
            meta[f"{name}_filenames"] = [frame["file_path"] for frame in frames if frame["split"] == split]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for path in data.iterdir():
        if path.name != "transforms.json":
            (out / path.name).symlink_to(path.resolve())
    (out / "transforms.json").write_text(json.dumps(meta, indent=1))
    return out


def train(data: Path, folder: Path, steps: int, seed: int = 0) -> Path:
    """Trains splats, and returns the config.yml of the run; a run that is there already is not made again."""
    run = folder / "out" / data.name / METHOD / f"{steps}-{seed}"
    if not list(run.glob("nerfstudio_models/*.ckpt")):
        command = ["ns-train", METHOD, "--data", data, "--output-dir", folder / "out", "--experiment-name", data.name]
        command += ["--timestamp", run.name, "--vis", "tensorboard", "--max-num-iterations", steps]
        command += ["--pipeline.model.regularization", "none", "--pipeline.datamanager.features.extractors"]
        call([*command, "--pipeline.model.seed", seed, "--machine.seed", 42 + seed])
    return run / "config.yml"


def record(kind: str, row: dict[str, Any], keys: Sequence[str]) -> None:
    """Prints a row, and puts it into the results in place of one that has the same values of the keys."""
    print(row, flush=True)
    report = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    others = [old for old in report.get(kind, ()) if any(old[key] != row[key] for key in keys)]
    report |= {kind: [*others, row]}
    write_report(report, RESULT)


def _correlation(one: np.ndarray, two: np.ndarray) -> float:
    return float(np.corrcoef(rankdata(one), rankdata(two))[0, 1])


@dataclass(kw_only=True)
class Rank:
    """Compares the order by confidence with that by the distance from the true surface."""

    data: Path
    """A capture of `f3rm-ext scene synth`."""
    work: Path = Path("confidence")
    """Folder of the runs."""
    steps: int = 800
    """Steps of the run."""

    def main(self) -> None:
        """Trains and compares."""
        true_mesh = np.load(self.data / "gt_mesh.npz")
        truth = RayCaster(true_mesh["vertices"], true_mesh["faces"])
        config = train(without_points(self.data, self.work / self.data.name), self.work, self.steps)
        run = load_splat_run(config)
        frame = CaptureFrame.from_outputs(run.manager.train_dataparser_outputs, self.work / self.data.name)
        gaussians, views = run.splats(), PinholeCameras.of(run.manager.train_dataset.cameras)
        places = frame.to_capture(gaussians.means.double().numpy())
        _, _, error_m = truth.nearest(places)
        evidence = survey(run.scene(gaussians), views).evidence
        measures = {
            "confidence": confidence(evidence.information),
            "views": evidence.views,
            "surface_views": evidence.surface_views,
            "opacity": gaussians.alphas(),
            "smallness": -evidence.size,
        }
        shown = (evidence.contribution > 0.5).numpy()  # half a pixel in all photos together
        for part, rows in (("all", np.ones(len(places), bool)), ("shown", shown)):
            correlations = {
                name: _correlation(values.numpy()[rows], -error_m[rows]) for name, values in measures.items()
            }
            row = {"capture": self.data.name, "points": f"Gaussians, {part}", "steps": self.steps}
            row |= {"count": int(rows.sum()), "median_error_m": float(np.median(error_m[rows])), **correlations}
            record("rank", row, ("capture", "points"))
        mesh = extract_mesh(run_scene(load_run(config)), ExtractionOptions()).mesh
        _, _, error_m = truth.nearest(frame.to_capture(np.asarray(mesh.vertices)))
        row = {"capture": self.data.name, "points": "vertices of the mesh", "steps": self.steps}
        row |= {"count": len(error_m), "median_error_m": float(np.median(error_m))}
        row |= {"confidence": _correlation(mesh.vertex_attributes["confidence"], -error_m)}
        record("rank", row, ("capture", "points"))


@dataclass(kw_only=True)
class Advise:
    """Compares photos that are advised with photos at random."""

    data: Path
    """A capture of `f3rm-ext scene synth`."""
    hidden: str
    """Class of the capture that no training photo may show."""
    work: Path = Path("confidence")
    """Folder of the runs."""
    steps: int = 500
    """Steps of each run."""
    photos: int = 10
    """Photos to add."""
    seeds: int = 3
    """Random choices, and training runs with the advised photos."""

    def main(self) -> None:
        """Hides, advises, adds, trains and compares."""
        meta = json.loads((self.data / "transforms.json").read_text())
        label = meta["classes"].index(self.hidden)
        frames = []
        for frame in meta["frames"]:
            share = float((_labels(self.data / frame["label_file_path"]) == label).mean())
            frames.append({**frame, "split": "test" if share > 0.002 else "train"})
        name = f"{self.data.name}-{self.hidden.replace(' ', '-')}"
        base = without_points(self.data, self.work / name, frames)
        psnr, run = self._judge(base, label, 0)
        scene, views = run.scene(run.splats()), PinholeCameras.of(run.manager.train_dataset.cameras)
        found = survey(scene, views)
        candidates = propose(scene, views, found)
        advised = [next_view.camera for next_view in choose(scene, views, found, candidates, self.photos)]
        frame = CaptureFrame.from_outputs(run.manager.train_dataparser_outputs, base)
        options = SynthConfig(**json.loads((self.data / "scene.json").read_text())["options"])
        lit = light_world(build_world(options.seed, options.shiny, options.light_rays), options.light_rays)
        row: dict[str, Any] = {
            "capture": self.data.name, "hidden": self.hidden, "steps": self.steps, "photos": self.photos,
            "training_photos": sum(one["split"] == "train" for one in frames), "psnr_without": psnr,
        }  # fmt: skip
        around = propose(scene, views, found, targets=0)
        pools = {"advised": advised, "random": _singly(candidates), "around": _singly(around)}
        row |= {f"{what}_{kind}": [] for kind in pools for what in ("psnr", "share")}
        for seed, kind in product(range(self.seeds), pools):
            pool = pools[kind]
            drawn = np.random.default_rng(seed).permutation(len(pool))[: self.photos]
            out = without_points(self.data, self.work / f"{name}-{kind}-{seed}", frames)
            row[f"share_{kind}"].append(self._add(out, lit, options, [pool[i] for i in drawn], frame, label))
            row[f"psnr_{kind}"].append(self._judge(out, label, seed)[0])
            record("advise", row, ("capture", "hidden"))

    def _add(
        self,
        capture: Path,
        lit: LitScene,
        options: SynthConfig,
        cameras: Sequence[PinholeCameras],
        frame: CaptureFrame,
        label: int,
    ) -> float:
        """Takes photos, and adds them to the training photos of a capture. Returns the share that shows a class."""
        meta = json.loads((capture / "transforms.json").read_text())
        focal_px, shares = focal_length_px(options.fov, options.width), []
        (capture / "more").mkdir()
        for number, camera in enumerate(cameras):
            pose = capture_pose(camera, frame)
            view = render(
                lit, pose, options.width, options.height, focal_px, samples=options.samples, bounces=options.bounces
            )
            file = f"more/{number:05d}.png"
            Image.fromarray(view.rgb).save(capture / file)
            meta["frames"].append({"file_path": file, "split": "train", "transform_matrix": pose.tolist()})
            meta["train_filenames"].append(file)
            shares.append(float((view.labels == label).mean()))
        for one in meta["frames"]:
            for key in ("depth_file_path", "normal_file_path", "label_file_path"):
                one.pop(key, None)
        (capture / "transforms.json").write_text(json.dumps(meta, indent=1))
        return float(np.mean(shares))

    @torch.no_grad()
    def _judge(self, capture: Path, label: int, seed: int) -> tuple[float, SplatRun]:
        """Trains, and returns the PSNR over the pixels of the held-out photos that show a class."""
        run = load_splat_run(train(capture, self.work, self.steps, seed))
        squared, count = 0.0, 0
        for index, file in enumerate(run.photos.image_filenames):
            colors, _ = read_photo(run, run.photos, index)
            shows = torch.from_numpy(_labels(self.data / "labels" / Path(file).name) == label)
            drawn = run.model.get_outputs_for_camera(run.photos.cameras[index : index + 1])["rgb"]
            squared += float((drawn - colors)[shows].square().sum())
            count += 3 * int(shows.sum())
        return float(-10 * np.log10(squared / count)), run


def _singly(cameras: PinholeCameras) -> list[PinholeCameras]:
    return [cameras.take(slice(index, index + 1)) for index in range(len(cameras.widths))]


def _labels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"rank": Rank, "advise": Advise}).main()
