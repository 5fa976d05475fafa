r"""Confidence where the surface is known: does it tell good places from bad ones?

    f3rm-ext scene synth room --width 120 --height 90
    python benchmarks/confidence.py --data room

trains splats from the photos alone (the points of the capture are left out), and compares the order of the Gaussians,
and of the vertices of a mesh, by confidence with their order by distance from the true surface, nearest first
(Spearman's rank correlation). Beside it stand what else one could go by: opacity, and the number of views. Prints rows
and writes results/confidence.json, which keeps the rows of other captures.
"""

import datetime
import json
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from commands import call
from scipy.stats import spearmanr

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.data.confidence import confidence
from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.export.splats import load_splat_run
from f3rm_ext.splat.evidence import gather_evidence
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
    report |= {"date": datetime.date.today().isoformat(), "machine": platform.machine(), kind: [*others, row]}
    RESULT.write_text(json.dumps(report, indent=1) + "\n")


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
        mesh = np.load(self.data / "gt_mesh.npz")
        truth = RayCaster(mesh["vertices"], mesh["faces"])
        config = train(without_points(self.data, self.work / self.data.name), self.work, self.steps)
        run = load_splat_run(config)
        frame = CaptureFrame.from_outputs(run.manager.train_dataparser_outputs, self.work / self.data.name)
        gaussians, views = run.splats(), PinholeCameras.of(run.manager.train_dataset.cameras)
        places = frame.to_capture(gaussians.means.double().numpy())
        _, _, error_m = truth.nearest(places)
        evidence = gather_evidence(run.scene(gaussians), views)
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
                name: float(spearmanr(values.numpy()[rows], -error_m[rows]).statistic)
                for name, values in measures.items()
            }
            row = {"capture": self.data.name, "points": f"Gaussians, {part}", "steps": self.steps}
            row |= {"count": int(rows.sum()), "median_error_m": float(np.median(error_m[rows])), **correlations}
            record("rank", row, ("capture", "points"))


if __name__ == "__main__":
    tyro.cli(Rank).main()
