"""Whether the queue of MoCo v2 harms on few pictures: short and long, masked and plain, in equal steps.

    python benchmarks/moco_queues.py --data FOLDER --work RUNS

trains each variant from the same start on the same batches, scores k-NN and the linear probe on labelled pictures (the
classes are the subfolders), prints a line of JSON for each, and writes results/moco_queues.json after each.
"""

import datetime
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from f3rm_ext.moco import evaluation
from f3rm_ext.moco.options import TrainConfig, make_plan
from f3rm_ext.moco.tiles import prepare
from f3rm_ext.moco.training import Training
from f3rm_ext.moco.views import batches_of_views, both_views

HERE = Path(__file__).parent
VARIANTS = (
    (2048, True, True),
    (65_536, False, True),
    (2048, False, True),
    (65_536, True, True),
    (512, True, True),
    (2048, True, False),
)
"""Length of the queue, whether keys of the query's own image are masked, whether keys of the batch are negatives."""
LAST_STEPS = 43
"""Steps over which measures of the training are averaged."""


@dataclass
class MocoQueues:
    """Trains and scores every variant."""

    data: Path
    """Pictures in one subfolder per class."""
    work: Path = Path("moco_queues")
    """Folder for the decoded pictures."""
    epochs: int = 6
    """Passes of each training."""
    splits: int = 3
    """Halves over which accuracies are averaged."""
    variants: int = len(VARIANTS)
    """How many of the variants, the first first."""
    out: Path = HERE / "results" / "moco_queues.json"
    """Where the figures are written."""

    def main(self) -> None:
        """Runs everything."""
        torch.set_num_threads(1)
        data, rows = evaluation.read_labelled(self.data, 64), []
        for queue, masked, batch_negatives in VARIANTS[: self.variants]:
            config = TrainConfig(
                data=self.data,
                output=self.work,
                queue_size=queue,
                mask_same_image=masked,
                batch_negatives=batch_negatives,
                batch_size=64,
                epochs=self.epochs,
                learning_rate=0.03,
                momentum=0.99,
                use_amp=True,
            )
            rows.append({"queue": queue, "masked": masked, "batch_negatives": batch_negatives})
            rows[-1] |= self._train(config, data)
            print(json.dumps(rows[-1]), flush=True)
            report = {"date": datetime.date.today().isoformat(), "epochs": self.epochs, "rows": rows}
            self.out.write_text(json.dumps(report, indent=1) + "\n")

    def _train(self, config: TrainConfig, data: evaluation.Labelled) -> dict[str, float]:
        tiles = prepare(config.data, config.output, config.image_size)
        training = Training(plan := make_plan(config, len(tiles)), tiles.fingerprint, torch.device("cpu"))
        views = both_views(config.image_size, config.color_jitter, symmetric=True)
        batch = plan.pair.batch_size
        batches = batches_of_views(tiles, views, batch_size=batch, seed=config.seed, first=0, workers=0)
        begin, last = time.process_time(), []
        while training.step < plan.steps:
            result = training.train_step(batches)
            if training.step > plan.steps - LAST_STEPS:
                last.append(result.scalars())
        minutes = (time.process_time() - begin) / 60
        assert training.queue is not None
        found = {name: sum(each[name] for each in last) / len(last) for name in last[0]}
        found |= {"steps": plan.steps, "keys_held": len(training.queue), "cpu_minutes": minutes}
        for stages, features in evaluation.by_stages(training.query.backbone, data.images).items():
            halves = [evaluation.split(data.labels, seed) for seed in range(self.splits)]
            scores = [evaluation.scored("", features, data.labels, *half) for half in halves]
            for name in ("knn", "linear"):
                values = [getattr(score, name)[0] for score in scores]
                found[name + stages], _ = evaluation.interval(values)
        return {name: round(value, 4) for name, value in found.items()}


if __name__ == "__main__":
    tyro.cli(MocoQueues).main()
