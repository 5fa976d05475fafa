"""Photos whose exposure varies: with and without exposures modelled, for fields and splats.

    python benchmarks/exposure.py --data fox

makes copies of a capture at a sixth of its size: as it is, and with each photo up to 1.5 stops darker or brighter,
in linear light and clipped, with and without EXIF. It trains each method on them with `--pipeline.model.exposure` off
and on, prints a row for each run and writes results/exposure.json. PSNR of held-out photos is that of `ns-eval`, and
*fitted* that of every run by gains fitted to the other half of the photo, so that runs without exposures can compare.
"""

import datetime
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image

from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.model_components import masks
from f3rm_ext.model_components.exposure import ExposureOption, apply_stops, fit_halves

HERE = Path(__file__).parent
METHODS = ("f3rm-ext-lite", "sugar-ext-lite")
RUNS: tuple[tuple[str, ExposureOption], ...] = (
    ("constant", "off"),
    ("varied", "off"),
    ("varied", "auto"),
    ("varied, no EXIF", "on"),
    ("constant", "on"),
)
STOPS = (-1.5, -0.75, 0.0, 0.75, 1.5)
EXIF, TIME_S, ISO = 0x8769, 0x829A, 0x8827


def make_capture(data: Path, out: Path, shrink: int, stops: np.ndarray, *, exif: bool) -> None:
    """Copies a capture in nerfstudio's format with smaller photos, each some stops brighter, and EXIF or not."""
    meta = json.loads((data / "transforms.json").read_text())
    (out / "images").mkdir(parents=True)
    meta |= {key: meta[key] / shrink for key in ("fl_x", "fl_y", "cx", "cy")}
    meta |= {key: meta[key] // shrink for key in ("w", "h")}
    for frame, change in zip(meta["frames"], stops.tolist(), strict=True):
        photo = Image.open(data / frame["file_path"]).convert("RGB").reduce(shrink)
        colors = apply_stops(torch.from_numpy(np.asarray(photo) / 255.0), torch.tensor(change))
        tags = Image.Exif()
        if exif:
            tags.get_ifd(EXIF).update({TIME_S: 2**change / 60, ISO: 100})
        pixels = Image.fromarray((colors.clamp(0, 1) * 255).round().byte().numpy())
        pixels.save(out / frame["file_path"], quality=95, subsampling=0, exif=tags)
    (out / "transforms.json").write_text(json.dumps(meta))


@dataclass
class Exposure:
    """Trains on photos of constant and of varied exposure and measures held-out photos."""

    data: Path
    """A capture in nerfstudio's format."""
    work: Path = Path("exposure")
    """Folder of the captures and the runs."""
    shrink: int = 6
    """By which the sides of the photos are divided."""
    rays: int = 384
    """Rays of a step of fields."""
    steps: int = 400
    """Steps of each run."""
    out: Path = HERE / "results" / "exposure.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Runs everything."""
        count = len(json.loads((self.data / "transforms.json").read_text())["frames"])
        varied = np.random.default_rng(0).choice(STOPS, count)
        for name, stops in (("constant", 0 * varied), ("varied", varied), ("varied, no EXIF", varied)):
            if not (self.work / name / "transforms.json").exists():
                make_capture(self.data, self.work / name, self.shrink, stops, exif=name == "varied")
        rows = [self._run(method, *run) for method in METHODS for run in RUNS]
        report = {"date": datetime.date.today().isoformat(), "capture": self.data.name}
        options = {"shrink": self.shrink, "rays": self.rays, "steps": self.steps}
        self.out.write_text(json.dumps(report | {"options": options, "rows": rows}, indent=1) + "\n")

    def _run(self, method: str, capture: str, option: ExposureOption) -> dict[str, Any]:
        config: Any = (make_config if method.startswith("f3rm") else make_splat_config)(method)
        config.data = config.pipeline.datamanager.data = self.work / capture
        config.output_dir, config.experiment_name, config.timestamp = self.work / "out", capture, option
        config.vis, config.max_num_iterations, config.pipeline.model.exposure = "tensorboard", self.steps, option
        if method.startswith("f3rm"):
            config.pipeline.datamanager.features.extractors = ()
            config.pipeline.datamanager.train_num_rays_per_batch = self.rays
        config.save_config()
        torch.manual_seed(0)
        trainer = config.setup()
        trainer.setup()
        started = time.process_time()
        trainer.train()
        seconds = time.process_time() - started
        row = {"method": method, "capture": capture, "exposure": option, "train_cpu_s": seconds}
        print(row := row | _metrics(trainer.pipeline), flush=True)
        return row


@torch.no_grad()
def _metrics(pipeline: Any) -> dict[str, float]:
    pipeline.eval()
    rows = []
    for camera, batch in pipeline.datamanager.eval_dataloader:
        outputs = pipeline.model.get_outputs_for_camera(camera)
        metrics, _ = pipeline.model.get_image_metrics_and_images(outputs, batch)
        photo = batch["image"].to(outputs["rgb"])
        fitted = fit_halves(outputs["rgb"], photo).clamp(0, 1)
        rows.append({**metrics, "psnr_fitted": float(masks.psnr(fitted, photo))})
    names = ("psnr", "ssim", "lpips", "psnr_fitted", "psnr_at_mean_exposure", "exposure_from_exif")
    return {name: float(np.mean([row[name] for row in rows])) for name in names if name in rows[0]}


if __name__ == "__main__":
    tyro.cli(Exposure).main()
