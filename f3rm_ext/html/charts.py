"""Charts by matplotlib as inline SVG, in the colours of the page's style sheet."""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]

# A browser gets variables of the style sheet in place of these colours, so that charts follow light and dark mode.
SOFT, LINE, ACCENT, WARM = _COLORS = ("#010203", "#010204", "#010205", "#010206")
_VARIABLES = dict(zip(_COLORS, ("var(--soft)", "var(--line)", "var(--accent)", "var(--warm)"), strict=True))
_STYLE = {
    "axes.edgecolor": LINE,
    "axes.grid.axis": "y",
    "axes.grid": True,
    "axes.labelcolor": SOFT,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10.5,
    "grid.color": LINE,
    "svg.fonttype": "none",
    "svg.hashsalt": "f3rm-ext",
    "text.color": SOFT,
    "text.parse_math": False,  # a $ in a name is a $
    "xtick.bottom": False,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "ytick.left": False,
}
_UNWANTED = re.compile(r"""<style.*?</style>| id="[\w.]+_\d+"| xmlns(:\w+)?="[^"]*"|font-family: [^;]*; """, re.DOTALL)
"""Rules that would hold for the whole page, names that are not unique in it, addresses, and fonts."""


def svg_chart(
    draw: Callable[["Axes"], object],
    label: str,
    *,
    width_px: int = 640,
    height_px: int = 220,
    tooltips: Sequence[str] = (),
) -> Markup:
    """Draws a chart.

    Args:
        draw: draws into the axes that it is given. An artist whose ``gid`` is ``tip-3`` gets the fourth tooltip.
        label: description for screen readers.
        width_px: width of the drawing; it scales with the page.
        tooltips: texts that are shown below the pointer.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE), warnings.catch_warnings():  # type: ignore[arg-type]
        # Characters that matplotlib's font lacks are the browser's matter.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure = Figure(figsize=(width_px / 100, height_px / 100), layout="constrained")
        axes = figure.subplots()
        axes.tick_params(length=0)
        axes.set_axisbelow(True)
        draw(axes)
        stream = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", transparent=True, metadata=metadata)
    svg = _UNWANTED.sub("", stream.getvalue().partition("<svg")[2]).replace("xlink:href", "href")
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    for index, text in enumerate(tooltips):
        svg = svg.replace(f'<g id="tip-{index}">', f"<g><title>{escape(text)}</title>")
    return Markup(f'<svg role="img" aria-label="{escape(label)}"{svg}')


def line_chart(points: Points, *, label: str, unit: str = "") -> Markup:
    """Draws a curve, x ascending, and marks its last value. An empty string for fewer than two finite points."""
    points = _finite(points)
    if len(points) < 2:
        return Markup()
    xs, ys = zip(*points, strict=True)

    def draw(axes: "Axes") -> None:
        axes.plot(xs, ys, color=ACCENT, linewidth=2)
        axes.plot(xs[-1], ys[-1], "o", color=ACCENT, markersize=5)
        axes.set_xlabel("step", loc="right")
        axes.margins(x=0.02)

    return svg_chart(draw, f"{label}: from {ys[0]:.3g} to {ys[-1]:.3g} {unit}".strip())


def bar_chart(values: Sequence[float], names: Sequence[str], *, label: str, unit: str = "") -> Markup:
    """Draws a bar of a height ≥ 0 for each item, with name and value as a tooltip. An empty string without items."""
    if not values:
        return Markup()

    def draw(axes: "Axes") -> None:
        for index, bar in enumerate(axes.bar(range(len(values)), values, color=ACCENT)):
            bar.set_gid(f"tip-{index}")
        ends = sorted({0, len(names) - 1})
        axes.set_xticks(ends, [printable(names[index]) for index in ends])
        axes.margins(x=0.01)

    tooltips = [f"{name}: {value:.3g} {unit}" for name, value in zip(names, values, strict=True)]
    text = f"{label}: from {min(values):.3g} to {max(values):.3g} {unit}".strip()
    return svg_chart(draw, text, height_px=160, tooltips=tooltips)


def range_chart(ranges: Sequence[tuple[float, float, float]], names: Sequence[str], *, label: str) -> Markup:
    """Draws a line for each item from its lower to its upper quartile, with a dot at the median, and tooltips.

    ``ranges`` are lower quartile, median and upper quartile, finite. Returns an empty string if there are no items.
    """
    if not ranges:
        return Markup()
    lows, medians, highs = np.array(ranges).T

    def draw(axes: "Axes") -> None:
        rows = range(len(names))
        axes.hlines(rows, lows, highs, color=ACCENT, linewidth=2)
        for row, median in enumerate(medians):
            axes.plot(median, row, "o", color=ACCENT, markersize=7, gid=f"tip-{row}")
        axes.set_yticks(rows, [printable(name if len(name) <= 26 else f"{name[:25]}…") for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        margin = 0.005 * float(np.abs(ranges).max())  # so that differences of a thousandth do not look large
        axes.set_xlim(lows.min() - margin, highs.max() + margin)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)

    tooltips = [
        f"{name}: {median:.4g} ({low:.4g}–{high:.4g})" for name, (low, median, high) in zip(names, ranges, strict=True)
    ]
    text = f"{label}: medians from {medians.min():.4g} to {medians.max():.4g}"
    return svg_chart(draw, text, height_px=60 + 26 * len(names), tooltips=tooltips)


def smooth(points: Points, share: float = 0.04) -> Points:
    """Returns the running mean of a curve's finite points, over a window that spans a share of them."""
    from scipy.ndimage import uniform_filter1d

    points = _finite(points)
    width = 2 * int(len(points) * share / 2) + 1
    ys = uniform_filter1d([y for _, y in points], width, mode="nearest").tolist() if points else []
    return [(x, y) for (x, _), y in zip(points, ys, strict=True)]


def _finite(points: Points) -> Points:
    return [point for point in points if np.isfinite(point).all()]


def printable(name: str) -> str:
    """Returns a name that matplotlib can lay out; bytes of a file name that are no text become question marks."""
    return name.encode(errors="replace").decode()
