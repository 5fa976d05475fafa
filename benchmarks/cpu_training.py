"""`f3rm-ext-lite` beside `nerfacto` on the CPU: rays per second and quality, in one run on one machine.

Three runs on the same images and split, each in its own process, then `ns-eval` for each:

1. nerfacto (torch implementation) for a number of steps,
2. f3rm-ext-lite for the same number of steps,
3. f3rm-ext-lite for the same training time as nerfacto took.

    python benchmarks/cpu_training.py --data CAPTURE --torch-home DIR

prints a Markdown table and writes results/cpu_training.json.
"""

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

HERE = Path(__file__).parent


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
    out: Path = HERE / "results" / "cpu_training.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Runs everything."""
        environment = dict(os.environ)
        if self.torch_home is not None:
            environment["TORCH_HOME"] = str(self.torch_home.resolve())
        rows: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as folder:
            runs = [
                ("nerfacto", ["--method", "nerfacto", "--rays", str(self.nerfacto_rays), "--steps", str(self.steps)]),
                ("f3rm-ext-lite, same steps", ["--method", "f3rm-ext-lite", "--steps", str(self.steps)]),
                ("f3rm-ext-lite, same time", ["--method", "f3rm-ext-lite", "--steps"]),
            ]
            for index, (label, arguments) in enumerate(runs):
                if arguments[-1] == "--steps":
                    # As many as run 2's speed gives in run 1's time, so that the learning rate can decay over them.
                    arguments.append(str(int(rows[0]["train_s"] / rows[1]["train_s"] * self.steps)))
                common = ["--data", str(self.data.resolve()), "--scale", str(self.scale), "--seed", str(self.seed)]
                command = [sys.executable, str(HERE / "train_once.py"), *arguments, *common]
                row = run_once([*command, "--output-dir", f"{folder}/{index}"], environment)
                row |= {"label": label, "metrics": evaluate(Path(row.pop("config")), environment)}
                rows.append(row)
                print(json.dumps(row), flush=True)
        report = {
            "date": datetime.date.today().isoformat(),
            "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "capture": self.data.name,
            "options": {"scale": self.scale, "steps": self.steps, "seed": self.seed},
            "rows": rows,
        }
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(report, indent=1) + "\n")
        print(table(report))


def run_once(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Runs train_once.py and returns its result."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"The run failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def evaluate(config: Path, environment: dict[str, str]) -> dict[str, float]:
    """Runs `ns-eval` and returns the means."""
    out = config.parent / "eval.json"
    command = [str(Path(sys.executable).parent / "ns-eval"), "--load-config", str(config), "--output-path", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ns-eval failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return {k: v for k, v in json.loads(out.read_text())["results"].items() if not k.endswith("_std")}


def table(report: dict[str, Any]) -> str:
    """The figures as a Markdown table; ratios are to the first row."""
    base = report["rows"][0]
    lines = [
        "| run | steps × rays | training s | ms/step (quartiles) | rays/s | ratio | PSNR | SSIM | LPIPS | peak MiB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report["rows"]:
        metrics = row["metrics"]
        quality = [f"{metrics[k]:.{d}f}" if k in metrics else "–" for k, d in (("psnr", 2), ("ssim", 3), ("lpips", 3))]
        lines.append(
            f"| {row['label']} | {row['steps']} × {row['rays_per_step']} | {row['train_s']:.0f} "
            f"| {row['step_ms_median']:.0f} ({row['step_ms_q1']:.0f}–{row['step_ms_q3']:.0f}) "
            f"| {row['rays_per_s']:.0f} | {row['rays_per_s'] / base['rays_per_s']:.1f} "
            f"| {' | '.join(quality)} | {row['peak_rss_mib']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    tyro.cli(CpuTraining).main()
