"""Accuracy of pre-trained features over several trainings, beside random weights, colour histograms and DAISY.

    python benchmarks/moco_seeds.py --data FOLDER --weights RUN0/backbone.safetensors RUN1/backbone.safetensors

Each training is scored on a half of its own, with random weights of its own; intervals cover both. Prints the table and
writes results/moco_seeds.json.
"""

import datetime
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from safetensors import safe_open

from f3rm_ext.moco import evaluation
from f3rm_ext.moco.comparison import markdown, rows_of
from f3rm_ext.moco.encoder import make_backbone

HERE = Path(__file__).parent


@dataclass
class MocoSeeds:
    """Scores several trainings together."""

    data: Path
    """Pictures in one subfolder per class."""
    weights: tuple[Path, ...]
    """The backbone.safetensors of two to ten trainings that differ by their seed alone."""
    first_split: int = 3
    """Number of the half of the first training; on those before, the stages were chosen."""
    imagenet: Path | None = None
    """State dict of EfficientNet-lite0 with timm's names."""
    out: Path = HERE / "results" / "moco_seeds.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Runs everything."""
        torch.set_num_threads(1)
        data = evaluation.read_labelled(self.data, 64)
        fixed = {
            "colour histograms": evaluation.color_histograms(data.images),
            "DAISY": evaluation.daisy_features(data.images),
        }
        if self.imagenet is not None:
            fixed["ImageNet (EfficientNet-lite0)"] = evaluation.imagenet_features(self.imagenet, data.images)
        scores: dict[str, evaluation.Score] = {}
        for number, path in enumerate(self.weights, self.first_split):
            backbone, architecture = evaluation.open_backbone(path)
            torch.manual_seed(number)
            networks = {"pre-trained": backbone, "random weights": make_backbone(architecture, 64)}
            features = {
                name + stages: rows
                for name, network in networks.items()
                for stages, rows in evaluation.by_stages(network, data.images).items()
            }
            half = evaluation.split(data.labels, number)
            for name, rows in (features | fixed).items():
                now = evaluation.scored(name, rows, data.labels, *half)
                scores[name] = scores[name].followed_by(now) if name in scores else now
        print(markdown(f"{len(self.weights)} trainings", *rows_of(list(scores.values()))))
        with safe_open(self.weights[0], framework="pt") as file:
            plan = {name: value for name, value in (file.metadata() or {}).items() if name not in ("seed", "format")}
        report = {"date": datetime.date.today().isoformat(), "images": len(data.images), "plan": plan}
        report["rows"] = [asdict(score) for score in scores.values()]
        self.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(MocoSeeds).main()
