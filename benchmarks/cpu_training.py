"""`f3rm-ext-lite` beside `nerfacto` on the CPU: rays per second and quality, in one run on one machine.

Runs on the same images and split, each in its own process, then `ns-eval` for each:

1. nerfacto (torch implementation) for a number of steps,
2. f3rm-ext-lite for the same number of steps,
3. f3rm-ext-lite for the CPU time that run 1 took,
4. nerfacto with the samples and the batch of f3rm-ext-lite, for the same CPU time,
5. run 4 without pose refinement and appearance codes, which f3rm-ext-lite does not have by default.

    python benchmarks/cpu_training.py --data CAPTURE --torch-home DIR

prints a Markdown table and writes results/cpu_training.json. The time is that of the CPU, because other programs do not
change it much. With OMP_NUM_THREADS=1 and NUMBA_NUM_THREADS=1 it is the training time on a quiet machine.
`--speed-only` trains for the same steps everywhere and evaluates nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from processes import print_table, require_result, write_report

HERE = Path(__file__).parent
MODEL = "pipeline.model."
LITE_SAMPLES = (
    f"{MODEL}num_proposal_iterations=1",
    f"{MODEL}num_proposal_samples_per_ray=(64,)",
    f"{MODEL}num_nerf_samples_per_ray=24",
)
"""Changes that give nerfacto the samples per ray of f3rm-ext-lite."""
LITE_PARTS = (f"{MODEL}camera_optimizer.mode='off'", f"{MODEL}use_appearance_embedding=False")
"""Changes that take from nerfacto what f3rm-ext-lite leaves out by default."""


@dataclass
class CpuTraining:
    """Compares methods on the CPU."""

    data: Path
    """A capture with a transforms.json."""
    torch_home: Path | None = None
    """A TORCH_HOME with AlexNet's weights, for LPIPS (and because nerfacto cannot be built off-line without)."""
    steps: int = 800
    """Steps of runs 1 and 2."""
    nerfacto_rays: int = 512
    """Rays per step of nerfacto."""
    scale: float = 0.25
    """Factor on the image size."""
    seed: int = 42
    """Random seed."""
    speed_only: bool = False
    """Leave out run 3, train for the given number of steps in all others, and evaluate nothing."""
    out: Path = HERE / "results" / "cpu_training.json"
    """Where the figures are written."""

    def main(self) -> None:
        environment = dict(os.environ)
        if self.torch_home is not None:
            environment["TORCH_HOME"] = str(self.torch_home.resolve())
        rows: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as folder:
            nerfacto, lite = ("--method", "nerfacto"), ("--method", "f3rm-ext-lite")
            matched = (*nerfacto, "--rays", "1024", "--change", *LITE_SAMPLES)
            runs = [
                ("nerfacto", (*nerfacto, "--rays", str(self.nerfacto_rays)), False),
                ("f3rm-ext-lite", lite, False),
                ("f3rm-ext-lite, same time", lite, True),
                ("nerfacto, our samples and batch", matched, True),
                ("the same without pose refinement and appearance codes", (*matched, *LITE_PARTS), True),
            ]
            if self.speed_only:
                runs = [(label, arguments, False) for label, arguments, _ in (*runs[:2], *runs[3:])]
            common = ["--data", str(self.data.resolve()), "--scale", str(self.scale), "--seed", str(self.seed)]
            for index, (label, arguments, same_time) in enumerate(runs):
                command = [sys.executable, str(HERE / "train_once.py"), *common, *arguments]
                steps = self.steps
                if same_time:
                    # How many steps the time allows has to be known beforehand: the learning rate decays over them.
                    trial = require_result(
                        [*command, "--steps", "30", "--output-dir", f"{folder}/{index}-trial"], environment
                    )
                    steps = int(1e3 * rows[0]["train_cpu_s"] / trial["step_cpu_ms_median"])
                row = require_result(
                    [*command, "--steps", str(steps), "--output-dir", f"{folder}/{index}"], environment
                )
                config = Path(row.pop("config"))
                row |= {"label": label, "metrics": {} if self.speed_only else evaluate(config, environment)}
                rows.append(row)
                print(json.dumps(row), flush=True)
        report = {
            "capture": self.data.name,
            "options": {"scale": self.scale, "steps": self.steps, "seed": self.seed},
            "rows": rows,
        }
        write_report(report, self.out)
        print_table("cpu_training", report)


def evaluate(config: Path, environment: dict[str, str]) -> dict[str, float]:
    """Runs `ns-eval` and returns the means."""
    out = config.parent / "eval.json"
    command = [str(Path(sys.executable).parent / "ns-eval"), "--load-config", str(config), "--output-path", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ns-eval failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return {k: v for k, v in json.loads(out.read_text())["results"].items() if not k.endswith("_std")}


if __name__ == "__main__":
    tyro.cli(CpuTraining).main()
