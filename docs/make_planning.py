"""Writes the tables of planning.md, and one each of moco.md and refinement.md, with the planner.

python docs/make_planning.py          # rewrite; a minute
python docs/make_planning.py --check  # fail if it is out of date
"""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace

from markdown_table import DOCS, rewrite

from f3rm_ext.html.tables import Table
from f3rm_ext.memory.devices import GIB
from f3rm_ext.memory.estimate import MemoryEstimate
from f3rm_ext.moco.options import Architecture, TrainConfig
from f3rm_ext.moco.plan import memory_line
from f3rm_ext.planning.advice import Advice, advise
from f3rm_ext.planning.estimator import cached, estimate_memory
from f3rm_ext.planning.question import Question
from f3rm_ext.planning.request import PlanRequest

MIB = 1 << 20
ESTIMATE: Callable[[PlanRequest], MemoryEstimate] = cached(estimate_memory)
GARDEN = {"gaussians": 6_000_000, "images": 161, "width_px": 1297, "height_px": 840}
"""Mip-NeRF 360's garden at a quarter of its sides, with six million Gaussians."""
GUIDE = {"images": 100, "width_px": 1024, "height_px": 1024}
"""The training guide's example."""
CARDS = {
    24: "no options, 11–12 GB",
    16: "`--optimize_memory`, 8–9 GB",
    12: "+ aggressive, degree 2, 5–6 GB",
    8: "the same",
}
"""Memory, GiB, and what the guide said."""
MANAGER = "--pipeline.datamanager"
WINDOW = f"{MANAGER}.train-num-images-to-sample-from {{}} {MANAGER}.train-num-times-to-repeat-images {{}}"
RECIPES = {
    "most speed": "--pipeline.datamanager.train-num-rays-per-batch 16384",
    "two GPUs": f"{MANAGER}.train-num-rays-per-batch 8192 {WINDOW.format(64, 1024)} --machine.num-devices 2",
    "little memory": f"--pipeline.datamanager.train-num-rays-per-batch 4096 {WINDOW.format(16, 256)} "
    "--pipeline.model.eval-num-rays-per-chunk 8192",
    "as it is": "",
}
"""The training guide's recipes, as options of f3rm-ext."""
ARGUMENTS = {
    "f3rm-ext": (
        ("as it is", ""),
        ("twice the rays", "--pipeline.datamanager.train-num-rays-per-batch 8192"),
        ("images in main memory", "--pipeline.datamanager.images-on-gpu False"),
        ("four feature samples", "--pipeline.model.feature-samples-per-ray 4"),
        ("twice the rows of the grid", "--pipeline.model.grid.log2-hashmap-size 20"),
        ("half the chunk", "--pipeline.model.eval-num-rays-per-chunk 16384"),
    ),
    "sugar-ext": (
        ("as it is", ""),
        ("`--optimize-memory`", "--optimize-memory True"),
        ("moments of 8 bits", "--pipeline.model.sh-moments int8"),
        ("degree 2", "--sh-degree 2"),
        ("`--regularization dn-consistency`", "--regularization dn-consistency"),
        ("no regularisation", "--regularization none"),
        ("images in main memory", "--pipeline.datamanager.cache-images cpu"),
    ),
}


def question(method: str, options: str, gib: int, sizes: dict[str, int]) -> Question:
    """A question about a card."""
    return Question(method, tuple(shlex.split(options)), vram_gib=gib, **sizes)  # type: ignore[arg-type]


def answer(asked: Question) -> Advice:
    """What the planner advises."""
    return advise(asked.request, ESTIMATE)


def gib(size: int) -> str:
    """Bytes as GiB."""
    return f"{size / GIB:.2f}"


def cards() -> Table:
    """Commands for the card classes."""
    rows = []
    for memory, said in CARDS.items():
        asked = question("sugar-ext", "--sh-degree 3", memory, GARDEN)
        before, found = ESTIMATE(asked.request()).peak("train"), answer(asked)
        command = shlex.join(asked.command(found.options))
        after = gib(found.estimate.peak("train")) if found.fits else "does not fit"
        rows.append([f"{memory} GiB", gib(before), f"`{command}`", after, said])
    return Table(["Card", "As it is, GiB", "Type", "GiB then", "The guide said"], rows, "rrlrl")


def tree() -> Iterator[str]:
    """A decision tree: what to add as cards get smaller."""
    for method, sizes in (("sugar-ext", GARDEN), ("f3rm-ext-big", GUIDE)):
        scene = "6 million Gaussians" if method == "sugar-ext" else "100 images of 1024 × 1024 pixels"
        yield f"- `{method}`, {scene}"
        before = None
        for memory in (16, 12, 8, 6) if method == "sugar-ext" else (16, 6):
            found = answer(question(method, "", memory, sizes))
            options = " ".join(f"`--{name} {value}`" for name, value in found.options)
            if not found.fits:
                yield f"    - {memory} GiB: does not fit, whatever is lowered."
                break
            if options != before:
                yield f"    - {memory} GiB or {'more' if before is None else 'less'}: {options or 'no options'}"
            before = options


def recipes() -> Table:
    """The guide's recipes."""
    rows = []
    for name, options in RECIPES.items():
        memory = ESTIMATE(question("f3rm-ext", options, 16, GUIDE).request())
        picture = max(memory.peak("evaluation"), memory.peak("query"))
        rows.append([name, gib(memory.peak("train")), gib(picture), gib(sum(memory.host.values()))])
    head = ["Recipe", "Training step, GiB", "Picture, GiB", "Images and features in main memory, GiB"]
    return Table(head, rows)


def pretraining() -> Table:
    """Tensors of a MoCo step on CUDA by batch, at the guide's image size and queue."""
    backbones: tuple[tuple[Architecture, str], ...] = (("resnet50", "ResNet-50"), ("vit_base", "ViT-B"))
    rows = []
    for architecture, name in backbones:
        for amp in (True, False):
            for saving in (False, True):
                config = TrainConfig(data=DOCS, output=DOCS, architecture=architecture, image_size=224)
                config = replace(config, queue_size=65_536, use_amp=amp, use_grad_checkpointing=saving)
                line = memory_line(config, 2000, "cuda")
                size = (line.fixed_bytes + 96 * line.image_bytes) / GIB
                rows.append([name, *("yes" if on else "no" for on in (amp, saving)), str(line), f"{size:.1f}"])
    return Table(["Network", "AMP", "Checkpointing", "Tensors", "with a batch of 96, GiB"], rows, "llllr")


def refinement() -> Table:
    """Memory of a refinement's step by option."""
    rows = []
    for label, options in ARGUMENTS["sugar-ext"][:2] + ARGUMENTS["sugar-ext"][3:4]:
        memory = ESTIMATE(question("sugar-ext-refine", options, 8, {**GARDEN, "gaussians": 400_000}).request())
        rows.append([label, f"{memory.peak('train') / MIB:,.0f}"])
    return Table(["`sugar-ext-refine`", "Training step, MiB"], rows)


def arguments(method: str) -> Table:
    """What each argument costs."""
    sizes = GARDEN if method == "sugar-ext" else GUIDE
    categories = ("parameters", "gradients", "optimizer", "images", "features", "activations", "workspace")
    rows = []
    first: MemoryEstimate | None = None
    for label, options in ARGUMENTS[method]:
        memory = ESTIMATE(question(method, options, 16, sizes).request())
        first = first or memory
        now, before = memory.device["train"], first.device["train"]
        changes = {name: (now.get(name, 0) - before.get(name, 0)) / MIB for name in categories}
        most = max(changes, key=lambda name: abs(changes[name]))
        what = f"{most} {changes[most]:+,.0f}" if abs(changes[most]) >= 1 else ""
        change = (memory.peak("train") - first.peak("train")) / MIB
        picture = max(memory.peak("evaluation"), memory.peak("query")) / MIB
        difference = f"{change:+,.0f}" if abs(change) >= 1 else ""
        rows.append([label, f"{memory.peak('train') / MIB:,.0f}", difference, what, f"{picture:,.0f}"])
    head = [f"`{method}`", "Training step, MiB", "Change", "of that, what changes most", "Picture, MiB"]
    return Table(head, rows, "lrrlr")


TABLES: dict[str, dict[str, Callable[[], Table | Iterator[str]]]] = {
    "planning.md": {
        "cards": cards,
        "tree": tree,
        "recipes": recipes,
        "fields": lambda: arguments("f3rm-ext"),
        "splats": lambda: arguments("sugar-ext"),
    },
    "moco.md": {"pretraining": pretraining},
    "refinement.md": {"refinement": refinement},
}


if __name__ == "__main__":
    rewrite(TABLES, "make_planning.py")
