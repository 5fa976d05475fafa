"""Ray maps hold what cameras see."""

import numpy as np
import pytest
import torch
from torch import Tensor

from f3rm_ext.sfm import rays
from f3rm_ext.sfm.cameras import CameraSet


def test_homogeneous_vectors_have_length_one_and_give_points_back() -> None:
    points = torch.randn(50, 3, dtype=torch.float64) * torch.logspace(-3, 3, 50, dtype=torch.float64)[:, None]
    vectors = rays.to_homogeneous(points)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(50, dtype=torch.float64))
    torch.testing.assert_close(rays.from_homogeneous(vectors), points)
    torch.testing.assert_close(rays.from_homogeneous(-3 * vectors), points)


def test_points_at_infinity_stay_finite() -> None:
    points = rays.from_homogeneous(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, -1e-9]]))
    assert (points[:, 0] * rays.SMALLEST_WEIGHT).tolist() == pytest.approx([1, -1]) and (points[:, 1:] == 0).all()


def test_maps_hold_the_centre_and_what_every_cell_sees(cameras: CameraSet, depth: Tensor) -> None:
    maps = rays.render_maps(cameras, depth, scale=0.5)
    assert maps.shape == (5, 8, 16, 16)
    origins, endpoints = rays.map_points(maps)
    first = cameras.relative_to_first(0.5)
    torch.testing.assert_close(origins, first.centers[:, None, None].expand_as(origins))
    pixels, seen_depth = first.project(endpoints.flatten(1, 2))
    wanted = rays.cell_centers(cameras.sizes_px, 16, 16).flatten(1, 2)
    torch.testing.assert_close(pixels, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(seen_depth, 0.5 * depth.flatten(1))


def test_maps_are_in_the_axes_of_pytorch3d(cameras: CameraSet, depth: Tensor) -> None:
    maps = rays.render_maps(cameras, depth)
    assert maps[0, :3].abs().max() < 1e-12, "the first camera is the origin"
    x, y, z = maps[0, 4:7]
    assert x[8, 0] > 0 > x[8, -1] and y[0, 8] > 0 > y[-1, 8] and (z > 0).all()
    ndc = rays.cell_ndc(16, 16, depth)
    assert ndc[0, 0, 0] == 1 - 1 / 16 and ndc[1, 0, 0] == 1 - 1 / 16 and ndc[0, 0, 1] < ndc[0, 0, 0]


def test_the_median_point_of_the_first_camera_gets_distance_one(cameras: CameraSet, depth: Tensor) -> None:
    scale = rays.scene_scale(cameras, depth)
    _, endpoints = rays.map_points(rays.render_maps(cameras, depth, scale))
    median = endpoints[0].reshape(-1, 3).median(dim=0).values
    torch.testing.assert_close(median.norm(), torch.tensor(1.0, dtype=torch.float64))
    assert rays.scene_scale(cameras, 1e-6 * depth) == 1.0


def test_normalized_maps_mean_the_same_points(cameras: CameraSet, depth: Tensor) -> None:
    maps = rays.render_maps(cameras, depth)
    scaled = torch.cat([2 * maps[:, :4], -0.1 * maps[:, 4:]], dim=1)
    again = rays.normalize_maps(scaled)
    torch.testing.assert_close(again[:, :4], maps[:, :4])
    torch.testing.assert_close(again[:, 4:], -maps[:, 4:])


def test_holes_get_the_nearest_depth() -> None:
    filled, known = rays.fill_holes(np.array([[1.0, 0.0, 0.0], [np.inf, -1.0, 5.0]]))
    assert known.tolist() == [[True, False, False], [False, False, True]]
    assert filled[0, 0] == 1 and filled[1, 2] == 5 and filled[0, 2] == 5 and filled[1, 0] == 1
    empty, known = rays.fill_holes(np.zeros((2, 2)))
    assert (empty == 1).all() and not known.any()
