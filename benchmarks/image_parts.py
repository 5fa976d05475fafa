"""What held-out photos say where not all training images fit into memory: some of the images, or of their pixels.

    python benchmarks/image_parts.py --data tabletop

trains each method with all images in memory, and with parts of them as a run with 2000 photos of 12 megapixels has
them on a machine of 24 GB: windows of a twentieth of the images, as many as come in a run, and for fields 1 of 16
pixels of each image.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import tyro
from processes import write_report

from f3rm_ext.data.datamanager import F3rmDataManagerConfig
from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.method_configs.splat_presets import make_splat_config

RESULT = Path(__file__).parent / "results" / "image_parts.json"
STRIDE, SHARE = 4, 1 / 20
"""Of pixels, and of images."""
WINDOWS = {"f3rm-ext-lite": (5,), "sugar-ext-lite": (4, 17, 35)}
"""Windows of such a run: with 10 steps per image; for splats also with 2 and 1."""


@dataclass
class ImageParts:
    """Trains with all images and with parts of them."""

    data: Path
    """A capture."""
    work: Path = Path("image-parts")
    """Folder of the runs."""
    methods: tuple[Literal["f3rm-ext-lite", "sugar-ext-lite"], ...] = ("f3rm-ext-lite", "sugar-ext-lite")
    """Methods to train."""
    steps: int = 1000
    """Steps of each run."""
    scale: float = 0.5
    """Factor on the size of the images."""
    write: bool = False
    """Write the figures."""

    def main(self) -> None:
        """Runs everything."""
        rows = []
        for method in self.methods:
            rows.append(self._run(method, "all images"))
            window = max(1, round(SHARE * rows[-1]["images_seen"]))
            if method.startswith("f3rm"):
                rows.append(self._run(method, "pixels", stride=STRIDE))
            rows += [self._run(method, "windows", window=window, windows=windows) for windows in WINDOWS[method]]
        if self.write:
            write_report({"capture": self.data.name, "steps": self.steps, "scale": self.scale, "rows": rows}, RESULT)

    def _run(self, method: str, part: str, *, stride: int = 1, window: int = -1, windows: int = 1) -> dict[str, Any]:
        config: Any = (make_config if method.startswith("f3rm") else make_splat_config)(method)
        manager = config.pipeline.datamanager
        config.data = manager.data = self.data
        config.output_dir, config.experiment_name, config.timestamp = self.work, f"{part}-{windows}", "run"
        config.vis, config.max_num_iterations, manager.camera_res_scale_factor = "tensorboard", self.steps, self.scale
        manager.features.extractors = ()
        if window > 0:
            manager.train_num_images_to_sample_from = window
            manager.train_num_times_to_repeat_images = -(-self.steps // windows)
        config.save_config()
        torch.manual_seed(0)
        with mock.patch.object(F3rmDataManagerConfig, "pixel_stride", lambda *sizes: stride):
            trainer = config.setup()
            trainer.setup()
        started = time.process_time()
        trainer.train()
        seconds = time.process_time() - started
        seen = trainer.pipeline.datamanager.streams()["train"].coverage.summary()["images_seen"]
        row = {"method": method, "part": part, "stride": stride, "window": window, "windows": windows}
        print(
            row := {**row, "images_seen": int(seen), "train_cpu_s": round(seconds), **_metrics(trainer.pipeline)},
            flush=True,
        )
        return row


@torch.no_grad()
def _metrics(pipeline: Any) -> dict[str, float]:
    pipeline.eval()
    rows = []
    for camera, batch in pipeline.datamanager.eval_dataloader:
        metrics, _ = pipeline.model.get_image_metrics_and_images(pipeline.model.get_outputs_for_camera(camera), batch)
        rows.append(metrics)
    return {name: float(np.mean([row[name] for row in rows])) for name in ("psnr", "ssim", "lpips") if name in rows[0]}


if __name__ == "__main__":
    tyro.cli(ImageParts).main()
