"""Where pixels are, and on which of them views agree."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from scipy.spatial.transform import Rotation

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.stereo.agreement import DepthMaps, agreeing_depth, project
from f3rm_ext.errors import ConfigError, MeshError
from f3rm_ext.mesh.views import (
    Depth,
    RenderedView,
    SceneViews,
    StoredViews,
    pinhole,
    pixel_size,
    rendered_view,
    stored_views,
)


def test_pixels_lie_on_the_ball_and_come_back(ball_views: SceneViews) -> None:
    with stored_views(ball_views) as stored:
        points, pixels = stored.points(3)
        np.testing.assert_allclose(points.norm(dim=1), 0.5, atol=1e-6)
        back, depth, inside = project(stored.cameras, 3, points)
        assert bool(inside.all()) and torch.equal(back, pixels)
        np.testing.assert_allclose(depth, stored.depth(3).reshape(-1)[pixels.numpy()], atol=1e-6)
        assert 1.0 / 60 < pixel_size(stored) < 1.5 / 60


def test_as_many_views_can_agree_as_there_are(ball_views: SceneViews) -> None:
    twelve = PinholeCameras(*(part[[3] * 12] for part in ball_views.cameras))
    with stored_views(SceneViews(twelve, lambda index: ball_views.render(3))) as stored:
        kept = [bool(agreeing_depth(stored, 0, min_views, 0.02).any()) for min_views in (9, 12, 13)]
        assert kept == [True, True, False]


def test_a_camera_inside_of_a_floater_adds_nothing(ball_views: SceneViews) -> None:
    ring = ball_views.cameras
    inside = PinholeCameras(*(torch.cat([part, part[:1]]) for part in ring))
    blob = RenderedView(np.zeros((48, 48, 3), np.uint8), np.full((48, 48), 0.05, np.float32))
    with stored_views(SceneViews(inside, lambda index: ball_views.render(index) if index < 20 else blob)) as stored:
        assert (agreeing_depth(stored, 20, 2, 0.02) == 0).all()
        # Nor does it object to what the others see.
        with stored_views(ball_views) as without:
            np.testing.assert_array_equal(agreeing_depth(stored, 3, 2, 0.02), agreeing_depth(without, 3, 2, 0.02))


def test_views_agree_object_or_say_nothing(ring: PinholeCameras) -> None:
    columns = {  # depths of three other views of the same place, at 2: whether it stays
        (2.0, 2.0, 2.0): True,
        (2.035, 0, 0): True,  # within 2 %
        (2.045, 1.955, 0): False,  # beyond
        (2.0, 2.1, 2.1): True,  # too near to object
        (2.0, 2.15, 2.15): False,  # two look through it, and it is seen from two views
        (2.0, 2.0, 2.15): True,
        (2.0, 2.15, 0): True,
        (2.0, 1.8, 1.8): True,  # hidden
        (0, 0, 0): False,
    }
    here = PinholeCameras(*(torch.cat([part[:1]] * 4) for part in ring))
    depths = np.zeros((4, 48, 48), np.float32)
    depths[0, :, : len(columns)] = 2
    depths[1:, :, : len(columns)] = np.transpose(list(columns))[:, None]
    maps = DepthMaps(here, list(depths))
    np.testing.assert_array_equal(agreeing_depth(maps, 0, 1, 0.02), depths[0])
    kept = agreeing_depth(maps, 0, 2, 0.02)
    assert (kept[:, : len(columns)] == 2 * np.array(list(columns.values()))).all() and not kept[:, len(columns) :].any()


def test_pixels_are_as_wide_as_half_of_them_are(ring: PinholeCameras) -> None:
    pictures = [np.zeros((48, 48), np.float32) for _ in range(5)]
    for picture, depths in zip(pictures, ([2.0, 2.0, 8.0], [1.0], [], [4.0, 3.0, 4.0, 4.0], [9.0]), strict=True):
        picture[0, : len(depths)] = depths
    some = PinholeCameras(*(part[:5].clone() for part in ring))
    some.Ks[:, 0, 0] = torch.tensor([50.0, 100.0, 1.0, 200.0, 100.0])
    black = np.zeros((48, 48, 3), np.uint8)
    with stored_views(SceneViews(some, lambda index: RenderedView(black, pictures[index]))) as stored:
        assert pixel_size(stored) == pytest.approx(np.median([2 / 50, 1 / 100, 4 / 200, 9 / 100]))


@pytest.mark.parametrize(("which", "wanted"), [("median", 3.0), ("mean", 5.0)])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_depth_of_a_field_is_along_the_axis(which: Depth, wanted: float, scale: float) -> None:
    def render(camera: Cameras, extra: Any, obb_box: Any = None) -> dict[str, torch.Tensor]:
        """Walls across the camera's axis, at distances along the rays."""
        ahead = camera.generate_rays(0, keep_shape=True).directions @ camera.camera_to_worlds[0, :3, 2]
        lengths = -1 / ahead[..., None]
        outputs = {"depth": 3 * lengths, "expected_depth": 5 * lengths, "accumulation": torch.ones_like(lengths)}
        return outputs | {"rgb": torch.zeros(*lengths.shape[:2], 3)}

    to_world = torch.from_numpy(Rotation.from_rotvec([0.3, 1.0, -0.2]).as_matrix()).float()
    cameras = Cameras(
        torch.cat([to_world, torch.ones(3, 1)], dim=1)[None], fx=20.0, fy=31.0, cx=9.0, cy=17.0, width=24, height=40
    )
    model = SimpleNamespace(device=torch.device("cpu"), render_camera=render, training=False)
    model.train = model.query_heads = model.render_points = lambda *_: {}
    made = SceneViews.from_field(model, cameras, scale, which)  # type: ignore[arg-type]
    depth = made.render(0).depth
    assert depth.shape == (40 * scale, 24 * scale)
    np.testing.assert_allclose(depth, wanted, rtol=1e-5)


def test_pictures_without_a_pixel_are_refused() -> None:
    cameras = Cameras(torch.eye(4)[None, :3], fx=20.0, fy=20.0, cx=12.0, cy=20.0, width=24, height=40)
    assert pinhole(cameras, 1 / 24).width.item() == 1
    with pytest.raises(ConfigError, match="24 pixels"):
        pinhole(cameras, 0.04)


def test_views_that_cannot_be_kept_say_where(ring: PinholeCameras, tmp_path: Path) -> None:
    stored = StoredViews(ring, tmp_path / "gone")
    view = RenderedView(np.zeros((48, 48, 3), np.uint8), np.zeros((48, 48), np.float32))
    for store in (lambda: stored.put(0, view), lambda: stored.set_depth(0, view.depth)):
        with pytest.raises(MeshError, match=rf"{tmp_path}.*TMPDIR"):
            store()


def test_nothing_seen_is_nothing(ring: PinholeCameras) -> None:
    empty = SceneViews(
        ring, lambda index: RenderedView(np.zeros((48, 48, 3), np.uint8), np.zeros((48, 48), np.float32))
    )
    with stored_views(empty) as stored:
        assert (agreeing_depth(stored, 0, 3, 0.01) == 0).all()
        with pytest.raises(MeshError, match="--min-views"):
            pixel_size(stored)


def test_hardly_opaque_pixels_have_no_depth() -> None:
    accumulation = torch.tensor([[0.4, 0.6, 0.9, 0.9]])[..., None]
    depth = torch.tensor([[1.0, 2.0, torch.nan, -1.0]])[..., None]
    view = rendered_view({"rgb": torch.full((1, 4, 3), 0.5), "accumulation": accumulation}, depth)
    assert view.depth.tolist() == [[0, 2, 0, 0]] and (view.color == 128).all()
