"""From photos without poses to trained scenes, on the CPU: poses, time, and quality on held-out views.

    python benchmarks/unposed.py --images banana --width 400

runs `f3rm-ext sfm process`, trains each method on the capture with every eighth photo held out, and evaluates. Runs
that are there already are only measured again; the rows of other methods stay. Set OMP_NUM_THREADS for fewer cores.
"""

import datetime
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from commands import call

from f3rm_ext.capture.checks import read_transforms
from f3rm_ext.utils.atomic_files import write_atomic
from f3rm_ext.workflow.records import newest_checkpoint, steps_of

HERE = Path(__file__).parent
METRICS = ("psnr", "ssim", "lpips", "num_rays_per_sec", "gaussian_count", "train_peak_memory_mib")
SCALE = {
    "f3rm-ext-lite": "--pipeline.datamanager.camera-res-scale-factor",
    "sugar-ext-lite": "--resolution-scale",
}
"""The option of each method that reduces the photos."""


@dataclass
class Unposed:
    """Finds poses, trains and measures."""

    images: Path
    """Folder of photos without poses."""
    methods: tuple[str, ...] = tuple(SCALE)
    """Methods to train: f3rm-ext-lite, sugar-ext-lite."""
    width: int = 400
    """Width of the photos in training, px."""
    steps: int | None = None
    """Training steps; by default those of the method."""
    work: Path = Path("unposed")
    """Folder of the capture and the runs."""
    out: Path = HERE / "results" / "unposed.json"
    """File of the results."""

    def main(self) -> None:
        """Runs everything."""
        capture, began = self.work / "capture", time.perf_counter()
        is_new = not (capture / "transforms.json").exists()
        call(["f3rm-ext", "sfm", "process", "--images", self.images, "--output", capture])
        poses = json.loads((capture / "sfm.json").read_text())["result"]
        for method in self.methods:
            row = self._run(method, capture)
            report: dict[str, Any] = json.loads(self.out.read_text()) if self.out.exists() else {"rows": {}}
            if is_new or "poses" not in report:
                report["poses"] = {**poses, "seconds": time.perf_counter() - began if is_new else None}
            report["rows"][method] = {**report["rows"].get(method, {}), **row}
            report |= {
                "date": datetime.date.today().isoformat(),
                "machine": platform.machine(),
                "threads": os.environ.get("OMP_NUM_THREADS", "all"),
            }
            write_atomic(self.out, json.dumps(report, indent=1).encode() + b"\n")
            print(method, row, flush=True)

    def _run(self, method: str, capture: Path) -> dict[str, Any]:
        run = self.work / "runs" / "unposed" / method / "t"
        meta, _ = read_transforms(capture)
        row: dict[str, Any] = {"width": self.width, "photos": len(meta["frames"])}
        if not (run / "trained.txt").exists():
            command: list[object] = ["ns-train", method, "--data", capture, "--output-dir", self.work / "runs"]
            command += ["--vis", "tensorboard", "--experiment-name", "unposed", "--timestamp", "t"]
            command += ["--logging.local-writer.max-log-size", 0]
            command += [SCALE[method], f"{self.width / meta['w']:.4f}"]
            command += ["--max-num-iterations", self.steps] if self.steps else []
            command += ["f3rm-ext-data", "--eval-mode", "interval", "--eval-interval", 8]
            began, used = time.perf_counter(), os.times()
            call(command)
            row["train_s"] = time.perf_counter() - began
            row["train_cpu_s"] = sum(os.times()[2:4]) - sum(used[2:4])
            (run / "trained.txt").write_text("finished\n")
        checkpoint = newest_checkpoint(run)
        assert checkpoint is not None
        row["steps"] = steps_of(checkpoint)
        answers = self.work / f"{method}.json"
        call(["ns-eval", "--load-config", run / "config.yml", "--output-path", answers])
        results = json.loads(answers.read_text())["results"]
        return {**row, **{key: results[key] for key in METRICS if key in results}}


if __name__ == "__main__":
    tyro.cli(Unposed).main()
