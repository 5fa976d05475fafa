"""Whether masks are silhouettes of an object."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from PIL import Image

from f3rm_ext.data.silhouettes import View, are_silhouettes, disagreements
from f3rm_ext.data.undistort import DistortedCamera
from f3rm_ext.synthetic.cameras import look_at

COUNT, WIDTH, HEIGHT, FOCAL = 20, 64, 48, 60.0


def orbit(count: int = COUNT) -> np.ndarray:
    """Poses on a ring around the origin, by turns higher and lower, which look about at it."""
    poses = []
    for i in range(count):
        angle = 2 * math.pi * i / count
        centre = np.array([3 * math.cos(angle), 3 * math.sin(angle), 1.0 + 0.6 * (i % 3)])
        poses.append(look_at(centre, np.array([0.2 * math.sin(5 * i), 0.2 * math.cos(3 * i), 0.0]))[:3])
    return np.stack(poses)


def cameras_of(poses: np.ndarray, kind: CameraType = CameraType.PERSPECTIVE, **distortion: float) -> Cameras:
    count = len(poses)
    parameters = [distortion.get(name, 0.0) for name in ("k1", "k2", "k3", "k4", "p1", "p2")]
    return Cameras(
        camera_to_worlds=torch.from_numpy(poses).float(),
        **{name: torch.full((count, 1), FOCAL) for name in ("fx", "fy")},  # type: ignore[arg-type]
        cx=torch.full((count, 1), WIDTH / 2),
        cy=torch.full((count, 1), HEIGHT / 2),
        width=torch.full((count, 1), WIDTH),
        height=torch.full((count, 1), HEIGHT),
        distortion_params=torch.tensor([parameters] * count),
        camera_type=kind,
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[[list[np.ndarray]], list[Path]]:
    """Writes masks as files."""

    def files(masks: list[np.ndarray]) -> list[Path]:
        paths = [tmp_path / f"{i:03d}.png" for i in range(len(masks))]
        for path, mask in zip(paths, masks, strict=True):
            Image.fromarray(mask.astype(np.uint8) * 255).save(path)
        return paths

    return files


def grid() -> tuple[np.ndarray, np.ndarray]:
    row, column = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    return row, column


def ball_silhouettes(
    poses: np.ndarray, centre: tuple[float, float, float], radius: float, k1: float = 0.0
) -> list[np.ndarray]:
    """Masks that keep a ball."""
    row, column = grid()
    x, y = (column - WIDTH / 2) / FOCAL, (row - HEIGHT / 2) / FOCAL
    u, v = x, y
    for _ in range(30):  # the direction whose distorted place is the pixel, by a fixed point
        factor = 1 + k1 * (u * u + v * v)
        u, v = x / factor, y / factor
    rays = np.stack([u, -v, -np.ones_like(u)], -1)
    rays /= np.linalg.norm(rays, axis=-1, keepdims=True)
    masks = []
    for pose in poses:
        towards = (np.array(centre) - pose[:, 3]) @ pose[:, :3]
        along = rays @ towards
        masks.append((along > 0) & (towards @ towards - along**2 <= radius**2))
    return masks


def passers_by(share: float, count: int = COUNT) -> list[np.ndarray]:
    """Masks that remove an ellipse anywhere."""
    dice, (row, column) = np.random.default_rng(0), grid()
    half = math.sqrt(share * WIDTH * HEIGHT / math.pi / 2)
    places = dice.uniform(0, 1, (count, 2)) * (HEIGHT, WIDTH)
    return [((row - y) / 2) ** 2 + (column - x) ** 2 > half**2 for y, x in places]


@pytest.mark.parametrize("radius", [0.25, 0.6])
@pytest.mark.parametrize("centre", [(0.0, 0.0, 0.0), (0.5, 0.4, 0.2)])
def test_masks_of_an_object_are_silhouettes(write, centre, radius) -> None:
    poses = orbit()
    assert are_silhouettes(cameras_of(poses), write(ball_silhouettes(poses, centre, radius)))


def test_an_object_may_reach_beyond_the_frame(write) -> None:
    poses = orbit()
    masks = ball_silhouettes(poses, (0.6, 0.0, 0.4), 0.8)
    assert any(mask[0].any() or mask[:, 0].any() or mask[:, -1].any() for mask in masks)
    assert are_silhouettes(cameras_of(poses), write(masks))


def beside(other: np.ndarray) -> list[np.ndarray]:
    """Masks of the camera itself, with passers-by."""
    return [other & mask for mask in passers_by(0.1)]


ROW, COLUMN = grid()
CIRCLE = np.hypot(ROW - HEIGHT / 2, COLUMN - WIDTH / 2) < 0.45 * HEIGHT
BONNET = ROW < 0.7 * HEIGHT
OTHER_MASKS = {
    "few passers-by": passers_by(0.05),
    "more passers-by": passers_by(0.2),
    "many passers-by": passers_by(0.4),
    "half of each photo": [(COLUMN < WIDTH / 2) == (i * 7 % 3 == 0) for i in range(COUNT)],
    "circle": [CIRCLE] * COUNT,
    "bonnet": [BONNET] * COUNT,
    "circle and people": beside(CIRCLE),
    "bonnet and people": beside(BONNET),
    "a part of the scene taken out": [~mask for mask in ball_silhouettes(orbit(), (0.0, 0.0, 0.0), 0.3)],
}


@pytest.mark.parametrize("masks", OTHER_MASKS.values(), ids=OTHER_MASKS.keys())
def test_other_masks_are_no_silhouettes(write, masks) -> None:
    assert not are_silhouettes(cameras_of(orbit()), write(masks))


def test_distortion_is_taken_into_account() -> None:
    poses, k1 = orbit(), -0.5
    masks = ball_silhouettes(poses, (0.9, 0.0, 0.0), 0.4, k1)
    kept = {}
    for name, cameras in {"right": cameras_of(poses, k1=k1), "wrong": cameras_of(poses)}.items():
        lenses = [DistortedCamera.of(cameras, i, "") for i in range(COUNT)]
        kept[name], _ = disagreements(poses, lenses, masks)
    assert kept["right"] < 0.7 * kept["wrong"]


def test_a_polynomial_that_folds_back_shows_nothing_from_outside() -> None:
    lens = DistortedCamera.of(cameras_of(orbit(1), k1=-0.5), 0, "")
    every = np.ones((HEIGHT, WIDTH), dtype=bool)
    far_outside, inside = (1.35, 0.0, -1.0), (0.4, 0.3, -1.0)  # both projected into the frame
    there, kept = View(lens, every, every).look_up(np.array([far_outside, inside]))
    assert there.tolist() == kept.tolist() == [False, True]


def test_nothing_can_be_known_without_masks_views_or_a_lens(write, tmp_path) -> None:
    poses = orbit()
    files = write(ball_silhouettes(poses, (0.0, 0.0, 0.0), 0.5))
    assert are_silhouettes(cameras_of(poses), files)
    assert not are_silhouettes(cameras_of(poses[:2]), files[:2])
    assert not are_silhouettes(cameras_of(poses, CameraType.EQUIRECTANGULAR), files)
    files[0].write_bytes(b"no picture")
    assert not are_silhouettes(cameras_of(poses), files)
