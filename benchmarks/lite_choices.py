"""What each choice of the lite preset brings: the preset beside itself with that choice undone.

    python benchmarks/lite_choices.py --data CAPTURE

Every variant trains for the same number of steps in a process of its own, then `ns-eval` measures it.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from cpu_training import evaluate, run_once

HERE = Path(__file__).parent
MODEL = "pipeline.model."
VARIANTS: dict[str, tuple[str, ...]] = {
    "the preset": (),
    "plain torch hash grids": (f"{MODEL}backend='torch'",),
    "rows 2^15": (f"{MODEL}grid.log2_hashmap_size=15",),
    "rows 2^19": (f"{MODEL}grid.log2_hashmap_size=19",),
    "nerfacto's grid (16 × 2, to 2048, 2^19)": (
        f"{MODEL}grid.num_levels=16",
        f"{MODEL}grid.features_per_level=2",
        f"{MODEL}grid.max_res=2048",
        f"{MODEL}grid.log2_hashmap_size=19",
    ),
    "48 samples of the field": (f"{MODEL}num_samples=48",),
    "features at all samples": (f"{MODEL}feature_samples_per_ray=0",),
    "features on all rays": ("pipeline.datamanager.feature_ray_fraction=1.0",),
    "appearance codes": (f"{MODEL}appearance_dim=32",),
    "pose refinement": (f"{MODEL}camera_optimizer.mode='SO3xR3'",),
}


@dataclass
class LiteChoices:
    """Compares variants of f3rm-ext-lite on the CPU."""

    data: Path
    """A capture with a transforms.json."""
    steps: int = 250
    """Steps of every variant."""
    scale: float = 0.25
    """Factor on the image size."""
    out: Path = HERE / "results" / "lite_choices.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Runs everything."""
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for index, (label, changes) in enumerate(VARIANTS.items()):
                command = [sys.executable, str(HERE / "train_once.py"), "--method", "f3rm-ext-lite"]
                command += ["--data", str(self.data.resolve()), "--scale", str(self.scale), "--steps", str(self.steps)]
                command += (
                    ["--output-dir", f"{folder}/{index}", "--change", *changes]
                    if changes
                    else [
                        "--output-dir",
                        f"{folder}/{index}",
                    ]
                )
                row = run_once(command, dict(os.environ))
                row |= {"label": label, "metrics": evaluate(Path(row.pop("config")), dict(os.environ))}
                rows.append(row)
                print(json.dumps(row), flush=True)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"capture": self.data.name, "scale": self.scale, "steps": self.steps, "rows": rows}
        self.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    tyro.cli(LiteChoices).main()
