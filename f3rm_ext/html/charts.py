"""Small charts as inline SVG. The page's style sheet colours them, so they follow its light and dark modes."""

import math
from collections.abc import Sequence
from html import escape

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 640, 46, 12, 10, 30

Points = Sequence[tuple[float, float]]


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Returns about ``count`` round numbers that cover the range from ``low`` to ``high``.

    >>> nice_ticks(0.3, 9.2)
    [0.0, 2.5, 5.0, 7.5, 10.0]
    """
    span = max(high - low, 1e-9)
    raw = span / max(1, count)
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Formats a number for an axis.

    >>> number(25000.0), number(0.5)
    ('25k', '0.5')
    """
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.6g}"


def line_chart(points: Points, *, label: str, unit: str = "", height: int = 220, x_label: str = "step") -> str:
    """Draws a curve over steps and marks its last value. Returns an empty string for fewer than two finite points.

    Args:
        points: (x, y), x ascending.
        label: description of the chart for screen readers.
        unit: unit of y.
        height: height of the drawing in SVG units; the drawing scales with the page.
        x_label: label of the x axis.
    """
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(points) < 2:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    ticks = nice_ticks(min(ys), max(ys))
    low, high = ticks[0], ticks[-1]
    x_low, x_high = xs[0], max(xs[-1], xs[0] + 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (high - y) / (high - low) * (height - TOP - BOTTOM)

    parts = [_open(height, f"{label}: from {ys[0]:.3g} to {ys[-1]:.3g} {unit}".strip())]
    for tick in ticks:
        _, y = place(x_low, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in nice_ticks(x_low, x_high):
        if x_low <= tick <= x_high:
            x, _ = place(tick, low)
            parts.append(f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{number(tick)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height}" text-anchor="end">{escape(x_label)}</text>')
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    parts.append(f'<polyline class="curve" points="{path}"/>')
    x, y = place(*points[-1])
    parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/></svg>')
    return "".join(parts)


def bar_chart(values: Sequence[float], names: Sequence[str], *, label: str, unit: str = "", height: int = 160) -> str:
    """Draws one bar per item, with its name and value as a tooltip. Returns an empty string if there are no items.

    Args:
        values: heights, ≥ 0.
        names: names of the items.
        label: description of the chart for screen readers.
        unit: unit of the values.
        height: height of the drawing in SVG units.
    """
    if not values:
        return ""
    ticks = nice_ticks(0.0, max([1e-9, *values]), 3)
    top = ticks[-1]
    room, base = WIDTH - LEFT - RIGHT, height - BOTTOM
    step = room / len(values)
    parts = [_open(height, f"{label}: from {min(values):.3g} to {max(values):.3g} {unit}".strip())]
    for tick in ticks:
        y = base - tick / top * (base - TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for index, (value, name) in enumerate(zip(values, names, strict=True)):
        tall = value / top * (base - TOP)
        parts.append(
            f'<rect class="bar" x="{LEFT + index * step + step * 0.1:.1f}" y="{base - tall:.1f}" '
            f'width="{step * 0.8:.1f}" height="{tall:.1f}" rx="1.5">'
            f"<title>{escape(name)}: {value:.3g} {escape(unit)}</title></rect>"
        )
    parts.append(f'<text x="{LEFT}" y="{height - 10}">{escape(names[0])}</text>')
    if len(names) > 1:
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 10}" text-anchor="end">{escape(names[-1])}</text>')
    return "".join(parts) + "</svg>"


def range_chart(
    ranges: Sequence[tuple[float, float, float]], names: Sequence[str], *, label: str, unit: str = ""
) -> str:
    """Draws a line per item from its lower to its upper quartile, with a dot at the median and its name on the left.

    Returns an empty string if there are no items.

    Args:
        ranges: lower quartile, median and upper quartile of each item, finite.
        names: names of the items.
        label: description of the chart for screen readers.
        unit: unit of the values.
    """
    if not ranges:
        return ""
    low, high = min(low for low, _, _ in ranges), max(high for _, _, high in ranges)
    margin = 0.005 * max(abs(low), abs(high))  # so that differences of a thousandth do not look large
    ticks = nice_ticks(low - margin, high + margin)
    left, row = 200, 26
    height = TOP + row * len(ranges) + BOTTOM
    room = WIDTH - left - 3 * RIGHT

    def across(value: float) -> float:
        return left + (value - ticks[0]) / (ticks[-1] - ticks[0]) * room

    medians = [middle for _, middle, _ in ranges]
    parts = [_open(height, f"{label}: medians from {min(medians):.4g} to {max(medians):.4g} {unit}".strip())]
    for tick in ticks:
        x = across(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{number(tick)}</text>')
    for index, ((low, middle, high), name) in enumerate(zip(ranges, names, strict=True)):
        y = TOP + row * (index + 0.5)
        shown = name if len(name) <= 26 else f"{name[:25]}…"
        parts.append(
            f"<g><title>{escape(name)}: {middle:.4g} ({low:.4g}–{high:.4g}) {escape(unit)}</title>"
            f'<text x="{left - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(shown)}</text>'
            f'<line class="curve" x1="{across(low):.1f}" x2="{across(high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<circle class="dot" cx="{across(middle):.1f}" cy="{y:.1f}" r="4.5"/></g>'
        )
    return "".join(parts) + "</svg>"


def downsample(points: Points, most: int = 240) -> list[tuple[float, float]]:
    """Reduces a curve to at most ``most`` points by averaging groups of neighbours."""
    group = max(1, -(-len(points) // most))
    parts = [points[start : start + group] for start in range(0, len(points), group)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def smooth(points: Points, share: float = 0.04) -> list[tuple[float, float]]:
    """Returns the running mean of a curve, over a window that spans a share of its points."""
    reach = max(0, int(len(points) * share / 2))
    out = []
    for index, (x, _) in enumerate(points):
        around = points[max(0, index - reach) : index + reach + 1]
        out.append((x, sum(y for _, y in around) / len(around)))
    return out


def _open(height: int, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height + 4}" role="img" aria-label="{escape(label)}">'
