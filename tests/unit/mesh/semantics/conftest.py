"""A floor whose west half is one thing and whose east half another, as photos from above show it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trimesh
from PIL import Image
from trimesh.visual.material import PBRMaterial
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.features.base import FeatureMap, PatchGrid
from f3rm_ext.mesh.camera import Camera
from f3rm_ext.mesh.texture.photos import Photo, Photos

SIDE_PX = 80


def grid_mesh(cells: int = 10) -> trimesh.Trimesh:
    """The square from (-1, -1) to (1, 1) on the floor, textured: u and v go from 0 to 1 with x and y."""
    side = np.linspace(-1, 1, cells + 1)
    x, y = np.meshgrid(side, side, indexing="ij")
    points = np.stack([x.ravel(), y.ravel(), np.zeros(x.size)], axis=1)
    number = np.arange(x.size).reshape(x.shape)
    a, b, c, d = (n.ravel() for n in (number[:-1, :-1], number[1:, :-1], number[1:, 1:], number[:-1, 1:]))
    mesh = trimesh.Trimesh(points, np.concatenate([np.stack([a, b, c], 1), np.stack([a, c, d], 1)]), process=False)
    material = PBRMaterial(baseColorTexture=Image.new("RGB", (64, 64), (200, 100, 50)))
    mesh.visual = TextureVisuals(uv=points[:, :2] / 2 + 0.5, material=material)
    return mesh


@pytest.fixture
def floor() -> trimesh.Trimesh:
    return grid_mesh()


@pytest.fixture
def two_triangles() -> trimesh.Trimesh:
    """The same floor, as coarse as can be."""
    return grid_mesh(1)


@pytest.fixture
def loose(floor: trimesh.Trimesh) -> trimesh.Trimesh:
    """The same floor, each triangle a chart of its own."""
    corners = np.asarray(floor.faces).ravel()
    return trimesh.Trimesh(floor.vertices[corners], np.arange(len(corners)).reshape(-1, 3), process=False)


@pytest.fixture(scope="session")
def pictures() -> SimpleNamespace:
    """Three photos of the floor from above, and their features: (1, 0) west of x = 0, (0, 1) east of it."""
    down = np.diag([1.0, -1.0, -1.0])
    cameras, maps = [], []
    for x in (-0.2, 0.0, 0.2):
        cameras.append(Camera(down, np.array([x, 0, 3.0]), np.full(2, 60.0), np.full(2, SIDE_PX / 2), SIDE_PX, SIDE_PX))
        column = (np.arange(SIDE_PX) + 0.5 - SIDE_PX / 2) / 60 * 3 + x
        values = np.stack([column < 0, column >= 0], axis=1).astype(np.float16)
        grid = PatchGrid.covering(SIDE_PX, SIDE_PX, SIDE_PX, SIDE_PX)
        maps.append(FeatureMap(np.repeat(values[None], SIDE_PX, axis=0), grid))
    photo = Photo(np.zeros((SIDE_PX, SIDE_PX, 3), np.uint8), None)
    return SimpleNamespace(photos=Photos(cameras, lambda index: photo), load=maps.__getitem__)


@pytest.fixture
def halves(floor: trimesh.Trimesh) -> torch.Tensor:
    """Codes of the floor's vertices, as the photos show them."""
    east = torch.from_numpy(np.asarray(floor.vertices)[:, 0] >= 0)
    return torch.stack([~east, east, torch.zeros_like(east)], dim=1).half()
