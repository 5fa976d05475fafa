"""Accuracy of pre-trained features by pass, on labelled pictures, beside random weights, histograms and DAISY.

python benchmarks/moco_rsscn7.py --data FOLDER --output RUN --epochs 24 --learning-rate 0.06 --momentum 0.99
Options are those of ``f3rm-ext moco train``. The table at the end is that of ``f3rm-ext moco eval``.
"""

import json
import time
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from f3rm_ext.moco import evaluation
from f3rm_ext.moco.comparison import markdown, rows_of
from f3rm_ext.moco.options import TrainConfig, make_plan
from f3rm_ext.moco.tiles import prepare
from f3rm_ext.moco.training import Training
from f3rm_ext.moco.views import batches_of_views, both_views
from f3rm_ext.moco.weights import export


@dataclass
class Bench:
    """Trains and evaluates."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """Options of the training; classes are the subfolders of its data."""
    every: int = 3
    """Passes between two evaluations on one split."""
    seeds: int = 3
    """Splits of the table at the end."""
    minutes: float = 60
    """Longest training."""

    def main(self) -> None:
        """Prints a line of JSON per evaluation, then the table; writes both to the output folder."""
        torch.set_num_threads(1)
        config = self.config
        tiles = prepare(config.data, config.output, config.image_size)
        training = Training(plan := make_plan(config, len(tiles)), tiles.fingerprint, torch.device("cpu"))
        data = evaluation.read_labelled(config.data, config.image_size)
        batches = batches_of_views(
            tiles,
            both_views(config.image_size, config.color_jitter, symmetric=config.algorithm == "v2"),
            batch_size=plan.pair.batch_size,
            seed=config.seed,
            first=0,
            workers=0,
        )
        per_pass, begin, lines = plan.steps // plan.pair.epochs, time.process_time(), []
        for epoch in range(1, plan.pair.epochs + 1):
            for _ in range(per_pass):
                result = training.train_step(batches)
            minutes = (time.process_time() - begin) / 60
            if epoch % self.every == 0 or epoch in (1, plan.pair.epochs) or minutes > self.minutes:
                knn, linear = self._accuracies(training, data)
                line = {"pass": epoch, "cpu_minutes": round(minutes, 1), "knn": knn, "linear": linear}
                lines.append(line | {name: round(value, 3) for name, value in result.scalars().items()})
                print(json.dumps(lines[-1]), flush=True)
                begin = time.process_time() - minutes * 60  # evaluations do not count
                facts = {**plan.record(), "step": training.step, "tiles": tiles.fingerprint}
                path = export(training.query.backbone, config.output, facts)
            if minutes > self.minutes:
                break
        scores = evaluation.evaluate(data, path, self.seeds)
        table = markdown(f"{len(tiles)} pictures, pass {epoch}", *rows_of(scores))
        print(table)
        (config.output / "accuracy.md").write_text(table)
        (config.output / "accuracy.json").write_text(json.dumps({"plan": plan.record(), "passes": lines}, indent=1))

    @staticmethod
    def _accuracies(training: Training, data: evaluation.Labelled) -> tuple[float, float]:
        features = evaluation.network_features(training.query.backbone, data.images)
        training.query.train()
        train, test = evaluation.split(data.labels, 0)
        found = []
        for method in (evaluation.nearest_neighbours, evaluation.linear_probe):
            predicted = method(features[train], data.labels[train], features[test])
            found.append(round(float((predicted == data.labels[test]).float().mean()), 4))
        return found[0], found[1]


if __name__ == "__main__":
    tyro.cli(Bench).main()
