"""Charts: geometry, tooltips, and text as it was given."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from f3rm_ext.html.charts import bar_chart, line_chart, range_chart, smooth

HOSTILE = "a <b> & $x^$ \udcff 字"


def drawn(svg: str) -> ElementTree.Element:
    """The chart, as a page would read it: it refers to nothing outside, and has no rules for the rest of the page."""
    assert not re.search(r"https?:|<style|#0102", svg)
    return ElementTree.fromstring(svg.encode(errors="replace"))


def points(root: ElementTree.Element, color: str = "stroke: var(--accent)") -> list[list[tuple[float, float]]]:
    """The points of each path of a colour."""
    paths = [item.get("d", "") for item in root.iter("path") if color in item.get("style", "")]
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)] for path in paths]


def dots(root: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(item.get("x", 0)), float(item.get("y", 0))) for item in root.iter("use")]


def test_line_chart_goes_up_where_values_do() -> None:
    root = drawn(line_chart([(0.0, 1.0), (5.0, 2.0), (10.0, 4.0)], label="Quality <1>", unit="dB"))
    (curve, *_) = points(root)
    assert len(curve) == 3 and curve == sorted(curve)
    heights = [y for _, y in curve]
    assert heights[0] - heights[1] == pytest.approx((heights[0] - heights[2]) / 3, abs=0.01), "y runs down in SVG"
    assert dots(root) == [curve[-1]]
    assert root.get("aria-label") == "Quality <1>: from 1 to 4 dB"


@pytest.mark.parametrize("values", [[], [(0.0, 1.0)], [(0.0, 1.0), (1.0, float("nan"))]])
def test_too_few_points_give_no_chart(values: list[tuple[float, float]]) -> None:
    assert line_chart(values, label="x") == ""


def test_bars_are_as_tall_as_their_values_and_say_what_they_are() -> None:
    root = drawn(bar_chart([1.0, 2.0, 4.0], [HOSTILE, "b & c", "d"], label="Seen", unit="rays"))
    bars = points(root, "fill: var(--accent)")
    heights = [max(y for _, y in bar) - min(y for _, y in bar) for bar in bars]
    assert heights[1:] == pytest.approx([2 * heights[0], 4 * heights[0]], abs=0.01)
    assert len({max(y for _, y in bar) for bar in bars}) == 1
    tooltips = [item.text for item in root.iter("title")]
    assert tooltips[1:] == ["b & c: 2 rays", "d: 4 rays"] and (tooltips[0] or "").startswith("a <b> & $x^$ ")
    assert bar_chart([], [], label="x") == ""


def test_range_chart_places_quartiles_in_order_and_names_the_items() -> None:
    root = drawn(range_chart([(1.0, 2.0, 4.0), (3.0, 3.0, 3.0)], [HOSTILE, "c" * 30], label="Speed"))
    assert root.get("aria-label") == "Speed: medians from 2 to 3"
    first, second = points(root)[:2]
    (upper, lower) = dots(root)
    assert first[0][0] < upper[0] < first[1][0] and upper[0] < lower[0] and upper[1] < lower[1]
    assert second[0] == second[1] == lower
    texts = [item.text or "" for item in root.iter("text")]
    assert "a <b> & $x^$ ? 字" in texts and "c" * 25 + "…" in texts
    assert range_chart([], [], label="Speed") == ""


def test_smooth_removes_noise_and_keeps_length() -> None:
    noisy = [(float(i), float(i % 2)) for i in range(200)]
    smoothed = smooth(noisy, share=0.2)
    assert [x for x, _ in smoothed] == [x for x, _ in noisy] and all(abs(y - 0.5) < 0.1 for _, y in smoothed[20:180])
    assert smooth(noisy[:3]) == noisy[:3] and smooth([]) == []
    assert smooth([*noisy[:3], (3.0, float("nan")), *noisy[4:6]]) == [*noisy[:3], *noisy[4:6]], "a step without a loss"
