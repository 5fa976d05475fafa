"""How well fields and splats answer queries on held-out views, beside the 2D features they have them from.

Runs on a capture with labels are asked by `f3rm-ext eval query`: a finished run of splats with lifted DINOv2 features
(--splats), by ten pixels of each class; and three short runs of f3rm-ext-lite:

1. one-hot labels as features: everything but the encoder,
2. DINOv2 features, asked by ten pixels of each class, each in another training photo,
3. text features (the example package `conse`), asked by the names of the classes.

    python benchmarks/query_quality.py --data tabletop --weights WEIGHTS

prints the figures and writes results/query_quality.json. Runs that are there already are only asked again, and rows of
runs that are not asked stay.
"""

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from processes import call, read_report, write_report

HERE = Path(__file__).parent


@dataclass
class QueryQuality:
    """Compares a field's answers with labels, and with those of its 2D features."""

    data: Path
    """A capture with label images."""
    weights: Path
    """Folder of the weights: dinov2_vits14_saliency_fp16.pth, and those of the package extractor_conse."""
    splats: Path | None = None
    """config.yml of splats with lifted DINOv2 features."""
    fields: bool = True
    """Train and ask the fields."""
    work: Path = Path("query_quality")
    """Folder of the runs."""
    scale: float = 0.5
    """Factor on the image size."""
    rays: int = 1024
    """Rays per step."""
    skip: tuple[str, ...] = ("table",)
    """Classes that are not asked for in runs 2 and 3."""
    out: Path = HERE / "results" / "query_quality.json"
    """Where the figures are written."""

    def main(self) -> None:
        data, weights = self.data.resolve(), self.weights.resolve()
        skip = ["--skip", *self.skip] if self.skip else []
        dinov2 = f"dinov2:weights={weights / 'dinov2_vits14_saliency_fp16.pth'},layers=6+7+8+9"
        runs: list[tuple[str, str, int, list[str]]] = [
            ("labels", f"labels:data={data}", 1500, ["--negatives", "both"]),
            ("example", dinov2, 2000, ["--by", "example", *skip]),
            ("text", f"conse:weights={weights}", 2000, ["--by", "text", *skip]),
        ]
        rows = []
        made = [
            (name, self._train(name, extractor, steps), steps, options)
            for name, extractor, steps, options in (runs if self.fields else [])
        ]
        if self.splats is not None:
            made.append(("splats", self.splats, 0, ["--by", "example", *skip]))
        self.work.mkdir(parents=True, exist_ok=True)
        for name, config, steps, options in made:
            answers = self.work / f"{name}.json"
            call(["f3rm-ext", "eval", "query", "--load-config", config, "--out", answers, *options])
            record = json.loads(answers.read_text())
            classes = len(record["queries"])
            for protocol, figures in record["protocols"].items():
                figures.pop("classes")
                rows.append({"run": name, "steps": steps, "classes": classes, "protocol": protocol, **figures})
                print(rows[-1], flush=True)
        asked = {row["run"] for row in rows}
        rows = [row for row in read_report(self.out).get("rows", ()) if row["run"] not in asked] + rows
        report = {
            "python": platform.python_version(),
            "options": {"scale": self.scale, "rays": self.rays, "skip": list(self.skip)},
            "rows": rows,
        }
        write_report(report, self.out)

    def _train(self, name: str, extractor: str, steps: int) -> Path:
        config = self.work / "out" / self.data.resolve().name / "f3rm-ext-lite" / name / "config.yml"
        if not any((config.parent / "nerfstudio_models").glob(f"step-{steps - 1:09d}.ckpt")):
            manager = "--pipeline.datamanager."
            command: list[Any] = ["ns-train", "f3rm-ext-lite", "--data", self.data.resolve()]
            command += ["--output-dir", self.work / "out", "--experiment-name", self.data.resolve().name]
            command += ["--timestamp", name, "--vis", "tensorboard", "--max-num-iterations", steps]
            command += [f"{manager}train-num-rays-per-batch", self.rays]
            command += [f"{manager}camera-res-scale-factor", self.scale, f"{manager}features.extractors", extractor]
            call(command)
        return config


if __name__ == "__main__":
    tyro.cli(QueryQuality).main()
