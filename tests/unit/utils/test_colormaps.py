"""Colours of scores and labels."""

import pytest
import torch
from matplotlib import colormaps

from f3rm_ext.query.relevancy import OTHER
from f3rm_ext.utils.colormaps import OTHER_GREY, PALETTE, heat, label_colors, label_hex, label_table, overlay


def test_heat_is_the_color_map_from_end_to_end() -> None:
    score = torch.tensor([0.0, 0.5, 1.0, -3.0, 7.0, float("nan")])
    expected = torch.tensor([colormaps["inferno"](at)[:3] for at in (0, 128, 255, 0, 255, 0)])
    assert torch.allclose(heat(score), expected.float(), atol=1e-6)
    assert heat(torch.zeros(2, 3)).shape == (2, 3, 3)


def test_overlay_is_grey_below_the_threshold_and_hot_from_it_on() -> None:
    rgb = torch.tensor([[0.1, 0.8, 0.2]]).expand(5, 3)
    score = torch.tensor([[0.0], [0.59], [0.6], [0.8], [1.0]])
    shown = overlay(rgb, score, 0.6)
    assert torch.equal(shown[0], shown[1]), "below the threshold nothing depends on the score"
    assert float(shown[0].max() - shown[0].min()) < 0.15, "next to grey"
    redness = (shown[:, 0] - shown[0, 0]).tolist()
    assert redness[2] > 0.1 and redness == sorted(redness)
    assert 0.0 <= float(shown.min()) and float(shown.max()) <= 1.0


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_overlay_at_extreme_thresholds(threshold: float) -> None:
    rgb = torch.full((2, 3), 0.5)
    shown = overlay(rgb, torch.tensor([[0.5], [1.0]]), threshold)
    assert bool(shown.isfinite().all())
    assert torch.equal(shown[0], shown[1]) is False


def test_overlay_takes_colors_outside_their_range() -> None:
    shown = overlay(torch.tensor([[2.0, -1.0, 0.5]]), torch.zeros(1, 1), 0.5)
    assert float(shown.min()) >= 0.0 and float(shown.max()) <= 1.0


def test_labels_have_flat_colors_and_others_are_grey() -> None:
    colors = label_colors(torch.tensor([[0, 1], [OTHER, 1]]), 2)
    assert colors[0, 0].tolist() == pytest.approx([0xE6 / 255, 0x9F / 255, 0.0])
    assert torch.equal(colors[0, 1], colors[1, 1])
    assert colors[1, 0].tolist() == pytest.approx([OTHER_GREY] * 3)


def test_no_label_is_no_color_but_grey() -> None:
    assert label_colors(torch.tensor([OTHER]), 0).tolist()[0] == pytest.approx([OTHER_GREY] * 3)


def test_the_first_hundred_labels_differ() -> None:
    table = label_table(100)
    distances = torch.cdist(table, table) + torch.eye(101)
    assert float(distances.min()) > 0.01
    assert label_hex(0) == PALETTE[0] and len({label_hex(i) for i in range(100)}) == 100
