"""The level of a density that is known: that of flat Gaussians on a ball."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.mesh.level_set import DensityField, center_points, crossings, level_points, poisson_mesh
from f3rm_ext.mesh.views import SceneViews, stored_views
from f3rm_ext.splat.gaussians import Gaussians

Make = Callable[..., Gaussians]


def one_sheet(alpha: float = 0.8, thickness: float = 0.05) -> Gaussians:
    """A single Gaussian as good as infinite in x and y."""
    scales, quats = torch.tensor([[100.0, 100.0, thickness]]).log(), torch.tensor([[1.0, 0, 0, 0]])
    colors = torch.zeros(1, 3), torch.zeros(1, 0, 3)
    return Gaussians(torch.zeros(1, 3), scales, quats, torch.logit(torch.tensor([[alpha]])), *colors)


@pytest.mark.parametrize("level", [0.1, 0.3, 0.5])
def test_the_crossing_is_where_the_formula_says(level: float) -> None:
    field = DensityField(one_sheet())
    center = torch.tensor([0.0, 0.0, 1.0])
    points = torch.tensor([[0.0, 0.0, 0.0], [0.3, 0.1, 0.0]])
    found, normals, rays = crossings(field, points, center, level)
    # α exp(−z² / 2 s²) = level
    height = 0.05 * (2 * np.log(0.8 / level)) ** 0.5
    np.testing.assert_allclose(found[:, 2], height, atol=2e-3)
    np.testing.assert_allclose(normals, [[0, 0, 1]] * 2, atol=1e-4)
    assert rays.tolist() == [0, 1]


def test_no_crossing_from_inside_or_above_the_density() -> None:
    field = DensityField(one_sheet())
    at = torch.zeros(1, 3)
    assert not len(crossings(field, at, torch.tensor([0.0, 0.0, 0.01]), 0.3)[2])
    assert not len(crossings(field, at, torch.tensor([0.0, 0.0, 1.0]), 0.9)[2])


def test_a_point_belongs_to_the_densest_gaussian() -> None:
    sheet, dot = one_sheet(), one_sheet()
    dot.scales = torch.full((1, 3), 0.01).log()
    dot.means = torch.tensor([[0.0, 0.0, 0.3]])
    sheet.means = torch.tensor([[5.0, 0.0, 0.0]])
    both = Gaussians.from_tensors(
        {name: torch.cat([value, dot.tensors()[name]]) for name, value in sheet.tensors().items()}
    )
    field = DensityField(both)
    # The dot's centre is nearer to the first point, the sheet's density is higher there.
    owners = field.owners(torch.tensor([[0.0, 0.0, 0.02], [0.0, 0.0, 0.3]]))
    assert owners.tolist() == [0, 1]
    widths = field.widths(owners, torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]))
    np.testing.assert_allclose(widths, [0.05, 0.01], rtol=1e-4)
    oblique = field.widths(owners[:1], torch.tensor([[0.6, 0.0, 0.8]]))
    np.testing.assert_allclose(oblique, 0.05 / 0.8, rtol=1e-4)


def test_level_set_of_a_ball(ball_views: SceneViews, make_ball: Make) -> None:
    done: list[int] = []
    with stored_views(ball_views) as stored:
        cloud = level_points(stored, make_ball(), 0.3, 8000, done.append)
    assert len(cloud.positions) > 5000 and done[-1] == len(ball_views)
    radii = np.linalg.norm(cloud.positions, axis=1)
    assert 0.5 < np.median(radii) < 0.53 and radii.std() < 0.01
    outwards = (cloud.normals * cloud.positions).sum(axis=1) / radii
    assert np.median(outwards) > 0.99 and (outwards > 0.8).mean() > 0.95
    np.testing.assert_allclose(np.median(np.abs(cloud.colors - cloud.positions - 0.5)), 0, atol=0.02)


def test_level_set_becomes_a_mesh(ball_views: SceneViews, make_ball: Make, open3d: ModuleType) -> None:
    with stored_views(ball_views) as stored:
        cloud = level_points(stored, make_ball(), 0.5, 6000)
    mesh = poisson_mesh(cloud, depth=6, trim=0.02)
    radii = np.linalg.norm(mesh.vertices, axis=1)
    assert abs(np.median(radii) - 0.512) < 0.02 and mesh.area == pytest.approx(np.pi, rel=0.15)


def test_centres_face_the_cameras(ring: PinholeCameras, make_ball: Make) -> None:
    ball = make_ball()
    ball.opacities[:100] = -3
    cloud = center_points(ball, ring.positions)
    assert len(cloud.positions) == len(ball) - 100
    assert ((cloud.normals * cloud.positions).sum(axis=1) > 0.4).all()
    np.testing.assert_allclose(cloud.colors, cloud.positions + 0.5, atol=1e-5)
    assert not len(center_points(make_ball(alpha=0.1), ring.positions).positions)
