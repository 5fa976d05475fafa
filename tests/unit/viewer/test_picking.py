"""What a click hits, and colours that suit a view."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox

from f3rm_ext.errors import ConfigError
from f3rm_ext.features.space import FeatureSpace
from f3rm_ext.viewer.picking import (
    FIT_RAYS,
    Ray,
    Viewpoint,
    camera_along,
    fit_displays,
    not_training,
    pick_feature,
)


@pytest.mark.parametrize("direction", [(0.0, 0.0, -1.0), (0.0, 1.0, 0.0), (3.0, -4.0, 12.0), (-1.0, 0.0, 0.0)])
def test_a_camera_of_one_pixel_sees_the_ray(direction: tuple[float, float, float]) -> None:
    camera = camera_along(Ray((1.0, 2.0, 3.0), direction))
    rays = camera.generate_rays(camera_indices=0, keep_shape=True)
    assert rays.shape == (1, 1)
    assert rays.origins[0, 0].tolist() == [1.0, 2.0, 3.0]
    expected = np.asarray(direction) / np.linalg.norm(direction)
    assert rays.directions[0, 0].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    pose = camera.camera_to_worlds[0, :, :3]
    assert torch.allclose(pose.T @ pose, torch.eye(3), atol=1e-6) and float(torch.linalg.det(pose)) > 0


def test_a_click_takes_the_feature_it_hits_and_says_where(toy: Any) -> None:
    head = toy.query_heads()["toy"]
    vectors, place = pick_feature(toy, head, Ray((1.0, 0.0, 0.0), (3.0, 0.0, -4.0)), "here", obb_box=None)
    assert vectors.sources == ("here",)
    expected = torch.tensor([1.0, 0.1, 0.0]) / 1.01**0.5
    assert torch.allclose(vectors.values[0], expected, atol=1e-6)
    assert place == pytest.approx((1.0 + 2 * 0.6, 0.0, -1.6))


def test_a_click_on_codes_knows_how_much_they_leave_out(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head = toy.query_heads()["toy"]
    monkeypatch.setattr(head, "space", lambda: FeatureSpace.of_features(energy=0.64))
    vectors, _ = pick_feature(toy, head, Ray((0.0, 0.0, 0.0), (1.0, 0.0, -1.0)), "here")
    assert float(vectors.values.norm()) == pytest.approx(0.8, abs=1e-6)


def test_the_model_does_not_train_while_it_is_looked_at_and_does_afterwards(toy: Any) -> None:
    toy.train()
    pick_feature(toy, toy.query_heads()["toy"], Ray((0.0, 0.0, 0.0), (1.0, 0.0, -1.0)), "here")
    assert toy.was_training == [False] and toy.training
    with pytest.raises(ZeroDivisionError), not_training(toy):
        assert not toy.training
        raise ZeroDivisionError
    assert toy.training
    toy.eval()
    with not_training(toy):
        pass
    assert not toy.training


def test_colors_are_fitted_to_what_a_view_shows(toy: Any, make_camera: Callable[[int], Cameras]) -> None:
    camera = make_camera(200)
    (basis,) = fit_displays(toy, Viewpoint(camera, None)).values()
    assert (int(camera.height), int(camera.width)) == (200, 200), "the page's own camera is as before"
    # Mug and book are what differs: their difference is the first direction, and they lie at its ends.
    first = basis.components[0]
    mug, book = torch.tensor([1.0, 0.1, 0.0]), torch.tensor([0.1, 1.0, 0.0])
    assert float((first @ (mug - book)).abs() / (mug - book).norm()) == pytest.approx(1.0, abs=1e-5)
    ends = [float((first @ (thing - basis.mean) - basis.low[0]) / (basis.high - basis.low)[0]) for thing in (mug, book)]
    assert sorted(ends) == pytest.approx([0.0, 1.0], abs=1e-4)


def test_views_are_rendered_small_and_cropped_as_the_page_is(toy: Any, make_camera: Callable[[int], Cameras]) -> None:
    seen: list[int] = []
    render = toy.render

    def count(directions: torch.Tensor, extra: Any) -> Any:
        seen.append(len(directions))
        return render(directions, extra)

    toy.render = count
    box = OrientedBox(torch.eye(3), torch.zeros(3), torch.ones(3))
    fit_displays(toy, Viewpoint(make_camera(300), box))
    assert toy.boxes == [box]
    assert 0.9 * FIT_RAYS <= seen[0] <= 1.1 * FIT_RAYS


def test_no_colors_are_fitted_to_nothing(toy: Any, make_camera: Callable[[int], Cameras]) -> None:
    camera = make_camera(20)
    camera.camera_to_worlds[0, :, :3] = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 1.0, 0.0]])  # looks up
    with pytest.raises(ConfigError, match="almost empty"):
        fit_displays(toy, Viewpoint(camera))
    toy.heads.clear()
    with pytest.raises(ConfigError, match="no features"):
        fit_displays(toy, Viewpoint(camera))
