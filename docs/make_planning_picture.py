"""Draws the curves of planning.md: memory of a training step over what decides about it. Half a minute.

python docs/make_planning_picture.py
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from make_planning import GARDEN, GUIDE, question
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from f3rm_ext.html.profile_charts import COLORS
from f3rm_ext.memory.devices import GIB
from f3rm_ext.memory.estimate import Category
from f3rm_ext.planning.estimator import estimate_memory
from f3rm_ext.planning.plan import RAYS_OPTION
from f3rm_ext.planning.request import PlanRequest

OUT = Path(__file__).parent / "images" / "planning-curves.png"
CARDS_GIB = (8, 12, 16, 24)
HIGHEST_GIB = 26
LAYERS: dict[str, tuple[Category, ...]] = {
    "parameters": ("parameters", "gradients", "optimizer", "buffers"),
    "images": ("images", "features"),
    "activations": ("activations", "workspace"),
    "other": ("context", "fragmentation"),
}
"""Categories that are drawn as one, by the name of their colour."""
TEXTS = {
    "parameters": "parameters, gradients, moments",
    "images": "windows of images and features",
    "activations": "activations and workspace",
    "other": "CUDA context, fragmentation",
}


def draw(axes: Axes, title: str, unit: str, request_of: Callable[[int], PlanRequest], counts: Sequence[int]) -> None:
    """Draws memory over a number, as far as the cards go."""
    held = [estimate_memory(replace(request_of(count), pictures=False)).device["train"] for count in counts]
    layers = [[sum(one.get(name, 0) for name in names) / GIB for one in held] for names in LAYERS.values()]
    axes.stackplot(
        counts, layers, labels=[TEXTS[name] for name in LAYERS], colors=[COLORS[name] for name in LAYERS], alpha=0.9
    )
    for card in CARDS_GIB:
        axes.axhline(card, color="#334155", linewidth=0.8, linestyle="--")
        axes.text(counts[0], card, f" {card} GiB", ha="left", va="bottom", fontsize=8, color="#334155")
    axes.set(xlim=(counts[0], counts[-1]), ylim=(0, HIGHEST_GIB), ylabel="a training step, GiB", xlabel=unit)
    axes.set_title(title, loc="left", fontsize=11)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} M" if value >= 1e6 else f"{value / 1e3:g} k")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Writes images/planning-curves.png."""
    field = question("f3rm-ext", "", CARDS_GIB[-1], GUIDE)
    splats = question("sugar-ext", "", CARDS_GIB[-1], GARDEN).request()
    figure = Figure(figsize=(11, 4.2), layout="constrained", dpi=110)
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    draw(
        left,
        "f3rm-ext, 100 images of 1024 × 1024",
        "rays per batch",
        lambda rays: field.request(((RAYS_OPTION, str(rays)),)),
        [1024, *range(16_384, 196_608 + 1, 16_384)],
    )
    draw(
        right,
        "sugar-ext, 161 images of 1297 × 840",
        "Gaussians",
        lambda count: replace(splats, gaussians=count),
        np.linspace(100_000, 20_000_000, 11).astype(int).tolist(),
    )
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    canvas.print_png(str(OUT))


if __name__ == "__main__":
    main()
