"""Pictures of results."""

from pathlib import Path

import matplotlib.font_manager
import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen

from f3rm_ext.query import visualization
from f3rm_ext.utils.colormaps import label_table_bytes

GREY = np.full((60, 90, 3), 120, dtype=np.uint8)


def test_a_legend_has_a_line_for_what_does_not_fit() -> None:
    short = visualization.add_legend(GREY, ["a"], 0.5)
    long = visualization.add_legend(GREY, ["a long name"] * 6, 0.5)
    np.testing.assert_array_equal(short[:60], GREY)
    assert short.shape[1] == long.shape[1] == 90 and long.shape[0] > short.shape[0] > 60
    assert (short[60:] == label_table_bytes(1)[0]).all(axis=2).sum() > 50


def test_long_names_are_shortened_to_the_picture() -> None:
    picture = np.zeros((4, visualization.LEGEND_PX, 3), np.uint8)
    long, longer = (visualization.add_legend(picture, ["mug", "a" * count], 0.5)[4:] for count in (60, 600))
    assert (long[:, -2:] == 255).all(), "nothing is cut off"
    np.testing.assert_array_equal(long, longer)


def test_letters_that_the_usual_font_lacks_are_drawn_with_one_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A font of one Chinese letter, a bar as high as the line, among files that are no fonts."""
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for corner in ((0, 900), (900, 900), (900, 0)):
        pen.lineTo(corner)
    pen.closePath()
    builder = FontBuilder(1000)
    builder.setupGlyphOrder([".notdef", "cat"])
    builder.setupCharacterMap({ord("猫"): "cat"})
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "cat": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (1000, 0), "cat": (1000, 0)})
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupPost()
    builder.save(tmp_path / "cat.ttf")
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    monkeypatch.setattr(matplotlib.font_manager, "findSystemFonts", lambda: [*map(str, tmp_path.iterdir())])
    sheet = visualization.Overview(["猫"], [None], views=1)
    sheet.add(0, "v", [np.full((300, 300, 3), 255, np.uint8)])
    title = sheet.draw([])[:20]
    assert (title < 100).all(axis=2).sum() > 100, "a bar, not the outline of a box"
    visualization.add_legend(GREY, ["mug", "猫" * 50], 0.5)


def test_an_overview_shows_some_views_whole() -> None:
    sheet = visualization.Overview(["photo", "mug"], [None, (0.5, 0.9)], views=100)
    for number in range(100):
        sheet.add(number, f"view {number}", [GREY, np.full((75, 90, 3), number, dtype=np.uint8)])
    assert [name for name, _ in sheet.rows] == [f"view {n}" for n in (0, 20, 40, 59, 79, 99)]
    drawn = sheet.draw(["from here", "x" * 500])
    for number in (20, 99):
        assert (drawn == number).all(axis=2).sum() >= 60 * 90


def test_an_overview_of_one_small_view_and_many_queries() -> None:
    titles = ["photo", *(f"query {i}" for i in range(12))]
    sheet = visualization.Overview(titles, [None] * 13, views=1)
    sheet.add(0, "v", [GREY] * 13)
    _, pictures = sheet.rows[0]
    assert len(pictures) == 8 and sheet.left_out == 5
    assert pictures[0].shape[1] > 90
    assert sheet.draw([]).shape[1] >= 8 * 90


def test_pictures_at_another_size() -> None:
    assert visualization.resize(GREY, 60, 90) is GREY
    assert visualization.resize(GREY, 30, 20).shape == (30, 20, 3)
