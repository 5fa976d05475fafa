"""``f3rm-ext moco``: pre-training of an image backbone on the pictures of a domain."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from f3rm_ext.errors import ConfigError
from f3rm_ext.moco.options import Architecture, TrainConfig
from f3rm_ext.scripts.common import require_own_file
from f3rm_ext.utils.console import console, image_progress, say
from f3rm_ext.utils.ranges import Positive, Range, check_ranges

if TYPE_CHECKING:
    from f3rm_ext.html.tables import Table
    from f3rm_ext.moco.pairs import Pair

_EVAL = "f3rm-ext moco eval"


@dataclass
class Pairs:
    """List the consequences of pairs of batch size and queue size for a number of images.

    Any pair is valid here, since the queue is a ring. The column "multiple" is for code that requires the queue to be a
    multiple of the gathered batch. What matters is how often a query meets an older key of its own image: training
    masks those keys, and without masking they are false negatives.

    Typical calls:
      f3rm-ext moco pairs --images 2000 --processes 2
      f3rm-ext moco pairs --images 2800 --batch-size 88 --queue-size 76800
      f3rm-ext moco pairs --architecture resnet50 --image-size 224 --memory-gib 8 --images-per-s 200
    """

    images: int = 2000
    """Number of images in the data set, at least 1."""
    processes: int = 1
    """Number of processes, at least 1, each with its own batch; their keys are gathered."""
    gradient_accumulation_steps: int = 1
    """Batches per optimiser step, at least 1. They change the number of steps, not that of negatives."""
    epochs: int = 300
    """Passes over the images, at least 1. The presets have their own."""
    momentum: float = 0.999
    """Momentum of the key encoder, 0 to below 1."""
    batch_size: tuple[int, ...] = (32, 64, 80, 96, 128, 256)
    """Batch sizes per process to list, at least 1 each."""
    queue_size: tuple[int, ...] = ()
    """Queue sizes to list, at least 1 each; by default batch × 800, powers of two, and the longest advised one."""
    architecture: Literal["none"] | Architecture = "none"
    """Network whose memory to list, trained with AMP; none leaves the memory out."""
    image_size: Annotated[int, Range(32, 4096)] = 224
    """Width and height of its views, in px, 32 to 4096."""
    memory_gib: Positive = 8.0
    """Memory of the device in GiB, above 0, for the column with the share in use."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Kind of device, which need not be present."""
    images_per_s: Annotated[float, Range(0)] = 0.0
    """Images per second of all processes, at least 0, as printed by a training or by `moco train --plan --probe`; above
    0, the duration is listed."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the table as JSON."""

    def main(self) -> int:
        from f3rm_ext.moco.pairs import PRESETS, Pair, listed_queues

        check_ranges(self)

        def pair(batch: int, queue: int, accumulation: int, epochs: int) -> Pair:
            return Pair(batch, queue, self.images, self.processes, accumulation, epochs, self.momentum)

        presets = {
            name: pair(preset.batch_size, preset.queue_size, preset.gradient_accumulation_steps, preset.epochs)
            for name, preset in PRESETS.items()
        }
        listed = [
            pair(batch, queue, self.gradient_accumulation_steps, self.epochs)
            for batch in self.batch_size
            for queue in self.queue_size
            or listed_queues(batch, batch * self.processes * self.gradient_accumulation_steps, self.images)
        ]
        pairs = [*presets.values(), *listed]
        costs = self._costs(pairs)
        if self.json:
            records = [{**item.record(), **cost} for item, cost in zip(pairs, costs, strict=True)]
            named = [{"preset": name, **record} for name, record in zip(presets, records, strict=False)]
            print(json.dumps({"presets": named, "pairs": records[len(named) :]}, indent=1))
            return 0
        rows = [[show(item) for show in _COLUMNS.values()] for item in pairs]
        names = [*presets, *[""] * len(listed)]
        named_rows = [[name, *row] for name, row in zip(presets, rows, strict=False)]
        _print_table("Presets", ["preset", *_COLUMNS], named_rows)
        _print_table(f"Pairs for {self.images} images", [*_COLUMNS], rows[len(presets) :])
        if any(costs):
            header = ["preset", "batch", "queue", "epochs", *(_COSTS[key][0] for key in costs[0])]
            rows = [
                [name, str(item.batch_size), str(item.queue_size), str(item.epochs)]
                + [_COSTS[key][1].format(value) for key, value in cost.items()]
                for name, item, cost in zip(names, pairs, costs, strict=True)
            ]
            _print_table("Memory per device, and time", header, rows)
        console().print(_explanation(listed, self.queue_size), markup=False, highlight=False)
        return 0

    def _costs(self, pairs: "list[Pair]") -> list[dict[str, float]]:
        """Returns the requested figures of each pair: memory in GiB, its share, and hours."""
        costs: list[dict[str, float]] = [{} for _ in pairs]
        if self.architecture != "none":
            from f3rm_ext.moco.plan import memory_of_pairs

            held = memory_of_pairs(pairs, self.architecture, self.image_size, self.device)
            for cost, size in zip(costs, held, strict=True):
                cost |= {"memory_gib": size / 2**30, "memory_share": size / 2**30 / self.memory_gib}
        if self.images_per_s:
            for cost, pair in zip(costs, pairs, strict=True):
                cost["hours"] = pair.views / self.images_per_s / 3600
        return costs


_COLUMNS: "dict[str, Callable[[Pair], str]]" = {
    "batch": lambda pair: str(pair.batch_size),
    "gathered": lambda pair: str(pair.gathered_batch),
    "effective": lambda pair: str(pair.effective_batch),
    "queue": lambda pair: str(pair.queue_size),
    "batches in queue": lambda pair: f"{pair.batches_in_queue:.2f}",
    "multiple": lambda pair: "yes" if pair.is_multiple else "no",
    "same-image keys": lambda pair: f"{pair.same_image_keys:.1f}",
    "advised": lambda pair: "yes" if pair.is_advised else "no",
    "top-1 ceiling": lambda pair: f"{100 * pair.accuracy_ceiling:.1f} %",
    "steps": lambda pair: str(pair.optimizer_steps),
    "time constants": lambda pair: f"{pair.time_constants:.1f}",
}
_COSTS = {"memory_gib": ("GiB", "{:.2f}"), "memory_share": ("in use", "{:.0%}"), "hours": ("hours", "{:.1f}")}


def _print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 0), pad_edge=False)
    for name in header:
        first, longest = name == "preset", max(map(len, name.split()))
        table.add_column(name, justify="left" if first else "right", no_wrap=first, min_width=longest)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def _explanation(pairs: "list[Pair]", wanted: tuple[int, ...]) -> str:
    from f3rm_ext.moco.pairs import nearest_multiples

    lines = [
        "Not required: a queue that is a multiple of the gathered batch, since keys are written to a ring.",
        "Advised: a queue of at most images − effective batch; a query then meets about half a key of its own image.",
        "Same-image keys are masked in training; the ceiling is the best pretext accuracy without masking.",
        "The negatives of a query are the queue and the other keys of the batch, whatever the accumulation.",
        "Use --architecture or `moco train --plan` to see the memory. Time constants are steps × (1 − momentum).",
    ]
    for pair in pairs:
        if not pair.is_multiple and pair.queue_size in (*wanted, 76_800, 65_536, 64_000):
            sizes = " and ".join(map(str, nearest_multiples(pair.queue_size, pair.gathered_batch)))
            lines.append(f"Multiples of {pair.gathered_batch} next to {pair.queue_size}: {sizes}.")
    return "\n".join(dict.fromkeys(lines))


@dataclass
class Train:
    """Pre-train a backbone on a folder of pictures without labels.

    Pictures are decoded once into the folder of the run. Ctrl-C saves after the current step and prints the command
    that resumes the run, which then gives the same weights as an uninterrupted one. The weights are written as
    safetensors with the parameter names of torchvision or timm, beside a model card.

    Typical calls:
      f3rm-ext moco train --data tiles --output runs/tiles
      f3rm-ext moco train --data tiles --output runs/tiles --architecture resnet50 --image-size 224 --use-amp
      f3rm-ext moco train --data tiles --output runs/tiles --preset auto --memory-gib 8 --device cuda --plan
      f3rm-ext moco train --data tiles --output runs/tiles --resume
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """Options of the training."""

    def main(self) -> int:
        from f3rm_ext.moco.run import TrainingRun

        return TrainingRun(self.config).main()


@dataclass
class Eval:
    """Evaluate pre-trained weights on pictures in one subfolder per class, or on pictures with masks.

    Half of each class trains a linear probe and provides the nearest neighbours; the other half is scored. Random
    weights of the same network, colour histograms and DAISY are scored for comparison. ResNets are scored by the
    features of the last stage and of all stages. With --masks, a small decoder learns the classes of pixels from the
    features of half of the pictures, and the other half is scored. Pictures used for pre-training may be included,
    since it saw no labels; say so when you quote the figures. It computes on the CPU.

    Typical calls:
      f3rm-ext moco eval --data tiles --weights runs/tiles/backbone.safetensors
      f3rm-ext moco eval --data tiles --weights runs/tiles/backbone.safetensors --seeds 5 --table tiles.md
      f3rm-ext moco eval --data tiles --weights runs/tiles/backbone.safetensors --masks masks --image-size 224
    """

    data: Path
    """Folder with one subfolder of pictures per class; with --masks, any folder of pictures."""
    weights: Path
    """File backbone.safetensors of a training."""
    image_size: Annotated[int, Range(32, 4096)] = 64
    """Width and height to which pictures are scaled, in px, 32 to 4096."""
    seeds: Annotated[int, Range(1, 10)] = 3
    """Number of random splits and random networks, 1 to 10, over which intervals are computed."""
    imagenet: Path | None = None
    """State dict of EfficientNet-lite0 with timm's names, whose ImageNet features are scored, too."""
    fine_tune_passes: Annotated[int, Range(0, 10_000)] = 0
    """Passes of training the whole network with labels or masks, from pre-trained and random weights, 0 to 10,000; 0
    skips this."""
    masks: Path | None = None
    """Folder of masks, .png files with the names of the pictures, whose values are classes; 255 is ignored. The mean
    IoU is scored instead of the accuracy."""
    table: Path | None = None
    """File to write the table to, .md or .html."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print all accuracies as JSON."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.table is not None and self.table.suffix not in (".md", ".html"):
            raise ConfigError(f"--table is {self.table}: give a file that ends in .md or .html.")
        if self.masks is not None and self.imagenet is not None:
            raise ConfigError("--imagenet needs one class per picture, not --masks: leave one of the two out.")

    def main(self) -> int:
        from f3rm_ext.moco.evaluation import scores_table

        if self.table is not None:
            require_own_file(self.table, _EVAL, "--table")
        with image_progress("splits", disable=self.json) as progress:
            networks = 2 if self.masks is not None else 4 + (self.imagenet is not None)
            task = progress.add_task("Evaluating", total=networks * self.seeds)
            score = self._score_images if self.masks is None else self._score_masks
            title, facts, scores, titles = score(lambda: progress.advance(task))
        if self.json:
            print(json.dumps({**facts, "scores": [{"name": name, **each} for name, each in scores.items()]}, indent=1))
            return 0
        table = scores_table(scores, titles)
        if self.table is not None:
            self._write(title, table)
        say(f"{title}.\n\n{table.text()}")
        return 0

    def _score_images(self, done: Callable[[], None]) -> "Results":
        from f3rm_ext.moco.evaluation import evaluate, read_labelled

        data = read_labelled(self.data, self.image_size)
        scores = evaluate(
            data, self.weights, self.seeds, imagenet=self.imagenet, fine_tune_passes=self.fine_tune_passes, done=done
        )
        images, classes = len(data.images), len(data.classes)
        title = (
            f"Accuracy, % (95 % interval over {self.seeds} seeds): {images} pictures, {classes} classes, "
            f"chance {100 / classes:.1f}"
        )
        titles = {"knn": "k-NN", "linear": "linear probe", "fine_tuned": "fine-tuned"}
        return title, {"images": images, "classes": data.classes}, scores, titles

    def _score_masks(self, done: Callable[[], None]) -> "Results":
        from f3rm_ext.moco.segmentation import evaluate_masks, read_masked

        assert self.masks is not None
        data = read_masked(self.data, self.masks, self.image_size)
        scores = evaluate_masks(data, self.weights, self.seeds, fine_tune_passes=self.fine_tune_passes, done=done)
        images, classes = len(data.images), data.classes
        title = f"Mean IoU, % (95 % interval over {self.seeds} seeds): {images} pictures, {len(classes)} classes"
        titles = {"mean_iou": "mIoU", "fine_tuned": "mIoU, fine-tuned"}
        return title, {"images": images, "classes": classes}, scores, titles

    def _write(self, title: str, table: "Table") -> None:
        """Writes a table as HTML if the file ends in .html, otherwise as Markdown."""
        from f3rm_ext.html.page import render_page
        from f3rm_ext.utils.output_file import write_file
        from f3rm_ext.utils.provenance import sign_text

        assert self.table is not None
        if self.table.suffix == ".html":
            text = render_page("table.html", title=title, eyebrow=_EVAL, table=table)
        else:
            text = f"{title}\n\n{table.markdown()}\n"
        write_file(self.table, sign_text(text, _EVAL), "--table")


Results = tuple[str, dict[str, Any], dict[str, dict[str, list[float]]], dict[str, str]]
"""Title, facts about the data, scores, and the headers of their columns."""
MocoCommand = Train | Pairs | Eval
