"""`sugar-ext-lite` from scratch on real captures, on the CPU: held-out quality, time, and a picture of each.

    python benchmarks/splat_captures.py --captures fox:0.25 house:0.5 --pictures ../docs/images
    python benchmarks/sparse_points.py --capture fox --out fox_points
    python benchmarks/splat_captures.py --captures fox:0.25 fox_points:0.25     # what the capture's points bring

prints a row for each and writes results/splat_captures.json; --pictures writes splats-NAME.jpg (photo, drawing, depth,
composited normals, normals from depth). Runs that are there already are only measured again.
"""

import datetime
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from commands import call
from PIL import Image

HERE = Path(__file__).parent
METHOD = "sugar-ext-lite"
METRICS = ("psnr", "ssim", "lpips", "l1", "gaussian_count", "train_peak_memory_mib", "eval_peak_memory_mib")


@dataclass
class SplatCaptures:
    """Trains on captures and measures what comes out."""

    captures: tuple[str, ...]
    """Folders with transforms.json, each with the factor on its image size: FOLDER:FACTOR."""
    work: Path = Path("splat_captures")
    """Folder of the runs."""
    pictures: Path | None = None
    """Folder for pictures of two held-out views of each capture; none by default."""
    out: Path = HERE / "results" / "splat_captures.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Runs everything."""
        rows = []
        for capture in self.captures:
            folder, _, factor = capture.rpartition(":")
            rows.append(self._run(Path(folder), float(factor)))
            print(rows[-1], flush=True)
        report = {
            "date": datetime.date.today().isoformat(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "rows": rows,
        }
        self.out.write_text(json.dumps(report, indent=1) + "\n")

    def _run(self, data: Path, scale: float) -> dict[str, Any]:
        run = self.work / "out" / data.name / METHOD / "t"
        row: dict[str, Any] = {"capture": data.name, "scale": scale}
        if not any((run / "nerfstudio_models").glob("step-*2999.ckpt")):
            command = ["ns-train", METHOD, "--data", data, "--output-dir", self.work / "out", "--vis", "tensorboard"]
            command += ["--experiment-name", data.name, "--timestamp", "t", "--resolution-scale", scale]
            started = time.perf_counter()
            call(command)
            row["train_s"] = time.perf_counter() - started
        answers, images = self.work / f"{data.name}.json", self.work / f"{data.name}-images"
        command = ["ns-eval", "--load-config", run / "config.yml", "--output-path", answers]
        call([*command, "--render-output-path", images])
        results = json.loads(answers.read_text())["results"]
        row |= {key: results[key] for key in METRICS if key in results}
        if self.pictures is not None:
            picture(images).save(self.pictures / f"splats-{data.name}.jpg", quality=88)
        return row


def picture(images: Path, views: int = 2) -> Image.Image:
    """Photo, drawing, depth and normals of some views, one below the other."""
    rows = [
        [Image.open(images / f"eval_{kind}_{view:04d}.png") for kind in ("img", "depth", "normal")]
        for view in range(views)
    ]
    width = max(sum(part.width for part in row) for row in rows)
    sheet = Image.new("RGB", (width, sum(row[0].height for row in rows)))
    y = 0
    for row in rows:
        x = 0
        for part in row:
            sheet.paste(part, (x, y))
            x += part.width
        y += row[0].height
    return sheet


if __name__ == "__main__":
    tyro.cli(SplatCaptures).main()
