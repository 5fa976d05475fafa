"""Where pages open: which training camera is chosen, and which pages are moved there."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext import compat
from f3rm_ext.viewer.first_view import FirstViewControl, first_view

UP = np.array([0.0, 0.0, 1.0])


def looking(place: Any, target: Any) -> np.ndarray:
    """A pose (3, 4), OpenGL axes, upright."""
    place, target = np.asarray(place, dtype=float), np.asarray(target, dtype=float)
    back = (place - target) / np.linalg.norm(place - target)
    right = np.cross(UP, back)
    right /= np.linalg.norm(right)
    return np.stack([right, np.cross(back, right), back, place], axis=1)


def cameras_of(*poses: np.ndarray, height: int = 40, fy: float = 30.0) -> Cameras:
    """Cameras at these poses."""
    c2w = torch.tensor(np.stack(poses), dtype=torch.float32)
    return Cameras(c2w, fx=30.0, fy=fy, cx=10.0, cy=height / 2, width=20, height=height)


def ring(count: int, off: float, radius: float = 2.0, centre: Any = (0.5, 0.0, 0.2)) -> list[np.ndarray]:
    """Poses on a circle about a centre, which all look past it to one side, by an angle whose tangent is ``off``."""
    poses = []
    for angle in np.arange(count) / count * 2 * np.pi + 0.1:
        out, aside = np.array([np.cos(angle), np.sin(angle), 0.0]), np.array([-np.sin(angle), np.cos(angle), 0.0])
        place = np.asarray(centre) + radius * out
        poses.append(looking(place, place - radius * out + off * radius * aside))
    return poses


@pytest.mark.parametrize("index", [0, 3, 7])
def test_the_view_that_looks_at_the_middle_is_chosen(index: int) -> None:
    poses = ring(8, off=0.2)
    poses[index] = ring(8, off=0.0)[index]
    view = first_view(cameras_of(*poses))
    assert view.index == index
    np.testing.assert_allclose(view.c2w, poses[index], atol=1e-6)
    assert view.distance == pytest.approx(2.0, rel=0.05), "turned about what is looked at"


def test_of_views_alike_the_one_at_the_usual_distance_is_chosen() -> None:
    poses = ring(8, off=0.01)
    poses[2], poses[5] = (
        ring(8, off=0.0, radius=0.1)[2],
        ring(8, off=0.0, radius=40.0)[5],
    )
    assert first_view(cameras_of(*poses)).index not in (2, 5)


def test_a_camera_that_looks_away_is_not_chosen() -> None:
    poses = ring(8, off=0.1)
    place = poses[0][:, 3]
    poses[0] = looking(place, 2 * place - np.array([0.5, 0.0, 0.2]))
    assert first_view(cameras_of(*poses)).index != 0


@pytest.mark.parametrize(
    "poses",
    [
        [looking([0, 0, 0], [1, 0, 0])],
        [looking([0, y, 0], [1, y, 0]) for y in range(5)],
        [looking([0, 0, 0], [np.cos(a), np.sin(a), 0.1]) for a in np.linspace(0, 6, 9)],
        [looking(0.2 * out, out) for out in np.eye(3)[[0, 1, 0, 1]] * np.array([[1], [1], [-1], [-1]])],
    ],
    ids=["one", "parallel", "panorama", "outwards"],
)
def test_where_axes_meet_nowhere_in_front_it_is_the_first(poses: list[np.ndarray]) -> None:
    view = first_view(cameras_of(*poses))
    assert view.index == 0 and np.isfinite(view.distance) and view.distance > 0
    np.testing.assert_allclose(view.c2w, poses[0], atol=1e-6)


def test_parallel_cameras_turn_about_a_place_as_deep_as_the_scene() -> None:
    cameras = cameras_of(*([looking([0, y, 0], [1, y, 0]) for y in np.linspace(-0.1, 0.1, 5)]))
    points = torch.tensor([[6.0, 0, 0], [7, 1, 0], [9, 0, 1], [-5, 0, 0]])
    assert first_view(cameras, points).distance == pytest.approx(7.0)
    assert first_view(cameras_of(*ring(8, off=0.0)), points).distance == pytest.approx(2.0, rel=0.05)


def test_the_photo_is_as_high_as_the_page() -> None:
    assert first_view(cameras_of(*ring(5, 0.0))).fov_rad == pytest.approx(2 * np.arctan(20 / 30))
    for fy, limit in ((0.1, 100.0), (1e5, 20.0)):
        assert first_view(cameras_of(*ring(5, 0.0), fy=fy)).fov_rad == pytest.approx(np.radians(limit))


# --- pages -----------------------------------------------------------------------------------------------------------


class Viewer:
    """The part of nerfstudio's viewer that is reached: pages that come, and the training cameras in the scene."""

    def __init__(self, cameras: Cameras | None, shown: int = 100) -> None:
        dataset = None if cameras is None else SimpleNamespace(cameras=cameras)
        self.pipeline = SimpleNamespace(datamanager=SimpleNamespace(train_dataset=dataset), model=None)
        self.callbacks: list[Callable[[Any], None]] = []
        self.viser_server = SimpleNamespace(on_client_connect=self.callbacks.append)
        self.camera_handles: dict[int, SimpleNamespace] = {}
        self.shown = shown
        self.render_statemachines: dict[int, Any] = {}

    def init_scene(self, count: int) -> None:
        self.camera_handles = {index: SimpleNamespace(visible=True) for index in range(min(count, self.shown))}

    def connect(self, position: Any) -> SimpleNamespace:
        camera = SimpleNamespace(position=np.asarray(position, dtype=float), wxyz=None, look_at=None, fov=1.3)
        client = SimpleNamespace(camera=camera, atomic=nullcontext)
        for callback in self.callbacks:
            callback(client)
        return camera


@pytest.fixture
def viewer() -> Any:
    poses = ring(8, off=0.2)
    poses[3] = ring(8, off=0.0)[3]
    viewer = Viewer(cameras_of(*poses))
    FirstViewControl()._setup(viewer)  # type: ignore[arg-type]
    return viewer


def test_a_page_that_is_opened_looks_through_the_camera(viewer: Any) -> None:
    from viser.transforms import SO3

    pose = ring(8, off=0.0)[3]
    camera = viewer.connect(compat.viewer._VISER_START)
    np.testing.assert_allclose(camera.position, pose[:, 3] * 10, atol=1e-5)
    axes = SO3(camera.wxyz).as_matrix()
    np.testing.assert_allclose(axes, pose[:, :3] * [1, -1, -1], atol=1e-5)
    ahead = camera.look_at - camera.position
    np.testing.assert_allclose(ahead / np.linalg.norm(ahead), axes[:, 2], atol=1e-5)
    assert camera.fov == pytest.approx(2 * np.arctan(20 / 30))


def test_a_page_that_was_moved_stays(viewer: Any) -> None:
    camera = viewer.connect([3.0, 3.0, 2.5])
    assert camera.position.tolist() == [3.0, 3.0, 2.5] and camera.wxyz is None and camera.fov == 1.3


@pytest.mark.parametrize(("shown", "hidden"), [(100, [3]), (2, [])])
def test_the_photo_in_front_of_the_view_is_hidden_and_no_other(viewer, shown, hidden) -> None:
    viewer.shown = shown
    viewer.init_scene(8)
    assert [index for index, handle in viewer.camera_handles.items() if not handle.visible] == hidden


def test_without_training_cameras_pages_open_where_they_do() -> None:
    viewer = Viewer(None)
    FirstViewControl()._setup(viewer)  # type: ignore[arg-type]
    assert not viewer.callbacks
