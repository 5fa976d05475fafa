"""First colours of Gaussians on a mesh."""

import numpy as np
import pytest
import torch
import trimesh

from f3rm_ext.mesh.bound.colors import photo_colors
from f3rm_ext.mesh.bound.gaussians import bind
from f3rm_ext.mesh.bound.layout import PerTriangle
from f3rm_ext.mesh.texture.photos import Camera, Photo, Photos
from f3rm_ext.mesh.texture.visibility import bilinear
from f3rm_ext.mesh.views import SceneViews


@pytest.mark.parametrize("per_triangle", [1, 3])
def test_gaussians_have_the_colors_of_their_places_in_photos(ball_views: SceneViews, per_triangle: int) -> None:
    cameras = ball_views.cameras
    pinholes = []
    for viewmat, K in zip(cameras.viewmats.double().numpy(), cameras.Ks.double().numpy(), strict=True):
        rotation = viewmat[:3, :3]
        center = -rotation.T @ viewmat[:3, 3]
        size = int(cameras.widths[0])
        pinholes.append(Camera(rotation, center, K[[0, 1], [0, 1]], K[:2, 2], size, size))
    photos = Photos(pinholes, lambda index: Photo(ball_views.render(index).color, None))
    ball = trimesh.creation.icosphere(3, 0.5)
    vertices, faces = torch.from_numpy(np.array(ball.vertices)).float(), torch.from_numpy(np.array(ball.faces))
    bound = bind(vertices, faces, None, per_triangle, 0, 0.5, 1e-6)
    # The colour of a place on the ball is where it is.
    error = (photo_colors(bound, photos) - (bound.gaussians().means + 0.5)).abs()
    assert error.shape == (1280 * per_triangle, 3) and float(error.mean()) < 0.01 and float(error.max()) < 0.06


@pytest.mark.parametrize("per_triangle", [3, 6])
def test_each_gaussian_has_its_share_of_the_triangle(per_triangle: PerTriangle) -> None:
    """Gaussians of one pixel each tell stripes apart; those of a whole triangle would take the mean of both."""
    side, size = np.sqrt(2 * per_triangle), 64
    camera = Camera(np.eye(3), np.zeros(3), np.full(2, 100.0), np.full(2, size / 2), size, size)
    stripes = np.zeros((size, size, 3), np.uint8)
    stripes[:, ::2] = 200
    corners = np.stack(np.meshgrid(*[np.arange(6) * side] * 2), axis=-1).reshape(-1, 2) - 2.5 * side
    first = np.arange(30).reshape(5, 6)[:, :5].reshape(-1, 1)
    faces = np.concatenate([first + [0, 6, 1], first + [1, 6, 7]])  # facing the camera
    vertices = torch.from_numpy(np.column_stack([corners / 100 * 2, np.full(len(corners), 2.0)])).float()
    bound = bind(vertices, torch.from_numpy(faces), None, per_triangle, 0, 0.5, 1e-6)
    at, _ = camera.project(bound.gaussians().means.double().numpy())
    found = photo_colors(bound, Photos([camera], lambda index: Photo(stripes, None))).numpy()
    np.testing.assert_allclose(255 * found, bilinear(stripes.astype(np.float32), at), atol=0.5)
    assert found.std() > 0.1
