"""The charts of a tensor profile as one picture."""

import json
from io import BufferedIOBase

from f3rm_ext.profiling.census import CATEGORIES
from f3rm_ext.profiling.memory import MIB
from f3rm_ext.profiling.profile_file import Profile
from f3rm_ext.utils.provenance import MADE_BY, PNG_KEY

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
"""Of the categories, here and on the page."""
_PHASE_COLORS = {"train": "#0f766e", "densify": "#1d4e89", "evaluation": "#b45309", "viewer": "#8b5c8f"}
_OTHER = "#9aa6b2"


def write_picture(profile: Profile, other: Profile | None, stream: BufferedIOBase) -> None:
    """Draws tensors by category, and peaks by phase, over steps, as PNG.

    Args:
        profile: of the run.
        other: of a run to compare with, in a second row.
        stream: to write to.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [profile] if other is None else [profile, other]
    figure = Figure(figsize=(12, 4.6 * len(shown)), layout="constrained", dpi=110)
    canvas = FigureCanvasAgg(figure)
    rows = figure.subplots(len(shown), 2, sharey="col", squeeze=False)
    for (tensors, peaks), one in zip(rows, shown, strict=True):
        _draw_tensors(tensors, one)
        _draw_peaks(peaks, one)
    canvas.print_png(stream, metadata={PNG_KEY: json.dumps({MADE_BY: COMMAND})})


def used_categories(profile: Profile) -> list[str]:
    """Returns the categories that hold anything, those that last longest first."""
    return [name for name in CATEGORIES if any(one.categories.get(name) for one in profile.snapshots)]


def _draw_tensors(axes: object, profile: Profile) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    steps = [one.step for one in profile.snapshots]
    names = used_categories(profile)
    layers = [[one.categories[name] / MIB for one in profile.snapshots] for name in names]
    layers.append([one.activations / MIB for one in profile.snapshots])
    names = [*names, "activations"]
    if len(steps) == 1:  # an area needs two points
        steps, layers = [steps[0] - 0.5, steps[0] + 0.5], [[*layer, *layer] for layer in layers]
    axes.stackplot(steps, layers, labels=names, colors=[COLORS[name] for name in names])
    _finish(axes, f"Tensors by category, {profile.start.get('method', 'run')}")


def _draw_peaks(axes: object, profile: Profile) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    for phase in profile.peaks():
        points = [(one.step, one.phases[phase]["tensors"] / MIB) for one in profile.snapshots if phase in one.phases]
        axes.plot(
            *zip(*points, strict=True), marker="o", markersize=4, label=phase, color=_PHASE_COLORS.get(phase, _OTHER)
        )
    last = profile.snapshots[-1]
    if last.reserved is not None:
        steps = [one.step for one in profile.snapshots]
        axes.plot(steps, [(one.reserved or 0) / MIB for one in profile.snapshots], "--", color=_OTHER, label="reserved")
    axes.set_ylim(bottom=0)
    _finish(axes, "Peaks by phase, of " + ("tensors" if profile.device == "cuda" else "the process"))


def _finish(axes: object, title: str) -> None:
    from matplotlib.axes import Axes
    from matplotlib.ticker import MaxNLocator

    assert isinstance(axes, Axes)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel("MiB")
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    order = slice(None, None, -1)  # as the layers lie
    axes.legend(handles[order], labels[order], fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
