"""``f3rm-ext moco``: pre-training of an image backbone on the pictures of a domain."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from f3rm_ext.moco.options import TrainConfig

if TYPE_CHECKING:
    from f3rm_ext.moco.pairs import Pair


@dataclass
class Pairs:
    """Tell what pairs of batch and queue mean for a number of images.

    Any pair is valid here: the queue is a ring. Code that asserts that the queue be a multiple of the gathered batch
    is told apart by the column "multiple". What matters is how often a query meets an older key of its own image.
    Training masks those keys; without masking they are false negatives.

    Typical calls:
      f3rm-ext moco pairs --images 2000 --processes 2
      f3rm-ext moco pairs --images 2800 --batch-size 88 --queue-size 76800
    """

    images: int = 2000
    """Images of the data set, 1 or more."""
    processes: int = 1
    """Processes, each with its own batch, whose keys are gathered; 1 or more."""
    gradient_accumulation_steps: int = 1
    """Batches per optimiser step, 1 or more. It changes the steps, not the number of negatives."""
    epochs: int = 300
    """Passes over the images, 1 or more. The presets have their own."""
    momentum: float = 0.999
    """Momentum of the key encoder, 0 to below 1."""
    batch_size: tuple[int, ...] = (32, 64, 80, 96, 128, 256)
    """Batches per process to list, 1 or more each."""
    queue_size: tuple[int, ...] = ()
    """Queues to list, 1 or more each; by default batch × 800, powers of two, and the longest advised one."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the table as JSON."""

    def main(self) -> int:
        """Prints the table. Returns the exit code."""
        from f3rm_ext.moco.pairs import PRESETS, Pair, queues_of
        from f3rm_ext.utils.console import console

        def pair(batch: int, queue: int, accumulation: int, epochs: int) -> Pair:
            return Pair(batch, queue, self.images, self.processes, accumulation, epochs, self.momentum)

        found = {
            name: pair(preset.batch_size, preset.queue_size, preset.gradient_accumulation_steps, preset.epochs)
            for name, preset in PRESETS.items()
        }
        listed = [
            pair(batch, queue, self.gradient_accumulation_steps, self.epochs)
            for batch in self.batch_size
            for queue in self.queue_size or queues_of(batch, self.processes, self.images)
        ]
        if self.json:
            presets = [{"preset": name, **item.record()} for name, item in found.items()]
            print(json.dumps({"presets": presets, "pairs": [item.record() for item in listed]}, indent=1))
            return 0
        log = console()
        log.print(_table("Presets", [(name, item) for name, item in found.items()]))
        log.print(_table(f"Pairs for {self.images} images", [("", item) for item in listed]))
        log.print(_explanation(listed), markup=False, highlight=False)
        return 0


def _table(title: str, rows: "list[tuple[str, Pair]]") -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    named = any(name for name, _ in rows)
    headers = ["batch", "gathered", "effective", "queue", "batches in queue", "multiple", "same-image keys"]
    headers += ["advised", "top-1 ceiling", "steps", "time constants"]
    for header in [*(["preset"] if named else []), *headers]:
        table.add_column(header, justify="left" if header == "preset" else "right")
    for name, pair in rows:
        cells = [
            str(pair.batch_size),
            str(pair.gathered_batch),
            str(pair.effective_batch),
            str(pair.queue_size),
            f"{pair.batches_in_queue:.2f}",
            "yes" if pair.is_multiple else "no",
            f"{pair.same_image_keys:.1f}",
            "yes" if pair.is_advised else "no",
            f"{100 * pair.accuracy_ceiling:.1f} %",
            str(pair.optimizer_steps),
            f"{pair.time_constants:.1f}",
        ]
        table.add_row(*([name] if named else []), *cells)
    return table


def _explanation(pairs: "list[Pair]") -> str:
    from f3rm_ext.moco.pairs import nearest_multiples

    lines = [
        "Not required: that the queue be a multiple of the gathered batch. Keys are written to a ring.",
        "Advised: a queue of at most images − effective batch; a query then meets about half a key of its own image.",
        "Same-image keys are masked in training; the ceiling is the best pretext accuracy without masking.",
        "Negatives per query are the queue, whatever the accumulation. Time constants: steps × (1 − momentum).",
    ]
    for pair in pairs:
        if not pair.is_multiple and pair.queue_size in (76_800, 65_536, 64_000):
            sizes = " and ".join(map(str, nearest_multiples(pair.queue_size, pair.gathered_batch)))
            lines.append(f"Multiples of {pair.gathered_batch} next to {pair.queue_size}: {sizes}.")
    return "\n".join(dict.fromkeys(lines))


@dataclass
class Train:
    """Pre-train a backbone on a folder of pictures without labels.

    Pictures are decoded once into the folder of the run. Ctrl-C saves after the step and prints the command that goes
    on; the trajectory is then that of an uninterrupted training. The weights are written as safetensors with
    torchvision's names, and a model card beside them.

    Typical calls:
      f3rm-ext moco train --data tiles --output runs/tiles
      f3rm-ext moco train --data tiles --output runs/tiles --architecture resnet50 --image-size 224 --use-amp
      f3rm-ext moco train --data tiles --output runs/tiles --resume
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """Options of the training."""

    def main(self) -> int:
        """Trains. Returns the exit code."""
        from f3rm_ext.moco.run import Run

        return Run(self.config).main()


MocoCommand = Annotated[Train, tyro.conf.subcommand("train")] | Annotated[Pairs, tyro.conf.subcommand("pairs")]
