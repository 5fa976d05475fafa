"""Colours of scores, depth and labels."""

import numpy as np
import pytest
import torch
from matplotlib import colormaps

from f3rm_ext.query.relevancy import OTHER
from f3rm_ext.utils.colormaps import (
    DIMMED_MID_GREY,
    OTHER_GREY,
    PALETTE,
    depth_colors_bytes,
    dim,
    heat_overlay,
    heat_overlay_bytes,
    heat_scale_bytes,
    heat_stops,
    label_colors,
    label_hex,
    label_overlay_bytes,
    label_table,
    label_table_bytes,
)
from f3rm_ext.utils.pictures import to_bytes


def test_heat_is_dimmed_grey_below_its_range_and_hotter_up_to_its_end() -> None:
    rgb = torch.tensor([[0.1, 0.8, 0.2]]).expand(7, 3)
    shown = heat_overlay(rgb, torch.tensor([float("nan"), 0.0, 0.59, 0.6, 0.8, 0.9, 7.0]), 0.6, 0.9)
    assert torch.equal(shown[:3], dim(rgb)[:3]), "below the range nothing depends on the score"
    assert float(shown[0].max() - shown[0].min()) < 0.15, "next to grey"
    redness = (shown[2:, 0] - shown[0, 0]).tolist()
    assert redness[1] > 0.1 and redness == sorted(redness)
    assert torch.allclose(shown[5], shown[6]), "above the range it is as hot as can be"
    assert 0.0 <= float(shown.min()) and float(shown.max()) <= 1.0


def test_heat_is_a_part_of_inferno() -> None:
    """Over black the picture adds nothing, so that colour and opacity can be read."""
    shown = heat_overlay(torch.zeros(2, 3), torch.tensor([0.0, 1.0]), 0.0, 1.0)
    ends = torch.tensor([colormaps["inferno"](at)[:3] for at in (round(0.35 * 255), round(0.85 * 255))])
    assert torch.allclose(shown, torch.tensor([[0.5], [0.8]]) * ends.float(), atol=1e-5)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 1.0), (0.5, 0.5)])
def test_heat_at_extreme_ranges(low: float, high: float) -> None:
    shown = heat_overlay(torch.full((2, 3), 0.5), torch.tensor([0.49, 1.0]), low, high)
    assert bool(shown.isfinite().all())
    assert torch.equal(shown[0], shown[1]) is False
    wild = heat_overlay(torch.tensor([[2.0, -1.0, 0.5]]), torch.zeros(1), low, 1.0)
    assert float(wild.min()) >= 0.0 and float(wild.max()) <= 1.0


def test_a_score_has_the_same_color_in_a_file_and_in_the_viewer() -> None:
    """The viewer colours rays, a file whole images; the query panel passes (threshold, 1)."""
    rng = np.random.default_rng(0)
    picture, score = rng.integers(0, 256, (6, 5, 3), dtype=np.uint8), rng.random((6, 5), dtype=np.float32)
    rays = heat_overlay(torch.tensor(picture).reshape(-1, 3) / 255.0, torch.tensor(score).reshape(-1), 0.4, 1.0)
    shown = heat_overlay_bytes(picture, score, 0.4, 1.0)
    np.testing.assert_array_equal(shown.reshape(-1, 3), to_bytes(rays.numpy()))


def test_scale_bars_and_legends_show_the_colors_of_the_overlay() -> None:
    grey = np.full((1, 11, 3), 128, np.uint8)
    shown = heat_overlay_bytes(grey, np.linspace(0.5, 0.9, 11, dtype=np.float32)[None], 0.5, 0.9)[0]
    assert np.abs(shown.astype(int) - heat_scale_bytes(11)).max() <= 1
    assert len(set(heat_stops(5))) == 5


def test_depth_spans_its_range() -> None:
    depth = np.array([[-5.0, 1.0, 3.0, 9.0, np.nan, 2.0]])
    colors = depth_colors_bytes(depth, 1.0, 3.0)
    first, last = (np.rint(np.array(colormaps["turbo"](end)[:3]) * 255) for end in (0.0, 1.0))
    np.testing.assert_array_equal(colors[0, [0, 1, 4]], [first] * 3)
    np.testing.assert_array_equal(colors[0, [2, 3]], [last] * 2)
    np.testing.assert_array_equal(colors[0, 5], np.rint(np.array(colormaps["turbo"](128)[:3]) * 255))
    assert depth_colors_bytes(np.ones((2, 2)), 1.0, 1.0).shape == (2, 2, 3), "an empty range divides by nothing"


def test_labels_have_flat_colors_and_others_are_grey() -> None:
    colors = label_colors(torch.tensor([[0, 1], [OTHER, 1]]), 2)
    assert colors[0, 0].tolist() == pytest.approx([0xE6 / 255, 0x9F / 255, 0.0])
    assert torch.equal(colors[0, 1], colors[1, 1])
    assert colors[1, 0].tolist() == pytest.approx([OTHER_GREY] * 3)
    assert label_colors(torch.tensor([OTHER]), 0).tolist()[0] == pytest.approx([OTHER_GREY] * 3)


def test_the_first_hundred_labels_differ() -> None:
    table = label_table(100)
    distances = torch.cdist(table, table) + torch.eye(101)
    assert float(distances.min()) > 0.01
    legend = [label_hex(i) for i in range(100)]
    assert legend[0] == PALETTE[0] and len(set(legend)) == 100
    assert ["#" + bytes(color.tolist()).hex() for color in label_table_bytes(100)] == legend


def test_label_pictures_show_the_palette_and_dim_the_rest() -> None:
    labels = np.array([[0, 1, OTHER]])
    shown = label_overlay_bytes(np.full((1, 3, 3), 128, np.uint8), labels, 2)[0].astype(int)
    for tint, color in zip(shown, label_table_bytes(2), strict=False):
        assert np.abs(tint - (0.35 * 128 + 0.65 * color)).max() <= 1
    assert tuple(shown[2]) == DIMMED_MID_GREY
