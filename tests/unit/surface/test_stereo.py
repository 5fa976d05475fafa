"""Depth from photos of a wall."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter, map_coordinates
from torch import Tensor

from f3rm_ext.data.pixel_sampler import ImagePixels
from f3rm_ext.splat.cameras import PinholeCameras
from f3rm_ext.surface.stereo import StereoOptions, stereo_views
from f3rm_ext.surface.views import SceneViews

WIDTH, HEIGHT, FOCAL_PX = 64, 48, 60.0
TEXELS = 400
WALL = np.array([0.25, 0.0, -1.0]), -2.0
"""Normal and offset of a slanted wall about 2 ahead of the cameras."""
FLOOR = np.array([0.0, 0.0, 1.0]), 0.0
Plane = tuple[np.ndarray, float]


@pytest.fixture
def cameras() -> PinholeCameras:
    """Five cameras in a row, whose axes meet on the wall."""
    viewmats = []
    for x in (-0.5, -0.25, 0.0, 0.25, 0.5):
        angle = -np.arctan2(x, 2.0)
        turn = np.array([[np.cos(angle), 0, -np.sin(angle)], [0, 1, 0], [np.sin(angle), 0, np.cos(angle)]])
        viewmat = np.eye(4)
        viewmat[:3, :3], viewmat[:3, 3] = turn, -turn @ np.array([x, 0.0, 0.0])
        viewmats.append(viewmat)
    K = torch.tensor([[FOCAL_PX, 0, WIDTH / 2], [0, FOCAL_PX, HEIGHT / 2], [0, 0, 1]])
    sizes = torch.full((5,), WIDTH), torch.full((5,), HEIGHT)
    return PinholeCameras(torch.tensor(np.array(viewmats)).float(), K.repeat(5, 1, 1), *sizes)


def true_depth(cameras: PinholeCameras, index: int, plane: Plane = WALL) -> tuple[np.ndarray, np.ndarray]:
    """Depth of a plane and where its pixels are."""
    x, y = (np.arange(WIDTH) + 0.5 - WIDTH / 2) / FOCAL_PX, (np.arange(HEIGHT) + 0.5 - HEIGHT / 2) / FOCAL_PX
    rays = np.stack([*np.meshgrid(x, y), np.ones((HEIGHT, WIDTH))], axis=-1)
    viewmat = cameras.viewmats[index].double().numpy()
    center, ahead = -viewmat[:3, :3].T @ viewmat[:3, 3], rays @ viewmat[:3, :3]
    normal, offset = plane
    depth = (offset - normal @ center) / (ahead @ normal)
    return depth, center + depth[..., None] * ahead


def surface_views(cameras: PinholeCameras, plane: Plane, contrast: float, valid: Tensor | None = None) -> SceneViews:
    noise = gaussian_filter(np.random.default_rng(0).standard_normal((TEXELS, TEXELS)), 3)
    noise /= noise.std()

    def photo(index: int) -> ImagePixels:
        _, points = true_depth(cameras, index, plane)
        places = [(points[..., axis] / 5 + 0.5) * TEXELS for axis in (1, 0)]
        shade = 128 + contrast * map_coordinates(noise, places, order=1, mode="wrap")
        return ImagePixels(torch.from_numpy(np.repeat(shade.round().astype(np.uint8)[..., None], 3, axis=-1)), valid)

    return stereo_views(photo, cameras, StereoOptions(neighbours=4))


def wall_views(cameras: PinholeCameras, contrast: float, valid: Tensor | None = None) -> SceneViews:
    return surface_views(cameras, WALL, contrast, valid)


@pytest.fixture
def grazing() -> PinholeCameras:
    """Five cameras 0.5 above a floor at z = 0, which they see at about 20°."""
    viewmats, down = [], np.deg2rad(20)
    for x in (-0.3, -0.15, 0.0, 0.15, 0.3):
        ahead = np.array([0, np.cos(down), -np.sin(down)])
        side = np.array([1.0, 0, 0])
        viewmat = np.eye(4)
        viewmat[:3, :3] = np.stack([side, np.cross(ahead, side), ahead])
        viewmat[:3, 3] = -viewmat[:3, :3] @ np.array([x, 0, 0.5])
        viewmats.append(viewmat)
    K = torch.tensor([[FOCAL_PX, 0, WIDTH / 2], [0, FOCAL_PX, HEIGHT / 2], [0, 0, 1]])
    sizes = torch.full((5,), WIDTH), torch.full((5,), HEIGHT)
    return PinholeCameras(torch.tensor(np.array(viewmats)).float(), K.repeat(5, 1, 1), *sizes)


def test_finds_a_floor_seen_at_an_angle(grazing: PinholeCameras) -> None:
    found = surface_views(grazing, FLOOR, 40.0).render(2).depth
    truth, _ = true_depth(grazing, 2, FLOOR)
    near = np.s_[HEIGHT // 2 : -4, 8:-8]
    assert (np.abs(found / truth - 1)[near] < 0.02).mean() > 0.9


@pytest.mark.parametrize("contrast", [40.0, 4.0])
def test_finds_a_wall_whatever_its_contrast(cameras: PinholeCameras, contrast: float) -> None:
    found = wall_views(cameras, contrast).render(2).depth
    truth, _ = true_depth(cameras, 2)
    inner = np.s_[6:-6, 6:-6]
    error = np.abs(found / truth - 1)[inner]
    assert np.median(error) < 0.004 and (error < 0.01).mean() > 0.95


def test_masked_pixels_have_no_depth(cameras: PinholeCameras) -> None:
    valid = torch.ones(HEIGHT, WIDTH, dtype=torch.bool)
    valid[:, : WIDTH // 2] = False
    found = wall_views(cameras, 40.0, valid).render(2).depth
    assert (found[:, : WIDTH // 2] == 0).all() and (found[6:-6, WIDTH // 2 + 6 : -6] > 0).all()


def test_a_blank_wall_has_no_depth(cameras: PinholeCameras) -> None:
    assert (wall_views(cameras, 0.0).render(2).depth == 0).all()


def test_a_photo_without_neighbours_has_no_depth(cameras: PinholeCameras) -> None:
    turned = cameras.viewmats.clone()
    turned[4, [0, 2]] *= -1  # looks away
    views = wall_views(cameras._replace(viewmats=turned), 40.0)
    assert (views.render(4).depth == 0).all() and (views.render(0).depth > 0).any()
