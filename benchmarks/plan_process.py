"""Planned memory of the six methods on the CPU beside what their runs report, and how long a plan takes.

python benchmarks/plan_process.py            # writes results/plan_process.json

`f3rm-ext plan` and `ns-train` are started as users start them, with the same arguments, on photos of noise. What a run
reports is its `train_peak_memory_mib`: the most that its process held in a training step, libraries and kernels too.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trimesh
from plan_memory import write_capture, write_lpips, write_rows

RESULTS = Path(__file__).parent / "results"
CLASSES = 16
MODEL, MANAGER = "--pipeline.model.", "--pipeline.datamanager."
FULL = (f"{MANAGER}num-downscales", "0", f"{MANAGER}stereo-points", "never")
GROWN = (*FULL, f"{MODEL}num-random", "60000", f"{MODEL}densify.max-gaussians", "60000")
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "f3rm-ext": (2, (f"{MANAGER}train-num-rays-per-batch", "2048")),
    "f3rm-ext-lite": (20, ()),
    "f3rm-ext-big": (2, (f"{MANAGER}train-num-rays-per-batch", "512")),
    "sugar-ext": (20, GROWN),
    "sugar-ext-lite": (40, FULL),
    "sugar-ext-refine": (10, (f"{MODEL}mesh",)),
}
"""Steps and options by method; large presets are given fewer rays, and as many Gaussians as a CPU can train."""
FIELD_PX, SPLAT_PX = (320, 180), (640, 360)


def arguments_of(method: str, folder: Path) -> list[str]:
    """Returns what follows ns-train, or f3rm-ext plan."""
    steps, options = RUNS[method]
    field = method.startswith("f3rm")
    capture = folder / ("labels" if field else "photos")
    if not capture.exists():
        write_capture(capture, FIELD_PX if field else SPLAT_PX, classes=CLASSES * field)
    given = [method, "--data", str(capture), "--max-num-iterations", str(steps), "--output-dir", str(folder / "runs")]
    given += ["--timestamp", "run", "--experiment-name", "noise", "--machine.device-type", "cpu", *options]
    given += [str(folder / "mesh.ply")] if method == "sugar-ext-refine" else []
    given += ["--vis", "tensorboard", f"{MODEL}lpips-weights", str(folder / "lpips.pth")]
    features = (f"{MANAGER}features.extractors", f"labels:data={capture}", f"{MANAGER}features.cache-dir")
    return [*given, *features, str(folder / "cache")] if field else given


def start(*command: str) -> tuple[str, float]:
    """Runs a command of this environment. Returns what it printed, and its processor time, seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    path = Path(sys.executable).parent / command[0]
    done = subprocess.run([path, *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} {command[1]} failed: {(done.stdout + done.stderr)[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(method: str, folder: Path) -> dict[str, Any]:
    """Returns a row of the report."""
    arguments = arguments_of(method, folder)
    said, plan_s = start("f3rm-ext", "plan", *arguments, "--json")
    memory = json.loads(said)["memory"]
    start("ns-train", *arguments)
    (checkpoint,) = (folder / "runs" / "noise" / method).glob("run/nerfstudio_models/*.ckpt")
    extra = torch.load(checkpoint, weights_only=True)["pipeline"]["_model._extra_state"]
    said_by_run = json.loads(extra if isinstance(extra, str) else extra["about"])
    planned = memory["peak_bytes"]["train"] / 2**20
    return {
        "method": method,
        "planned_mib": planned,
        "reported_mib": said_by_run["train_peak_mib"],
        "tensors_mib": planned - memory["device_bytes"]["train"]["context"] / 2**20,
        "plan_cpu_s": plan_s,
    }


def main() -> None:
    """Prints the rows and writes results/plan_process.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="methods")
    parser.add_argument("--out", type=Path, default=RESULTS / "plan_process.json")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="plan-process-") as work:
        folder = Path(work)
        write_lpips(folder / "lpips.pth")
        # A ball of 5,120 triangles at the origin, where the cameras look.
        trimesh.creation.icosphere(subdivisions=4, radius=0.5).export(folder / "mesh.ply")
        for method in options.only:
            rows.append(measure(method, folder))
            print(
                {name: value if name == "method" else round(value, 1) for name, value in rows[-1].items()}, flush=True
            )
    write_rows(rows, options.out)


if __name__ == "__main__":
    main()
