"""Features of one's own backbone, distilled on a capture and asked by example, beside DINOv2, DAISY and random weights.

One run of f3rm-ext-lite on a capture with labels distils all of them together, so geometry and capacity are the same.
Then `f3rm-ext eval-query` asks each by one pixel of each class in one training photo.

    python benchmarks/moco_distilled.py --data tabletop --backbone backbone.safetensors --dinov2 dinov2_vits14.pth

prints a line of JSON for each feature and protocol, and writes results/moco_distilled.json. A run that is there already
is only asked again.
"""

import datetime
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from commands import call

from f3rm_ext.moco.encoder import make_backbone
from f3rm_ext.moco.evaluation import open_backbone
from f3rm_ext.moco.weights import export

HERE = Path(__file__).parent


@dataclass
class MocoDistilled:
    """Compares the answers of a field that distils several features by example."""

    data: Path
    """A capture with label images."""
    backbone: Path
    """The backbone.safetensors of a training."""
    dinov2: Path
    """State dict of DINOv2 ViT-S/14."""
    trained_on: str = "aerial tiles"
    """Pictures of the training, for the table."""
    work: Path = Path("moco_distilled")
    """Folder of the run and of the random weights."""
    scale: float = 0.25
    """Factor on the image size."""
    rays: int = 512
    """Rays per step."""
    steps: int = 1500
    """Steps of the run."""
    skip: tuple[str, ...] = ("table",)
    """Classes that are not asked for."""
    out: Path = HERE / "results" / "moco_distilled.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Runs everything."""
        work = self.work.resolve()
        extractors = {
            f"MoCo, {self.trained_on}": f"moco:weights={self.backbone.resolve()}",
            "MoCo's network, random weights": f"moco:weights={self._random(work / 'random')}",
            "DAISY": "dense-daisy",
            "DINOv2": f"dinov2:weights={self.dinov2.resolve()},layers=6+7+8+9",
        }
        config = self._train(work, list(extractors.values()))
        rows = []
        for label, head in zip(extractors, ("moco", "moco_2", "dense-daisy", "dinov2"), strict=True):
            answers = work / f"{head}.json"
            command = ["f3rm-ext", "eval-query", "--load-config", str(config), "--out", str(answers)]
            command += ["--feature", head, "--by", "example", *(["--skip", *self.skip] if self.skip else [])]
            call(command)
            record = json.loads(answers.read_text())
            for protocol, figures in record["protocols"].items():
                figures.pop("classes")
                rows.append({"features": label, "classes": len(record["queries"]), "protocol": protocol, **figures})
                print(json.dumps(rows[-1]), flush=True)
        report = {
            "date": datetime.date.today().isoformat(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "options": {"scale": self.scale, "rays": self.rays, "steps": self.steps, "skip": list(self.skip)},
            "rows": rows,
        }
        self.out.write_text(json.dumps(report, indent=1) + "\n")

    def _random(self, folder: Path) -> Path:
        """Writes a backbone of the same architecture that was never trained."""
        _, architecture = open_backbone(self.backbone)
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        facts = {"algorithm": "none", "architecture": architecture, "image_size": 64, "step": 0}
        return export(make_backbone(architecture, 64), folder, facts)

    def _train(self, work: Path, extractors: list[str]) -> Path:
        name = self.data.resolve().name
        config = work / "out" / name / "f3rm-ext-lite" / "together" / "config.yml"
        if not any((config.parent / "nerfstudio_models").glob(f"step-{self.steps - 1:09d}.ckpt")):
            manager = "--pipeline.datamanager."
            command: list[Any] = ["ns-train", "f3rm-ext-lite", "--data", self.data.resolve()]
            command += ["--output-dir", work / "out", "--experiment-name", name, "--timestamp", "together"]
            command += ["--vis", "tensorboard", "--max-num-iterations", self.steps]
            command += [f"{manager}train-num-rays-per-batch", self.rays]
            command += [f"{manager}camera-res-scale-factor", self.scale]
            command += [f"{manager}features.extractors", *extractors]
            call(command)
        return config


if __name__ == "__main__":
    tyro.cli(MocoDistilled).main()
