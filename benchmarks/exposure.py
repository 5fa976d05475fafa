"""Photos whose exposure varies: with and without exposures modelled, for fields and splats.

    python benchmarks/exposure.py --data fox tabletop --shrink 6 5

makes small copies of captures: as they are, and with each photo up to 1.5 stops darker or brighter, with and without
EXIF, in linear light and clipped. It trains each method on them with `--pipeline.model.exposure` off and auto, and with
three seeds, of the changes and of the training. It prints a row for each run and writes results/exposure.json, which
keeps the rows of other runs, so that it goes on where it was stopped. PSNR of held-out photos is that of `ns-eval`, and
*fitted* that of every run by gains fitted to the other half of the photo, so that runs without exposures can compare.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image
from processes import write_report

from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.method_configs.splat_presets import make_splat_config
from f3rm_ext.model_components import masks
from f3rm_ext.model_components.exposure import ExposureOption, fit_halves
from f3rm_ext.utils.pictures import to_bytes, to_linear, to_srgb

RESULT = Path(__file__).parent / "results" / "exposure.json"
METHODS = ("f3rm-ext-lite", "sugar-ext-lite")
RUNS: tuple[tuple[str, ExposureOption], ...] = (
    ("constant", "off"),
    ("varied", "off"),
    ("varied", "auto"),
    ("varied, no EXIF", "auto"),
)
CAPTURES = ("constant", "varied", "varied, no EXIF")
STOPS = (-1.5, -0.75, 0.0, 0.75, 1.5)
MAKE, EXIF, TIME_S, ISO = 0x010F, 0x8769, 0x829A, 0x8827


def vary_exposure(dice: np.random.Generator, count: int) -> np.ndarray:
    """Returns matrices that scale the light of photos, (photos, 3, 3)."""
    return np.exp2(dice.choice(STOPS, count))[:, None, None] * np.eye(3)


def make_capture(data: Path, out: Path, shrink: int, changes: np.ndarray, *, exif: bool) -> None:
    """Copies a capture in nerfstudio's format with smaller photos, the light of each changed by a matrix.

    EXIF tells the first element of each matrix, or nothing.
    """
    meta = json.loads((data / "transforms.json").read_text())
    meta.pop("ply_file_path", None)
    (out / "images").mkdir(parents=True)
    for lens in (meta, *meta["frames"]):
        lens |= {key: lens[key] / shrink for key in ("fl_x", "fl_y", "cx", "cy") if key in lens}
    meta |= {key: meta[key] // shrink for key in ("w", "h")}
    for frame, change in zip(meta["frames"], changes, strict=True):
        photo = Image.open(data / frame["file_path"]).convert("RGB").reduce(shrink)
        tags = Image.Exif()
        if exif:
            tags[MAKE] = "Maker"  # Pillow writes no EXIF of details alone into PNG
            tags.get_ifd(EXIF).update({TIME_S: float(change[0, 0]) / 60, ISO: 100})
        colors = to_srgb(to_linear(np.asarray(photo) / 255.0) @ change.T)
        pixels = Image.fromarray(to_bytes(colors))
        pixels.save(out / frame["file_path"], quality=95, subsampling=0, exif=tags)
    (out / "transforms.json").write_text(json.dumps(meta))


@dataclass
class Exposure:
    """Trains on photos of constant and of varied exposure and measures held-out photos."""

    data: tuple[Path, ...]
    """Captures in nerfstudio's format."""
    shrink: tuple[int, ...]
    """By which the sides of the photos of each are divided."""
    work: Path = Path("exposure")
    """Folder of the captures and the runs."""
    seeds: int = 3
    """Runs of each kind."""
    rays: int = 384
    """Rays of a step of fields."""
    steps: int = 400
    """Steps of each run."""

    def main(self) -> None:
        """Runs everything that has no row yet."""
        for seed in range(self.seeds):
            for data, shrink in zip(self.data, self.shrink, strict=True):
                folder = self.work / data.name / str(seed)
                self._make_captures(data, folder, shrink, seed)
                for method in METHODS:
                    for capture, option in RUNS:
                        case = {"data": data.name, "method": method, "capture": capture, "exposure": option}
                        self._add_row({**case, "seed": seed, "shrink": shrink, "steps": self.steps}, folder)

    @staticmethod
    def _make_captures(data: Path, folder: Path, shrink: int, seed: int) -> None:
        count = len(json.loads((data / "transforms.json").read_text())["frames"])
        varied = vary_exposure(np.random.default_rng(seed), count)
        constant = np.tile(np.eye(3), (count, 1, 1))
        for name, changes in zip(CAPTURES, (constant, varied, varied), strict=True):
            if not (folder / name / "transforms.json").exists():
                make_capture(data, folder / name, shrink, changes, exif=name == "varied")

    def _add_row(self, case: dict[str, Any], folder: Path) -> None:
        report = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        rows = report.get("rows", [])
        if any(case.items() <= row.items() for row in rows):
            return
        row = case | self._run(case["method"], folder, case["capture"], case["exposure"], case["seed"])
        print(row, flush=True)
        write_report({"options": {"rays": self.rays}, "rows": [*rows, row]}, RESULT)

    def _run(self, method: str, folder: Path, capture: str, option: ExposureOption, seed: int) -> dict[str, Any]:
        config: Any = (make_config if method.startswith("f3rm") else make_splat_config)(method)
        config.data = config.pipeline.datamanager.data = folder / capture
        config.output_dir, config.experiment_name, config.timestamp = folder / "out", capture, option
        config.vis, config.max_num_iterations, config.pipeline.model.exposure = "tensorboard", self.steps, option
        if method.startswith("f3rm"):
            config.pipeline.datamanager.features.extractors = ()
            config.pipeline.datamanager.train_num_rays_per_batch = self.rays
        config.save_config()
        torch.manual_seed(seed)
        trainer = config.setup()
        trainer.setup()
        started = time.process_time()
        trainer.train()
        seconds = time.process_time() - started
        return {"train_cpu_s": seconds, **_metrics(trainer.pipeline)}


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
