"""First colours of Gaussians on a mesh."""

import numpy as np
import pytest
import torch
import trimesh

from f3rm_ext.surface.bound.colors import photo_colors
from f3rm_ext.surface.bound.gaussians import bind
from f3rm_ext.surface.texture.photos import Camera, Photo, Photos
from f3rm_ext.surface.views import SceneViews


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
