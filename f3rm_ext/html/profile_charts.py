"""The charts of a tensor profile: SVG for the page, and all of them in one PNG."""

import json
from collections.abc import Callable
from io import BufferedIOBase
from typing import TYPE_CHECKING

from markupsafe import Markup

from f3rm_ext.html.charts import svg_chart
from f3rm_ext.profiling.census import CATEGORIES
from f3rm_ext.profiling.memory import MIB
from f3rm_ext.profiling.profile_file import Profile
from f3rm_ext.utils.provenance import MADE_BY, PNG_KEY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMAND = "f3rm-ext profile"
COLORS = {
    "parameters": "#0f766e",
    "gradients": "#5eb0a8",
    "optimizer": "#1d4e89",
    "buffers": "#7fa6d6",
    "images": "#b45309",
    "features": "#e0a458",
    "other": "#9aa6b2",
    "activations": "#8b5c8f",
}
"""Colours of the categories, which show on white and on the page's dark background."""
_PHASE_COLORS = {
    "train": "#0f9d92",
    "densify": "#4f86c6",
    "finish": "#7a9a3a",
    "evaluation": "#d07a25",
    "viewer": "#a877ad",
}
_OTHER = "#9aa6b2"


def charts(profile: Profile) -> list[tuple[str, Callable[["Axes"], None]]]:
    """Returns the title of each chart, and a function that draws it."""

    def tensors(axes: "Axes") -> None:
        steps = [one.step for one in profile.snapshots]
        sizes = [{**one.categories, "activations": one.activations} for one in profile.snapshots]
        names = [*used_categories(profile), "activations"]
        layers = [[one[name] / MIB for one in sizes] for name in names]
        if len(steps) == 1:  # an area needs two points
            steps, layers = [steps[0] - 0.5, steps[0] + 0.5], [[*layer, *layer] for layer in layers]
        axes.stackplot(steps, layers, labels=names, colors=[COLORS[name] for name in names])
        _finish(axes, "MiB")

    def peaks(axes: "Axes") -> None:
        for phase in profile.peaks():
            steps, sizes = zip(
                *((one.step, one.phases[phase]["tensors"] / MIB) for one in profile.snapshots if phase in one.phases),
                strict=True,
            )
            axes.plot(steps, sizes, "o-", markersize=4, label=phase, color=_PHASE_COLORS.get(phase, _OTHER))
        if on_gpu:
            steps, sizes = zip(*((one.step, (one.reserved or 0) / MIB) for one in profile.snapshots), strict=True)
            axes.plot(steps, sizes, "--", color=_OTHER, label="reserved")
        axes.set_ylim(bottom=0)
        _finish(axes, "MiB")

    def fragmentation(axes: "Axes") -> None:
        steps, shares = zip(*((one.step, one.fragmentation_percent) for one in profile.snapshots), strict=True)
        axes.plot(steps, shares, "o-", markersize=4, color=_OTHER)
        axes.set_ylim(bottom=0)
        _finish(axes, "%")

    on_gpu = profile.snapshots[-1].reserved is not None
    shown = [
        ("Tensors by category", tensors),
        ("Peaks by phase, of " + ("tensors" if profile.device == "cuda" else "the process"), peaks),
    ]
    return [*shown, ("Fragmentation: gaps in reserved memory", fragmentation)] if on_gpu else shown


def svg_charts(profile: Profile) -> list[tuple[str, Markup]]:
    """Returns the title of each chart, and its drawing for a page."""
    return [(title, svg_chart(draw, title, height_px=300)) for title, draw in charts(profile)]


def write_picture(profile: Profile, other: Profile | None, stream: BufferedIOBase) -> None:
    """Draws the charts as one PNG; those of another run, to compare with, in a second row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [profile] if other is None else [profile, other]
    columns = max(len(charts(one)) for one in shown)
    figure = Figure(figsize=(6 * columns, 4.6 * len(shown)), layout="constrained", dpi=110)
    rows = figure.subplots(len(shown), columns, sharey="col", squeeze=False)
    for row, one in zip(rows, shown, strict=True):
        for axes, (title, draw) in zip(row, charts(one), strict=False):
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_axisbelow(True)
            axes.grid(axis="y", alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            draw(axes)
        row[0].set_title(f"Tensors by category, {one.start.get('method', 'run')}", loc="left", fontsize=11)
    FigureCanvasAgg(figure).print_png(stream, metadata={PNG_KEY: json.dumps({MADE_BY: COMMAND})})


def used_categories(profile: Profile) -> list[str]:
    """Returns the categories that hold anything, those that last longest first."""
    return [name for name in CATEGORIES if any(one.categories.get(name) for one in profile.snapshots)]


def _finish(axes: "Axes", unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = axes.get_legend_handles_labels()
    if handles:  # from top to bottom as the layers lie
        axes.legend(
            handles[::-1], labels[::-1], fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False
        )
