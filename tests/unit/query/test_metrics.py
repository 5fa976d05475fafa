"""Metrics against masks counted by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from f3rm_ext.query.metrics import PINNED_THRESHOLD, THRESHOLDS, QueryMetrics, bootstrap_interval

Box = tuple[float, float, float, float]


def grid(*rows: str) -> torch.Tensor:
    """A mask from rows of dots and hashes."""
    return torch.tensor([[letter == "#" for letter in row] for row in rows])


def scores(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


def count(score: torch.Tensor, mask: torch.Tensor, *boxes: list[Box], threshold: float = 0.5) -> dict[str, Any]:
    """The summary of one pair."""
    metrics = QueryMetrics(threshold)
    metrics.add("cup", score, mask, *boxes)
    return metrics.summary()


def test_counted_by_hand() -> None:
    assert QueryMetrics().threshold == PINNED_THRESHOLD == 0.5
    # Found at 0.5: 3 pixels, 2 of them on the object of 4; union 5.
    found = count(scores([0.9, 0.5, 0.1, 0.0], [0.4, 0.2, 0.6, 0.0]), grid("##..", "##.."))
    assert (found["pairs"], found["localisation"], found["threshold"]) == (1, 1.0, 0.5)
    assert found["miou"] == pytest.approx(2 / 5) and found["macc"] == pytest.approx(2 / 4)
    assert found["iou_above_25"] == 1.0
    # From 0.105 to 0.2 all four and one other are found: 4 / 5, the best there is.
    assert found["best_miou"] == pytest.approx(4 / 5) and found["best_macc"] == 1.0
    assert 0.1 < found["best_threshold"] <= 0.2


def test_pinned_and_best_thresholds_are_never_mixed() -> None:
    """All scores are low: nothing is found at the fixed threshold, everything at the best one."""
    found = count(scores([0.2, 0.2, -0.3]), grid("##."))
    assert (found["miou"], found["macc"], found["iou_above_25"], found["threshold"]) == (0.0, 0.0, 0.0, 0.5)
    assert (found["best_miou"], found["best_macc"]) == (1.0, 1.0)


def test_the_best_threshold_is_one_for_all_pairs() -> None:
    metrics = QueryMetrics()
    metrics.add("low", scores([0.2, 0.1, 0.1, 0.1]), grid("#..."))  # IoU 1 above 0.1, ¼ at or below, 0 above 0.2
    metrics.add("high", scores([0.9, 0.8, 0.8, 0.8]), grid("#..."))  # IoU 1 above 0.8, ¼ below
    found, classes = metrics.summary(), metrics.summarize_classes()
    # Either 0.1..0.2 (1 + ¼) or 0.8..0.9 (0 + 1): the former is better.
    assert found["best_miou"] == pytest.approx((1 + 0.25) / 2) and 0.1 < found["best_threshold"] <= 0.2
    assert classes["low"]["best_miou"] == 1.0 and classes["high"]["best_miou"] == 0.25
    assert classes["low"]["best_threshold"] == classes["high"]["best_threshold"] == found["best_threshold"]


def test_all_pairs_count_alike_whatever_their_size() -> None:
    metrics = QueryMetrics()
    metrics.add("small", scores([0.9, 0.0, 0.0]), grid("#.."))
    for _ in range(2):
        metrics.add("large", torch.zeros(100, 100), torch.ones(100, 100, dtype=torch.bool))
    assert metrics.summary()["miou"] == pytest.approx(1 / 3) and len(metrics) == 3
    classes = metrics.summarize_classes()
    assert list(classes) == ["small", "large"]
    assert [classes[name]["pairs"] for name in classes] == [1, 2]
    assert classes["small"]["miou"] == 1.0 and classes["large"]["miou"] == 0.0


@pytest.mark.parametrize(
    ("boxes", "hit"),
    [
        ([(2.0, 1.0, 3.0, 2.0)], True),  # exactly the pixel in column 2, row 1
        ([(2.5, 1.5, 3.0, 2.0)], True),  # its centre is on the corner
        ([(2.6, 1.0, 3.0, 2.0)], False),
        ([(2.0, 1.0, 2.4, 2.0)], False),
        ([(2.0, 1.6, 3.0, 2.0)], False),
        ([(0.0, 0.0, 1.0, 1.0), (2.0, 1.0, 3.0, 2.0)], True),  # the second of two objects
        ([(1.0, 2.0, 2.0, 3.0)], False),  # row and column swapped
        ([], False),
    ],
)
def test_the_centre_of_the_best_pixel_has_to_lie_in_a_box(boxes: list[Box], hit: bool) -> None:
    score = torch.zeros(4, 5)
    score[1, 2] = 0.9
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[3, 3] = True
    assert count(score, mask, boxes)["localisation"] == float(hit)


def test_without_boxes_the_best_pixel_has_to_lie_in_the_mask() -> None:
    score = torch.zeros(4, 5)
    score[1, 2] = 0.9
    for place, hit in (((1, 2), 1.0), ((2, 1), 0.0)):
        mask = torch.zeros(4, 5, dtype=torch.bool)
        mask[place] = True
        assert count(score, mask)["localisation"] == hit
    points = count(torch.tensor([0.1, 0.9, 0.7]), torch.tensor([False, True, True]))
    assert points["miou"] == points["localisation"] == 1.0


def test_all_thresholds_are_counted_exactly() -> None:
    """The counts for all thresholds at once against one comparison each."""
    generator = np.random.default_rng(3)
    # Some values are thresholds themselves.
    score = np.concatenate([generator.uniform(-1, 1, 300), THRESHOLDS[::40]]).astype(np.float32)
    mask = generator.random(len(score)) < 0.3
    ious = []
    for threshold in THRESHOLDS:
        found = score.astype(np.float64) >= threshold
        ious.append((found & mask).sum() / max(1, (found | mask).sum()))
    summary = count(torch.from_numpy(score), torch.from_numpy(mask))
    assert summary["best_miou"] == pytest.approx(max(ious))
    assert summary["best_threshold"] == THRESHOLDS[int(np.argmax(ious))]


def test_intervals_of_means_come_from_whole_draws() -> None:
    """Two draws, one always right and one always wrong: a resample holds 0, 1 or 2 right ones."""
    metrics, mask = QueryMetrics(), grid("#.")
    for draw in (0, 1):
        for _ in range(50):
            metrics.add("cup", scores([1.0 - draw, float(draw)]), mask, draw=draw)
    found = metrics.summary()
    assert found["draws"] == 2 and found["miou"] == 0.5
    assert found["intervals"]["miou"] == found["intervals"]["localisation"] == (0.0, 1.0)
    generator = np.random.default_rng(1)
    values, draws = generator.normal(size=400), np.arange(400)
    low, high = bootstrap_interval(values, draws.tolist())
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.02) and high == pytest.approx(
        values.mean() + half, abs=0.02
    )
    single = count(scores([1.0, 0.0]), mask)
    assert "intervals" not in single and single["draws"] == 1


def test_no_pairs() -> None:
    metrics = QueryMetrics()
    assert metrics.summary() == {"pairs": 0} and metrics.summarize_classes() == {} and len(metrics) == 0


def test_scores_that_are_no_numbers_are_never_found() -> None:
    found = count(scores([float("nan"), 0.9, 0.1]), grid(".#."), threshold=-1.0)
    assert found["localisation"] == 1.0 and found["best_miou"] == 1.0
    assert found["miou"] == pytest.approx(1 / 3), "at −1 everything is found, as for a score of −1"
