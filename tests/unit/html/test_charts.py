"""Charts: ticks, geometry and text."""

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from f3rm_ext.html.charts import bar_chart, downsample, line_chart, nice_ticks, number, range_chart, smooth


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (10.3, 27.9), (-3.0, 4.0), (0.0, 900.0), (0.001, 0.0021)])
def test_ticks_are_round_and_enclose_the_range(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-9 and ticks[-1] >= high - 1e-9
    assert 2 <= len(ticks) <= 8
    steps = {round(b - a, 9) for a, b in itertools.pairwise(ticks)}
    assert len(steps) == 1


def test_ticks_of_a_single_value() -> None:
    assert len(nice_ticks(5.0, 5.0)) >= 2


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.1 + 0.2, "0.3"), (9000.0, "9000"), (12000.0, "12k"), (2.5e6, "2.5M")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_line_chart_goes_up_where_values_do() -> None:
    root = ElementTree.fromstring(line_chart([(0.0, 1.0), (5.0, 2.0), (10.0, 4.0)], label="Quality <1>", unit="dB"))
    curve = next(item for item in root if item.get("class") == "curve")
    points = [tuple(map(float, pair.split(","))) for pair in (curve.get("points") or "").split()]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    heights = [y for _, y in points]
    assert heights == sorted(heights, reverse=True), "y runs down in SVG"
    dot = next(item for item in root if item.get("class") == "dot")
    assert (float(dot.get("cx", 0)), float(dot.get("cy", 0))) == points[-1]
    assert root.get("aria-label") == "Quality <1>: from 1 to 4 dB"


@pytest.mark.parametrize("points", [[], [(0.0, 1.0)], [(0.0, 1.0), (1.0, float("nan"))]])
def test_too_few_points_give_no_chart(points: list[tuple[float, float]]) -> None:
    assert line_chart(points, label="x") == ""


def test_bars_are_as_tall_as_their_values() -> None:
    root = ElementTree.fromstring(bar_chart([1.0, 2.0, 4.0], ["a", "b & c", "d"], label="Seen"))
    bars = [item for item in root if item.get("class") == "bar"]
    heights = [float(bar.get("height", 0)) for bar in bars]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.15)
    assert heights[2] == pytest.approx(4 * heights[0], abs=0.3)
    bottoms = {round(float(bar.get("y", 0)) + float(bar.get("height", 0))) for bar in bars}
    assert len(bottoms) == 1
    assert "b & c" in (bars[1][0].text or "")


def test_no_bars_no_chart() -> None:
    assert bar_chart([], [], label="x") == ""


def test_thin_keeps_means() -> None:
    points = [(float(i), float(2 * i)) for i in range(1000)]
    reduced = downsample(points, 100)
    assert len(reduced) == 100 and reduced[0] == (4.5, 9.0)
    assert downsample(points[:5], 100) == points[:5]


def test_smooth_removes_noise_and_keeps_length() -> None:
    points = [(float(i), float(i % 2)) for i in range(200)]
    smoothed = smooth(points, share=0.2)
    assert len(smoothed) == 200 and all(abs(y - 0.5) < 0.1 for _, y in smoothed[20:180])
    assert smooth(points[:3]) == points[:3]


def test_range_chart_places_quartiles_in_order_and_names_the_items() -> None:
    root = ElementTree.fromstring(range_chart([(1.0, 2.0, 4.0), (3.0, 3.0, 3.0)], ["a <b>", "c"], label="Speed"))
    assert root.get("aria-label") == "Speed: medians from 2 to 3"
    dots, lines = ([item for item in root.iter() if item.get("class") == kind] for kind in ("dot", "curve"))
    places = [float(item.get("cx", 0)) for item in dots]
    assert places == sorted(places)
    assert float(lines[0].get("x1", 0)) < places[0] < float(lines[0].get("x2", 0))
    assert lines[1].get("x1") == lines[1].get("x2") == dots[1].get("cx")
    assert "a <b>" in [item.text for item in root.iter()]
    assert range_chart([], [], label="Speed") == ""
