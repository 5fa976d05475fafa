"""Scored views of a ball that is known exactly."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.capture.frame import CaptureFrame
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.render import heat_ranges, preview_views, score_view, summarize_view, surface_point
from f3rm_ext.query.run import View

FRAME = CaptureFrame(rotation=np.eye(3), translation=np.asarray([1.0, 0.0, 0.0]), scale=0.5)


@pytest.fixture
def ball(make_ball: Callable[..., Any]) -> Any:
    return make_ball()


@pytest.fixture
def views(around: Cameras) -> list[View]:
    return [View(str(i), around[i : i + 1]) for i in range(len(around))]


def halves(ball: Any, negatives: bool = True) -> list[Query]:
    weight = ball.heads["halves"].weight
    sides = [Embeddings.from_full(weight[:, i][None], (name,)) for i, name in enumerate(("upper", "lower"))]
    nothing = Embeddings.empty(5)
    return [
        Query(side.sources[0], "halves", side, other if negatives else nothing) for side, other in (sides, sides[::-1])
    ]


def test_the_best_pixel_is_on_the_right_half_and_its_place_on_the_surface(ball: Any, views: list[View]) -> None:
    # The first camera looks along x, so both halves of the ball are in sight.
    queries = halves(ball)
    scored = score_view(ball, views[0], queries)
    assert scored.scores.shape == (20, 24, 2) and scored.rgb.dtype == np.uint8
    found = summarize_view(scored, queries, 0.5, FRAME)
    for name, sign in (("upper", 1), ("lower", -1)):
        at = np.asarray(found[name]["best_at_scene"])
        assert np.linalg.norm(at) == pytest.approx(0.5, abs=1e-5) and np.sign(at[2]) == sign
        np.testing.assert_allclose(found[name]["best_at_capture"], at / 0.5 - [1, 0, 0], atol=1e-9)
        x, y = found[name]["best_px"]
        assert scored.scores[int(y), int(x), int(name == "lower")] == found[name]["best_score"]
        assert 0.05 < found[name]["fraction_found"] < 0.95


@pytest.mark.parametrize("negatives", [True, False])
def test_pixels_without_features_match_nothing(ball: Any, views: list[View], negatives: bool) -> None:
    queries, threshold = halves(ball, negatives), 0.5 if negatives else 0.0
    scored = score_view(ball, views[0], queries)
    nothing = scored.accumulation == 0
    assert 0.1 < nothing.mean() < 0.9, "pixels beside the ball"
    assert (scored.scores[nothing] < threshold).all() and (scored.labels(threshold)[nothing] == -1).all()
    share = summarize_view(scored, queries, threshold, FRAME)["upper"]["fraction_found"]
    assert 0.05 < share < (~nothing).mean()
    low, high = heat_ranges(ball, views, queries)[0]
    assert low >= 0 and high > low


def test_the_place_of_a_pixel_is_seen_through_its_centre(ball: Any, views: list[View]) -> None:
    scored = score_view(ball, views[5], halves(ball))
    at = surface_point(scored, 9, 12)
    assert at is not None
    # That camera looks down from z = 2; half a pixel right of and above the centre is 1/60 of the depth.
    seen = np.asarray(views[5].camera.camera_to_worlds[0], dtype=float)
    local = seen[:, :3].T @ (at - seen[:, 3])
    np.testing.assert_allclose(local[:2] / -local[2], [0.5 / 30, 0.5 / 30], atol=1e-6)


def test_a_ray_that_meets_nothing_has_neither_place_nor_label(ball: Any, views: list[View]) -> None:
    scored = score_view(ball, views[0], halves(ball))
    assert surface_point(scored, 0, 0) is None
    assert scored.accumulation[0, 0] == 0
    labels = scored.labels(0.6)
    assert labels[0, 0] == -1 and set(np.unique(labels)) == {-1, 0, 1}
    np.testing.assert_array_equal(labels == 0, (scored.scores[..., 0] >= 0.6))


def test_heat_goes_from_one_half_to_the_greatest_score(ball: Any, views: list[View]) -> None:
    queries = halves(ball)
    (low, high), _ = heat_ranges(ball, views, queries)
    best = max(float(score_view(ball, view, queries).scores[..., 0].max()) for view in views)
    assert low == 0.5 and high == pytest.approx(best, abs=1e-3)


def test_heat_of_cosines_begins_at_their_median(ball: Any, views: list[View]) -> None:
    queries = halves(ball, negatives=False)
    seen: list[int] = []
    (low, high), _ = heat_ranges(ball, views, queries, lambda: seen.append(1))
    scored = [score_view(ball, view, queries) for view in views]
    scores = np.concatenate([one.scores[one.accumulation > 0, 0] for one in scored])
    assert low == pytest.approx(float(np.median(scores)), abs=1e-3) and high == pytest.approx(1.0, abs=1e-3)
    assert len(seen) == len(views)


def test_what_is_nowhere_is_nowhere_hot(ball: Any, views: list[View]) -> None:
    sides = Embeddings.from_full(ball.heads["halves"].weight.T, ("upper", "lower"))
    opposite = Embeddings.from_full(-sides.values.sum(0, keepdim=True), ("opposite",))
    ((low, high),) = heat_ranges(ball, views, [Query("nothing", "halves", opposite, sides)])
    assert (low, high) == (0.5, 0.6)


def test_the_range_is_chosen_at_little_cost(ball: Any, around: Cameras) -> None:
    camera = around[:1]
    camera.rescale_output_resolution(10.0)
    views = [View(str(i), camera) for i in range(40)]
    heat_ranges(ball, views, halves(ball))
    assert len(preview_views(views)) == 16 and ball.pixels < 16 * 5000
    assert int(camera.width) == 240
