"""A ball that is known exactly, as cameras around it see it and as flat Gaussians on its surface."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.data.stereo.agreement import unproject
from f3rm_ext.mesh.views import RenderedView, SceneViews
from f3rm_ext.splat.gaussians import Gaussians, rgb_to_sh

RADIUS = 0.5
SIZE_PX = 48
FOCAL_PX = 60.0


def sphere_directions(count: int) -> np.ndarray:
    """Directions spread evenly over a sphere (Fibonacci's spiral)."""
    index = np.arange(count) + 0.5
    polar, turn = np.arccos(1 - 2 * index / count), np.pi * (1 + 5**0.5) * index
    return np.stack([np.cos(turn) * np.sin(polar), np.sin(turn) * np.sin(polar), np.cos(polar)], axis=1)


@pytest.fixture(scope="session")
def make_cameras() -> Callable[..., PinholeCameras]:
    """Makes cameras with square pictures at places, of which each looks ahead with a side to its right."""

    def make(places: np.ndarray, aheads: np.ndarray, sides: np.ndarray, px: int) -> PinholeCameras:
        sides, viewmats = sides / np.linalg.norm(sides, axis=1, keepdims=True), np.tile(np.eye(4), (len(places), 1, 1))
        viewmats[:, :3, :3] = np.stack([sides, np.cross(aheads, sides), aheads], axis=1)
        viewmats[:, :3, 3] = -np.einsum("nij,nj->ni", viewmats[:, :3, :3], places)
        K = torch.tensor([[FOCAL_PX, 0, px / 2], [0, FOCAL_PX, px / 2], [0, 0, 1]])
        sizes = torch.full((len(places),), px, dtype=torch.int32)
        return PinholeCameras(torch.tensor(viewmats).float(), K.repeat(len(places), 1, 1), sizes, sizes.clone())

    return make


@pytest.fixture(scope="session")
def ring(make_cameras: Callable[..., PinholeCameras]) -> PinholeCameras:
    """Twenty cameras all around the ball at a distance of 1.5, looking at its middle."""
    directions = sphere_directions(20)
    return make_cameras(1.5 * directions, -directions, np.cross(directions, [0.1, 0.2, 1.0]), SIZE_PX)


def ball_view(cameras: PinholeCameras, index: int) -> RenderedView:
    """The exact depth of the ball; colours are positions."""
    pixels = torch.arange(SIZE_PX**2)
    ones = torch.ones(len(pixels), dtype=torch.float64)
    center = cameras.positions[index].double()
    ahead = unproject(cameras, index, ones, pixels) - center
    a, b, c = ahead.square().sum(1), (ahead * center).sum(1), center.square().sum() - RADIUS**2
    depth = (-b - (b * b - a * c).clamp_min(0).sqrt()) / a
    depth = torch.where((b * b > a * c) & (depth > 0), depth, 0)
    color = ((center + ahead * depth[:, None] + 0.5).clamp(0, 1) * 255).round()
    shape = (SIZE_PX, SIZE_PX)
    return RenderedView(color.byte().numpy().reshape(*shape, 3), depth.float().numpy().reshape(shape))


@pytest.fixture
def ball_views(ring: PinholeCameras) -> SceneViews:
    return SceneViews(ring, lambda index: ball_view(ring, index))


@pytest.fixture(scope="session")
def make_ball() -> Callable[..., Gaussians]:
    """Opaque, flat Gaussians on the ball, thin along its normals."""

    def make(count: int = 3000, thickness: float = 0.01, alpha: float = 0.9) -> Gaussians:
        directions = sphere_directions(count)
        turns = [Rotation.align_vectors(direction[None], [[0, 0, 1.0]])[0].as_quat() for direction in directions]
        x, y, z, w = np.array(turns).T
        flat = np.log([0.03, 0.03, thickness])
        return Gaussians(
            means=torch.tensor(RADIUS * directions).float(),
            scales=torch.tensor(np.tile(flat, (count, 1))).float(),
            quats=torch.tensor(np.stack([w, x, y, z], axis=1)).float(),
            opacities=torch.full((count, 1), float(np.log(alpha / (1 - alpha)))),
            features_dc=rgb_to_sh(torch.tensor(directions / 2 + 0.5).float()),
            features_rest=torch.zeros(count, 0, 3),
        )

    return make
